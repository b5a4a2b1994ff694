"""Who is at fault: hosts that don't take part as they should, and failures of an attempt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.errors import ExitCode, InfrastructureError, JobError, PacelineError, UsageError
from paceline.launch.failures import WorkerFailure, root_cause
from paceline.launch.ssh.participants import Participant
from paceline.launch.ssh.rank_assignment import first_ranks

Problems = Mapping[str, PacelineError]
"""By the host's name, what is wrong with it."""

_KINDS = {ExitCode.USAGE: UsageError, ExitCode.JOB: JobError}


def problem_of(member: Participant, late: str) -> PacelineError:
    """Say what is wrong with a host that hasn't done what it should.

    Args:
        member: Its part.
        late: What is said of one that is only late.
    """
    if member.refused is not None:
        text, code = member.refused
        kind = _KINDS.get(ExitCode(code), InfrastructureError)
        return kind(f"{member.name}: {text}")
    if member.lost:
        return InfrastructureError(member.lost)
    if member.ended:
        words = "\n".join(member.last_words) or "it said nothing"
        return InfrastructureError(f"{member.name}: its process ended:\n{words}")
    return InfrastructureError(f"{member.name}: {late}")


def raise_first(problems: Problems) -> None:
    """Raise what is wrong with the hosts, as one error; nothing where all is well.

    Raises:
        PacelineError: Of the first host's kind, with all that is said.
    """
    errors = list(problems.values())
    if errors:
        raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors))))


def blame(members: Sequence[Participant], *, stopping: bool) -> tuple[WorkerFailure, ...]:
    """List an attempt's failures, the root cause first.

    Args:
        members: All parts, in the order of their ranks.
        stopping: Whether the user asked to stop.

    Raises:
        InfrastructureError: There are no results, and nobody says why.
    """
    firsts = first_ranks([member.sight for member in members if member.sight is not None])
    found: list[WorkerFailure] = []
    silent: list[WorkerFailure] = []
    for first, member in zip(firsts, members, strict=True):
        found += _told(member)
        if member.done is None and (member.lost or not stopping):
            (silent if member.killed else found).append(_of_host(member, first))
    found = found or silent
    if not found and not stopping:
        raise InfrastructureError("the workers ended without results, and none said why")
    return root_cause(found)


def _told(member: Participant) -> Iterator[WorkerFailure]:
    """Give a host's failures under the name that the user has for it, in our clock's time."""
    listed = (member.done or {}).get("failures")
    ahead_s = member.remote.connection.clock_offset_s or 0.0
    for content in listed if isinstance(listed, list) else []:
        failure = WorkerFailure.from_json(content)
        time_s = failure.time_s - ahead_s if failure.time_s is not None else None
        yield replace(failure, host=member.name, time_s=time_s)


def _of_host(member: Participant, first_rank: int) -> WorkerFailure:
    """Describe a host that went away, as a failure of its first worker."""
    words = "\n".join(member.last_words)
    refusal, code = member.refused or ("", ExitCode.INFRASTRUCTURE)
    why = member.lost or refusal or "its processes ended without a word"
    return WorkerFailure(
        rank=first_rank,
        host=member.name,
        step=None,
        exit_code=None,
        signal_name=None,
        kind="job" if code in (ExitCode.USAGE, ExitCode.JOB) else "infrastructure",
        error_type="",
        message=f"the host is lost: {why}" if member.lost else why,
        traceback="" if member.lost else words,
        operation="",
        time_s=member.ended_s,
    )
