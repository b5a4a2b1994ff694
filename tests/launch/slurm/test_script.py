"""What sbatch is given: a golden script, and arguments that stay arguments whatever is in them."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.slurm.options import SlurmOptions
from paceline.launch.slurm.script import (
    directive,
    make_submission,
    output_pattern,
    training_command,
)
from tests.launch.waiting import patient

GOLDEN = """\
#!/bin/bash
#SBATCH --job-name=paceline-digits
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=12:30:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH '--chdir=/home/me/my work'
#SBATCH '--output=/home/me/my work/runs/100%%/slurm/job-%j.log'
#SBATCH --open-mode=append
#SBATCH '--constraint=a100|h100'

# What the workers print shall be seen at once.
export PYTHONUNBUFFERED=1
# Newer versions of srun ignore sbatch's options for CPUs.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# Runs the workers, one a task, and requeues this job where they were asked to stop.
exec /opt/py/bin/python -P -m paceline.launch.slurm.batch '/home/me/my work/runs/100%' 3 \\
  srun --export=ALL --kill-on-bad-exit=0 --wait=60 \\
  /opt/py/bin/python -P -m paceline train digits --lr 0.1
"""
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def job(**changed: object) -> ClusterJob:
    usual: dict[str, object] = {
        "command": ("paceline", "train", "digits", "--workers", "4", "--lr", "0.1"),
        "name": "paceline-digits",
        "nodes": 2,
        "workers": None,
        "gpus_per_node": 4,
        "time_limit_s": 12.5 * 3600,
        "image": None,
        "detach": False,
        "dry_run": False,
        "max_restarts": 3,
        "directory": Path("/home/me/my work"),
        "run_dir": "runs/100%",
    }
    return ClusterJob(**(usual | changed))  # type: ignore[arg-type]


def test_golden() -> None:
    options = SlurmOptions(
        partition="gpu",
        account="lab",
        cpus_per_worker=8,
        slurm_grace="5m",
        slurm_arg=("--constraint=a100|h100",),
    )
    made = make_submission(job(), options, "/opt/py/bin/python")
    assert made.script == GOLDEN
    directives = [line for line in GOLDEN.splitlines() if line.startswith("#SBATCH ")]
    assert list(made.options) == [shlex.split(line)[1] for line in directives]


def test_what_is_not_said_is_left_to_slurm() -> None:
    made = make_submission(
        job(gpus_per_node=None, time_limit_s=None), SlurmOptions(slurm_requeue=False), "python"
    )
    text = " ".join(made.options)
    assert "--ntasks-per-node=1" in text
    assert "--no-requeue" in text
    for name in ("partition", "account", "gpus", "time=", "cpus"):
        assert f"--{name}" not in text


@pytest.mark.parametrize(
    ("limit_s", "asked"), [(3600.0, "1:00:00"), (3601.0, "1:01:00"), (90000.0, "25:00:00")]
)
def test_a_time_limit_is_never_cut_short(limit_s: float, asked: str) -> None:
    """Slurm counts in minutes."""
    made = make_submission(job(time_limit_s=limit_s), SlurmOptions(), "python")
    assert f"--time={asked}" in made.options


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=4))
def test_the_shell_runs_nothing_that_stands_in_an_argument(words: list[str]) -> None:
    command = ("paceline", "run", "train.py", "--", *words)
    script = make_submission(job(command=command), SlurmOptions(), "/bin/python").script
    head, found, rest = script.partition("exec /bin/python")
    assert found
    asked = f'set -- {rest}\nprintf "%s\\0" "$@"'
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        capture_output=True,
        check=True,
        timeout=patient(30),
        env={},
    )
    said = done.stdout.decode().split("\0")[:-1]
    assert said[-len(words) - 1 :] == ["--", *words]
    assert done.stderr == b""
    # sbatch reads lines of its own up to the first command.
    assert all(line.startswith("#") or not line for line in head.split("export")[0].splitlines())


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_sbatch_reads_a_word_back(word: str) -> None:
    assert read_as_sbatch(directive(word)) == word


def read_as_sbatch(text: str) -> str:
    """Read a word as sbatch does: quotes of both kinds, and backslashes in any of them."""
    word, quote, characters = "", "", iter(text)
    for c in characters:
        if c == "\\":
            word += next(characters)
        elif quote:
            word, quote = (word, "") if c == quote else (word + c, quote)
        elif c in "'\"":
            quote = c
        else:
            word += c
    return word


def test_workers_get_only_what_is_theirs() -> None:
    command = "paceline run --workers 2 t.py --max-restarts=5 --lr 1 -- --workers 7".split()
    assert training_command(command) == "paceline run t.py --lr 1 -- --workers 7".split()


def test_the_output_is_in_the_run_directory() -> None:
    assert output_pattern(job(run_dir="/a/%j")) == "/a/%%j/slurm/job-%j.log"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"image": "ghcr.io/me"}, "--slurm-arg=--container-image=ghcr.io/me"),
        ({"name": "a b"}, "--job-name is 'a b'"),
        ({"name": "a\n#SBATCH"}, "--job-name"),
        ({"directory": Path("/a\n#SBATCH --uid=0")}, "the working directory"),
        ({"run_dir": "a\\b"}, "the run directory"),
        ({"time_limit_s": 200.0}, "leaves no time to train"),
    ],
)
def test_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        make_submission(job(**changed), SlurmOptions(), "python")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("evil.sh", "not one option"),
        ("", "not one option"),
        ("--", "not one option"),
        ("--comment=a\n#SBATCH --uid=0", "not one option"),
        ("--array=0-9", "not an array"),
        ("-a0-9", "not an array"),
        ("--wrap=rm", "script is Paceline's"),
        ("--outp=x", "output is in the run directory"),
        ("--partition=gpu", "--partition"),
        ("-pgpu", "--partition"),
        ("--ntasks=4", "--workers"),
        ("--time=1:00:00", "--time-limit"),
        ("--no-requeue", "--no-slurm-requeue"),
    ],
)
def test_refused_arguments(argument: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SlurmOptions(slurm_arg=(argument,))


@pytest.mark.parametrize("argument", ["--qos=high", "-Cgpu", "--exclusive", "--gres=gpu:a100:4"])
def test_other_arguments_pass(argument: str) -> None:
    made = make_submission(job(), SlurmOptions(slurm_arg=(argument,)), "python")
    assert made.options[-1] == argument


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": "-x"},
        {"partition": ""},
        {"account": "a\nb"},
        {"cpus_per_worker": 0},
        {"slurm_grace": "soon"},
    ],
)
def test_refused_options(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SlurmOptions(**wrong)  # type: ignore[arg-type]
