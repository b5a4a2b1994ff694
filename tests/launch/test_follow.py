"""Following a job whose every answer the test gives."""

from collections.abc import Callable, Iterator

import pytest

from paceline.errors import ExitCode, InfrastructureError
from paceline.launch import follow as following
from paceline.launch.base import JobLostError, Outcome, SubmittedJob
from paceline.launch.follow import follow
from paceline.launch.signals import StopRequests

DONE = Outcome(code=ExitCode.DONE)
STOPPED = Outcome(code=ExitCode.RESUMABLE, reason="it was stopped")
Step = str | Outcome | Exception | Callable[[], str | Outcome]


class Scripted(SubmittedJob):
    """Answers each poll by the next step; notes what it was asked."""

    poll_s = 0.0

    def __init__(self, *steps: Step, texts: tuple[str | None, ...] = ()) -> None:
        super().__init__("job x", "kill x")
        self.asked: list[str] = []
        self._steps: Iterator[Step] = iter(steps)
        self._texts: Iterator[str | None] = iter(texts)
        self.cancelled: Outcome | None = None

    def poll(self) -> str | Outcome:
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step() if callable(step) else step

    def logs(self) -> str | None:
        return next(self._texts, None)

    def stop(self) -> None:
        self.asked.append("stop")

    def cancel(self) -> Outcome | None:
        self.asked.append("cancel")
        return self.cancelled

    def resume_hint(self) -> str:
        return "resume x"

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_S", 0.0)


@pytest.fixture
def stop() -> StopRequests:
    return StopRequests()


def ask(stop: StopRequests, text: str = "") -> Callable[[], str]:
    """Have the user ask to stop, once more, while the cluster is asked."""

    def step() -> str:
        stop.count += 1
        return text

    return step


def test_states_are_said_once_and_late_output_is_shown(
    stop: StopRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Scripted("waits", "waits", "runs", DONE, texts=("a", "", "", "b", "", "c", None))
    assert follow(job, stop) == ExitCode.DONE
    out, err = capsys.readouterr()
    assert (out, err) == ("abc", "waits\nruns\n")


def test_the_first_signal_stops_and_the_second_cancels(
    stop: StopRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Scripted(ask(stop), "stopping", ask(stop), "still", ask(stop), "still", STOPPED)
    assert follow(job, stop) == ExitCode.RESUMABLE
    assert job.asked == ["stop", "cancel"]
    out, err = capsys.readouterr()
    assert err.count("Stopping job x") == 1
    assert "paceline: job x ended: it was stopped" in err
    assert out == "resume x\n"


def test_two_signals_between_two_looks_stop_before_they_cancel(stop: StopRequests) -> None:
    job = Scripted("", STOPPED)
    stop.count = 2
    assert follow(job, stop) == ExitCode.RESUMABLE
    assert job.asked == ["stop", "cancel"]


def test_a_job_that_cannot_end_faster_is_left(stop: StopRequests) -> None:
    job = Scripted(ask(stop), ask(stop))
    job.cancelled = STOPPED
    assert follow(job, stop) == ExitCode.RESUMABLE


def test_a_job_that_does_not_stop_in_time_may_still_run(stop: StopRequests) -> None:
    job = Scripted(ask(stop), "stopping")
    job.stop_limit_s = -1.0
    with pytest.raises(JobLostError, match=r"within -1 s. job x may still run.*: kill x"):
        follow(job, stop)


def test_a_cluster_may_be_silent_for_a_while(
    stop: StopRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    silence = InfrastructureError("no answer")
    assert follow(Scripted("runs", silence, silence, DONE), stop) == ExitCode.DONE
    assert capsys.readouterr().err == "runs\nno answer\n"
    lost = Scripted("runs", silence)
    lost.patience_s = -1.0
    with pytest.raises(
        JobLostError, match=r"no answer. job x may still run, and cost\. Look, .*: kill x"
    ):
        follow(lost, stop)


def test_one_can_leave_a_silent_cluster_by_a_second_signal(stop: StopRequests) -> None:
    silence = InfrastructureError("no answer")
    stop.count = 2
    with pytest.raises(JobLostError, match="kill x"):
        follow(Scripted(silence, silence), stop)


def test_a_job_that_is_lost_is_not_asked_again(stop: StopRequests) -> None:
    with pytest.raises(JobLostError, match=r"^gone$"):
        follow(Scripted(JobLostError("gone"), DONE), stop)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (ExitCode.JOB, False),
        (ExitCode.USAGE, False),
        (ExitCode.INFRASTRUCTURE, True),
        (ExitCode.RESUMABLE, True),
    ],
)
def test_how_to_resume_is_told_where_that_helps(
    code: ExitCode, hint: bool, stop: StopRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Outcome(code=code, reason="why", details="node 1: traceback")
    assert follow(Scripted(ended), stop) == code
    out, err = capsys.readouterr()
    assert err == "node 1: traceback\npaceline: job x ended: why\n"
    assert out == ("resume x\n" if hint else "")
