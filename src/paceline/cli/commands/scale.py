"""`paceline scale`: how does a training scale? Measures it on several numbers of workers."""

import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from paceline._version import __version__
from paceline.cli.scale_options import ABOUT, USAGE, ScaleRequest, listed_options, read
from paceline.errors import ExitCode, PacelineError, UsageError
from paceline.launch.signals import signals_raised
from paceline.options.command_line import names_something, show_help, wants_help
from paceline.options.shell import command_line
from paceline.options.text import printable
from paceline.results.run_directory import RunDirectory
from paceline.results.study import Study
from paceline.scaling.commands import fills, print_line, with_options
from paceline.scaling.options import PLAIN
from paceline.scaling.plan import make_plan, method_settings
from paceline.scaling.prediction_report import predict_study
from paceline.scaling.result import summarise
from paceline.scaling.runner import Runner, exit_code_of
from paceline.scaling.study_directory import StudyDirectory
from paceline.scaling.subprocess_runner import InterruptedStudyError
from paceline.scaling.table import as_text


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens) and not names_something(tokens):
        show_help(USAGE, ABOUT, listed_options(None, is_script=True), tokens)
    return _in_its_directory(read(tokens))


def _in_its_directory(request: ScaleRequest) -> int:
    was_there = request.place.path.is_dir() and request.options.study_dir is not None
    shared = request.commands.given.get("share_run_dir") is True
    if request.options.study_dir is None:
        request = _claimed(request, shared=shared)
    is_new = request.place.prepare(request.settled, request.methods, shared=shared)
    with request.place.lock():
        try:
            return _scale(request)
        except UsageError:
            if is_new:
                request.place.discard(keep=was_there)
            raise


def _claimed(request: ScaleRequest, *, shared: bool) -> ScaleRequest:
    """Give a study whose user named no directory one that no other study has."""
    try:
        path = RunDirectory(request.place.path, shared=shared).claim().path
    except UsageError as error:
        raise UsageError(str(error).replace("--run-dir", "--study-dir")) from error
    commands = replace(request.commands, hostfiles=path / "hosts")
    return replace(request, place=StudyDirectory(path), commands=commands)


def _scale(request: ScaleRequest) -> int:
    options, place = request.options, request.place
    study = Study(
        recipe=request.commands.target,
        command=("paceline", "scale", *request.tokens),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        paceline=__version__,
        hosts=tuple(host.name for host in request.commands.hosts.listed) or (socket.gethostname(),),
        mode=options.mode,
        repeats=options.repeats,
        seconds=options.seconds,
        asked=request.settled,
    )
    study = place.begun(study)
    # The runner writes the study after each training, so that it can be stopped at any time.
    runner = Runner(
        place=place.path,
        commands=request.commands,
        mode=options.mode,
        seconds=options.seconds,
        batch=request.batch,
        own_batch=fills(request.commands.script_args)
        or options.mode == "strong"
        or all(size.workers == 1 for size in request.sizes),
        print_line=print_line,
        keep=lambda: place.write(_as_it_stands(request, study, runner)),
    )
    runner.keep()
    _announce(request)
    interrupted = False
    try:
        with signals_raised():
            runner.measure(request.plan)
            if options.train:
                runner.train(request.sizes)
    except (InterruptedStudyError, KeyboardInterrupt):
        interrupted = True
    return _end(request, _as_it_stands(request, study, runner), runner, interrupted=interrupted)


def _as_it_stands(request: ScaleRequest, study: Study, runner: Runner) -> Study:
    sizes = request.place.sizes_besides(request.sizes, request.commands.hosts.listed)
    plan = make_plan(sizes, request.place.rounds(request.options.repeats))
    options: dict[str, Mapping[str, object]] = {}
    for method in (*request.methods, PLAIN):
        settings = method_settings(method, request.commands.methods, warm=False)
        options[method] = {name: value for name, value in settings.items() if name != "sync"}
    study = summarise(study, sizes, runner.measured(plan), options, runner.trained(sizes))
    return replace(study, notes=(*study.notes, *runner.problems))


def _announce(request: ScaleRequest) -> None:
    counts = sorted({size.workers for size in request.sizes})
    batch = "its own batch" if request.batch is None else f"batch {request.batch:,}"
    print_line(
        f"Scaling of {request.commands.target}: {request.options.mode}, {batch} on one worker; "
        f"workers {', '.join(map(str, counts))}; {len(request.plan)} measurements of "
        f"{request.options.seconds:g} s in {request.place.path}"
    )


def _end(request: ScaleRequest, study: Study, runner: Runner, *, interrupted: bool) -> int:
    """Write and tell what was found. Returns the exit code."""
    request.place.write(study)
    study = _with_prediction(request.place, study)
    report = (
        _write_report(request.place) if any(size.images_per_s for size in study.sizes) else None
    )
    print(printable(f"\n{as_text(study)}\n"), flush=True)
    files = [request.place.study_json, request.place.study_csv, *([report] if report else [])]
    print("Written: " + "\n         ".join(map(str, files)), flush=True)
    if interrupted:
        print(f"Stopped. Resume with what is missing: {_again(request)}", flush=True)
        return ExitCode.RESUMABLE
    return exit_code_of(runner.measured(request.plan), runner.failures)


def _with_prediction(place: StudyDirectory, study: Study) -> Study:
    """Add what follows for more hosts, where several were measured."""
    if study.baseline_images_per_s is None or study.not_reliable:
        return study
    try:
        prediction = predict_study(place.path)
    except PacelineError as error:
        return replace(study, notes=(*study.notes, f"There is no prediction: {error}"))
    if prediction is not None:
        study = replace(study, prediction=prediction)
        place.write(study)
    return study


def _write_report(place: StudyDirectory) -> Path | None:
    """Write the page; whatever becomes of it, the study is done."""
    from paceline.report.scaling.page import write_scaling_report

    try:
        return write_scaling_report(place.path)
    except Exception:  # noqa: BLE001  # a fault of ours must not cost the study its end
        traceback.print_exc()
        again = command_line("report", place.path)
        print(f"paceline: the report could not be written. Try again: {again}", file=sys.stderr)
        return None


def _again(request: ScaleRequest) -> str:
    place = ("--study-dir", str(request.place.path)) if request.options.study_dir is None else ()
    return command_line("scale", *with_options(request.tokens, place))
