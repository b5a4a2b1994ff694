"""A run directory and a study's as `paceline train` and `paceline scale` left them: read, and
written again byte by byte. Only the host's name and paths were changed in them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import DataError, PacelineError, UsageError
from paceline.files import write_json
from paceline.report.load_run import read_run
from paceline.results.metrics_table import COLUMNS, read_metrics, start_table
from paceline.results.profile import StepProfile
from paceline.results.run_directory import RunDirectory
from paceline.results.study import Measured, Study, read_study, require_study
from paceline.scaling.measurement import read_measured, read_whole
from paceline.scaling.plan import Size, make_sizes
from paceline.scaling.prediction_inputs import read_inputs
from paceline.scaling.result import summarise
from paceline.scaling.study_directory import StudyDirectory
from paceline.training.run_record.previous_run import PreviousRun

GOLDEN = Path(__file__).parent / "golden"
_OF_THE_COMMAND = (
    *("recipe", "command", "started_at", "paceline", "hosts"),
    *("mode", "repeats", "seconds", "asked"),
)
RUN, STUDY = RunDirectory(GOLDEN / "run"), GOLDEN / "study"


def _make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a list": lambda path: path.write_text("[1]"),
    "nested too deeply": lambda path: path.write_text('{"a": ' * 1000 + "1" + "}" * 1000),
    "a format to come": lambda path: path.write_text('{"format": 99, "kind": "scale"}'),
    "NUL bytes": lambda path: path.write_bytes(bytes(4096)),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "a named pipe": _make_pipe,
}


@pytest.fixture
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of both directories in which `run.json` and `study.json` are damaged."""
    copy = tmp_path / "golden"
    shutil.copytree(GOLDEN, copy)
    for path in (copy / "run" / "run.json", copy / "study" / "study.json"):
        DAMAGES[request.param](path)
    return copy


def test_a_run_directory_is_read() -> None:
    run, summary = RUN.read_run(), RUN.read_summary()
    assert (run["format"], run["recipe"], summary["stopped_because"]) == (1, "digits", "epochs")
    past = PreviousRun.read(RUN)
    assert (past.world_size, past.steps_per_epoch, past.given) == (2, 23, ("epochs",))
    assert past.config().data.global_batch == 64
    assert RUN.newest_step() == summary["steps"] == 46
    metrics = read_metrics(RUN.metrics_csv, [])
    assert tuple(metrics.columns) == COLUMNS
    assert metrics.last("val_loss") == pytest.approx(summary["val_loss"], rel=1e-8)
    profile = StepProfile.read(RUN.profile_json)
    assert (profile.world_size, profile.sync, profile.device) == (2, "allreduce", "cpu")


def test_the_files_of_a_run_are_written_as_they_were(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", RUN.read_run())
    write_json(tmp_path / "summary.json", RUN.read_summary())
    (tmp_path / "profile.json").write_text(StepProfile.read(RUN.profile_json).to_json())
    shutil.copy(RUN.metrics_csv, tmp_path)
    start_table(tmp_path / "metrics.csv", completed=2)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (RUN.path / path.name).read_bytes(), path.name


def test_a_study_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    study, problems = read_study(STUDY)
    assert problems == ()
    assert study == require_study(STUDY, sizes=True, settings=True)
    assert [(size.workers, size.method, len(size.repeats)) for size in study.sizes] == [
        (1, "allreduce", 2),
        (2, "allreduce", 2),
        (2, "powersgd", 2),
    ]
    assert study.sizes[2].method_options["powersgd_rank"] == 4
    StudyDirectory(tmp_path).write(study)
    for name in ("study.json", "study.csv"):
        assert (tmp_path / name).read_bytes() == (STUDY / name).read_bytes()


def test_measurements_are_read_and_written_as_they_were(tmp_path: Path) -> None:
    for path in (STUDY / "measured").iterdir():
        record = Measured.read(path)
        assert record is not None
        record.write(tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    for name in ("1-allreduce-1", "1-allreduce-2", "2-powersgd-1"):
        record = Measured.read(STUDY / "measured" / f"{name}.json")
        assert record is not None
        run = RunDirectory(STUDY / record.run_dir)
        again = read_measured(run, record.run_dir, record.wall_s, name.split("-")[1])
        assert again == record


def test_a_study_follows_from_its_measurements(tmp_path: Path) -> None:
    kept = require_study(STUDY)
    sizes = make_sizes([2], ["allreduce", "powersgd"], ())
    found: dict[Size, list[Measured]] = {}
    for size in sizes:
        paths = (STUDY / "measured" / f"{size.name}-{number}.json" for number in (1, 2))
        found[size] = [record for path in paths if (record := Measured.read(path))]
    trained = {
        size: whole
        for size in sizes
        if (
            whole := read_whole(RunDirectory(STUDY / "trained" / size.name), f"trained/{size.name}")
        )
    }
    asked = Study(
        **{name: getattr(kept, name) for name in _OF_THE_COMMAND}  # what `scale` begins with
    )
    again = summarise(asked, sizes, found, {"powersgd": {"powersgd_rank": 4}}, trained)
    write_json(tmp_path / "study.json", again.to_json())
    assert (tmp_path / "study.json").read_bytes() == (STUDY / "study.json").read_bytes()


def test_what_predictions_take_from_a_study() -> None:
    evidence = read_inputs(STUDY)
    assert evidence.profile.global_batch == 64
    assert [method.sync for method in evidence.methods] == ["allreduce", "powersgd"]
    assert evidence.methods[1].powersgd_rank == 4
    assert evidence.sizes == ()  # one host


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_what_is_damaged_is_refused_in_a_sentence(damaged: Path) -> None:
    reads: list[tuple[type[PacelineError], Callable[[], object]]] = [
        (UsageError, RunDirectory(damaged / "run").read_run),
        (UsageError, lambda: StudyDirectory(damaged / "study").prepare({})),
        (PacelineError, lambda: read_inputs(damaged / "study")),  # a pipe isn't a file: none
    ]
    for kind, read in reads:
        with pytest.raises(kind, match=r"(run|study)\.json") as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_a_report_says_what_is_damaged(damaged: Path) -> None:
    study, problems = read_study(damaged / "study")
    assert study.sizes == ()
    assert problems[0].startswith("study.json")
    report = read_run(RunDirectory(damaged / "run"))
    assert len(report.metrics) == 2
    assert all("run.json" in problem for problem in report.problems)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": "two"},
        {"workers": 0},
        {"nodes": -1},
        {"method_options": 3},
        {"step_s": {"median": "fast", "low": 1.0, "high": 2.0}},
        {"step_s": 3},
        {"method_options": {"powersgd_rank": "often"}},
    ],
    ids=str,
)
def test_no_prediction_is_made_from_a_wrong_figure(tmp_path: Path, wrong: object) -> None:
    study = require_study(STUDY).to_json()
    sizes = [{**size, **wrong} for size in study["sizes"]]  # type: ignore[attr-defined, dict-item]
    write_json(tmp_path / "study.json", {**study, "sizes": sizes})
    with pytest.raises(DataError, match=r"study\.json isn't a study of Paceline: [^\n]+$"):
        read_inputs(tmp_path)
