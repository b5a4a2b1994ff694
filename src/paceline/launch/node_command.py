"""Builds the command that a cluster runs on each node, and names that clusters accept. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.errors import ExitCode
from paceline.launch.cluster import ClusterJob
from paceline.launch.continuing import without_option

CONTINUING = ("-P", "-m", "paceline.launch.continuing")
_RUN_DIR, _WORKERS = "--run-dir", "--workers"
_MAX_LABEL_LENGTH = 63
_BY_WEIGHT = (ExitCode.JOB, ExitCode.USAGE, ExitCode.INFRASTRUCTURE, ExitCode.RESUMABLE)


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """What one node's command needs to know: the submission, and where the run directory is."""

    submission: str
    """Told apart from every other submission, also of a job of the same name."""
    run_dir: str
    """On the node: absolute, or relative to the directory in which the node's command starts."""
    host: str = ""
    """Of rank 0, where no variable on the node says it: the node waits until this name has an
    address, and sets no variable."""
    max_restarts: int | None = None
    """Starts in a row without a newer snapshot that the node allows itself, where the cluster
    doesn't count them."""


def node_command(job: ClusterJob, run: NodeRun, python: str = "python3") -> list[str]:
    """Write what each node runs: `paceline train`, or `resume` where this job had begun it."""
    command = [python, *CONTINUING, _RUN_DIR, run.run_dir, "--submission", run.submission]
    if run.host:
        command += ["--host", run.host]
    if run.max_restarts is not None:
        command += ["--max-restarts", str(run.max_restarts)]
    if job.shared:
        command.append("--shared")
    if job.resume:
        command.append("--resume")
    return [*command, "--", *train_command(job, run.run_dir)]


def train_command(job: ClusterJob, run_dir: str) -> list[str]:
    """Give the command's words after `paceline`, with the node's run directory and workers."""
    command = list(job.command)
    if command[:1] == ["paceline"]:
        del command[0]
    head, own = command[:2], command[2:]
    # A script's own arguments stay behind Paceline's options, whatever they are called.
    script = own[own.index("--") :] if "--" in own else []
    options = without_option(own[: len(own) - len(script)], _RUN_DIR)
    if job.workers is not None and not _has(options, _WORKERS):
        options += [_WORKERS, str(job.workers)]
    if head[0] == "resume":
        return ["resume", run_dir, *options]
    return [*head, *options, _RUN_DIR, run_dir, *script]


def run_dir_on(volume: str, run_dir: str) -> str:
    """Place a run directory below where a volume is mounted; one that lies there already stays."""
    root, path = PurePosixPath(volume), PurePosixPath(run_dir)
    if path.is_relative_to(root):
        return str(path)
    return str(root / (path.name if path.is_absolute() else path))


def label(name: str, submission: str, most: int = _MAX_LABEL_LENGTH) -> str:
    """Make a name that DNS, and so a cluster, takes (RFC 1123), different for each submission.

    Args:
        name: As the user has it.
        submission: Lowercase letters and digits.
        most: How long the name may be.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():  # a Service's name begins with a letter (RFC 1035)
        plain = f"job-{plain}".strip("-")
    return f"{plain[: most - len(submission) - 1].rstrip('-')}-{submission}"


def how_to_resume(run_dir: str) -> str:
    """Say how a training is resumed whose run directory only the cluster sees."""
    return (
        "To resume from the newest snapshot, give the same command with --resume and "
        f"--run-dir {run_dir}"
    )


def exit_code_of_nodes(codes: Iterable[int | None]) -> int:
    """Choose a training's exit code: one that is its own fault counts before its consequences.

    Args:
        codes: Of the nodes, of all attempts; None where one isn't known.
    """
    # Done only if all nodes say so: one that is unknown counts as an infrastructure failure.
    distinct = set(codes)
    if distinct == {0}:
        return ExitCode.DONE
    return next((int(code) for code in _BY_WEIGHT if code in distinct), ExitCode.INFRASTRUCTURE)


def _has(command: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in command)
