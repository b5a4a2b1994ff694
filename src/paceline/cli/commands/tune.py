"""`paceline tune`: what makes a training faster on this machine? Tries it, in pairs of trials."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.output import check_place
from paceline.cli.target import NOT_OF_TRIALS, Target, list_training_options, parse_with_own
from paceline.data.options import DEFAULT_GLOBAL_BATCH
from paceline.errors import ExitCode, UsageError
from paceline.files import read_json_object, why_unreadable, write_atomic, write_json, writing
from paceline.launch.signals import signals_raised
from paceline.options.command_line import (
    flag,
    names_something,
    show_help,
    wants_help,
    words,
)
from paceline.options.config_file import CONFIG, as_toml
from paceline.options.durations import format_clock, format_duration, parse_duration_s
from paceline.options.fields import OptionField, OptionValue, option_fields
from paceline.options.figures import show_whole_percent
from paceline.options.shell import command_line
from paceline.options.text import aligned, line_width
from paceline.results.json_object import JsonObject, as_read_back, section
from paceline.results.run_directory import RunDirectory
from paceline.results.study import TUNE_JSON
from paceline.runtime.placement import check_workers, local_place
from paceline.scaling.commands import (
    HOSTS,
    StudyCommands,
    StudyHosts,
    fills,
    idle_without,
    print_line,
    spelled,
    usual_method,
    with_options,
    without_idle,
)
from paceline.scaling.options import TuneOptions
from paceline.scaling.plan import Size, first_slots, idle_of_methods
from paceline.scaling.study_directory import StudyDirectory
from paceline.scaling.subprocess_runner import InterruptedStudyError
from paceline.scaling.tuner import TunedTraining, Tuner
from paceline.scaling.tuning import Tried
from paceline.training.config import TrainConfig, merge
from paceline.training.recipe import Recipe

_USAGE = "paceline tune RECIPE|SCRIPT.py [options] [-- the script's own arguments]"
_ABOUT = (
    "Find settings that make a training faster on this machine: short trials of each, next to "
    "trials of the training as it is, until 95 % bounds say whether it gains. What gains is "
    "measured once more together, and written to a file for --config. What may change the result "
    "is only taken where --check-quality has compared whole trainings. Ctrl-C keeps what is "
    "measured; the same command with --tune-dir resumes it."
)
_NOT_OURS = NOT_OF_TRIALS | {"sync"}
"""Options of training that the trials settle, or that have no use in them."""
_HEAD = "# By paceline tune: "


@dataclass(frozen=True, kw_only=True)
class _TuneRequest:
    """What the command line says."""

    tokens: tuple[str, ...]
    target: Target
    options: TuneOptions
    hosts: StudyHosts
    given: Mapping[str, OptionValue]
    """Options of training, and the recipe's own arguments."""
    settings: Mapping[str, OptionValue]
    """Options of training, with the recipe's."""
    known: frozenset[str]
    """Names of the options that the training has."""
    place: Path

    @property
    def settled(self) -> JsonObject:
        """What must be the same where a tuning goes on."""
        content = {
            "recipe or script": self.target.name,
            "--seconds": self.options.seconds,
            "hosts": [f"{host.name}:{host.slots}" for host in self.hosts.listed],
            "the script's arguments": list(self.target.script_args),
            **{flag(name): value for name, value in self.given.items()},
        }
        return as_read_back(content)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens) and not names_something(tokens):
        show_help(_USAGE, _ABOUT, _listed_options(None, is_script=True), tokens)
    request = _read(tokens)
    return _in_its_directory(request, _tuner(request))


def _in_its_directory(request: _TuneRequest, tuner: Tuner) -> int:
    run = RunDirectory(request.place)
    # A directory that the user named may hold this tuning, to resume; another one is always new.
    if request.options.tune_dir is None:
        run = run.claim()
        request, tuner.place = replace(request, place=run.path), run.path
    _make(run)
    with run.lock():
        _prepare(request)
        try:
            with signals_raised():
                tuner.run()
        # Stopped: what is measured by then is kept, and shown.
        except (InterruptedStudyError, KeyboardInterrupt):
            tuner.tried = [replace(tried, is_stopped=True) for tried in tuner.tried]
            _write(request, tuner)
            print(f"\n{_as_text(tuner)}\nStopped. Resume with what is missing: {_again(request)}")
            return ExitCode.RESUMABLE
        _write(request, tuner)
    return _end(request, tuner)


def _listed_options(recipe: Recipe | None, *, is_script: bool) -> list[OptionField]:
    training = list_training_options(recipe, is_script=is_script, without=_NOT_OURS)
    return [*option_fields(TuneOptions, "Tune"), CONFIG, *HOSTS, *training]


def _read(tokens: Sequence[str]) -> _TuneRequest:
    """Read the command line.

    Raises:
        UsageError: Something in it can't be.
    """
    target = Target.read(tokens, _USAGE, "what to tune")
    recipe, command = target.recipe, command_line("tune", target.name)
    listed = _listed_options(recipe, is_script=target.is_script)
    if wants_help(target.own):
        show_help(command, _ABOUT, listed, target.own)
    target.check()
    if fills(target.script_args):
        raise UsageError("{global_batch} in a script's arguments is for paceline scale")
    options, parsed = parse_with_own(TuneOptions, command, _ABOUT, target.own, listed, _NOT_OURS)
    # What no trial can use is noted and left out, or refused; hosts are apart from what is trained.
    usual = usual_method(parsed.values, target.settings)
    idle = dict.fromkeys(
        idle_of_methods((usual,), parsed.values), f"has no effect in trials with --sync {usual}"
    )
    if not options.check_quality:
        idle |= idle_without("--check-quality", parsed.values, is_script=target.is_script)
    given = without_idle(parsed, idle)
    _check_output(Path(options.output).expanduser())
    hosts = StudyHosts.split_from(given)
    arguments = {argument.name for argument in recipe.arguments()} if recipe else set()
    training = {name: value for name, value in given.items() if name not in arguments}
    return _TuneRequest(
        tokens=tuple(tokens),
        target=target,
        options=options,
        hosts=hosts,
        given=given,
        settings=merge(training, target.settings),
        known=frozenset(option.name for option in listed) | {"sync"},
        place=StudyDirectory.of(options.tune_dir, f"tune-{target.file_name}").path,
    )


def _check_output(path: Path) -> None:
    """Refuse a file that can't be written at the end, or is somebody else's.

    Raises:
        UsageError: It is one.
    """
    check_place("--output", path)
    try:
        is_other = path.exists() and not path.read_bytes().startswith(_HEAD.encode())
    except OSError as error:
        raise UsageError(f"{path} can't be read: {why_unreadable(error)}") from error
    if is_other:
        raise UsageError(f"{path} is there already, and not of paceline tune: say another --output")


def _make(run: RunDirectory) -> None:
    """Make the directory, where there isn't one of a tuning.

    Raises:
        UsageError: It can't be made, or holds something else.
    """
    holds = {each.name for each in run.path.iterdir()} if run.path.is_dir() else set()
    if holds - {"run.lock"} and TUNE_JSON not in holds:
        raise UsageError(f"{run.path} holds something else: give another --tune-dir")
    try:
        run.path.mkdir(run.directory_mode, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{run.path} can't be made: {why_unreadable(error)}") from error


def _prepare(request: _TuneRequest) -> None:
    """See that the directory holds the same tuning, if any.

    Raises:
        UsageError: It holds something else.
    """
    path = request.place / TUNE_JSON
    if path.exists():
        try:
            before = section(read_json_object(path), "asked")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} can't be read: {error}") from error
        for name in sorted({*before, *request.settled}):
            if before.get(name) != request.settled.get(name):
                raise UsageError(
                    f"{request.place} is of another tuning: {name} was {before.get(name)} and is "
                    f"{request.settled.get(name)} now. Give another --tune-dir"
                )
    else:
        with writing(path):
            write_json(path, {"kind": "tune", "asked": request.settled})


def _tuner(request: _TuneRequest) -> Tuner:
    """Settle what the training is, as it stands.

    Raises:
        UsageError: It can't be trained so.
    """
    config = TrainConfig.from_settings(request.settings)
    target, hosts = request.target, request.hosts
    if hosts.listed and "workers" in request.given:
        raise UsageError("--workers is for this machine; with --hosts each has its own number")
    workers = hosts.slots or local_place(config).workers
    check_workers(config, workers)
    data = config.data
    batch = data.batch_per_worker * workers if data.batch_per_worker else data.global_batch
    if batch is None and not target.is_script:
        batch = DEFAULT_GLOBAL_BATCH

    def commands(given: Mapping[str, OptionValue], seconds: float) -> StudyCommands:
        """Make what writes the commands of trials with these options, each of so many seconds."""
        return StudyCommands(
            target=target.name,
            is_script=target.is_script,
            given={n: v for n, v in given.items() if n != "sync"},  # it is that of the size
            methods={},
            names_method="sync" in given,
            hosts=hosts,
            hostfiles=request.place / "hosts",
            seconds=seconds,
            script_args=target.script_args,
        )

    training = TunedTraining(
        name=target.name,
        given={name: value for name, value in request.given.items() if name != "workers"},
        fixed=frozenset(request.given),
        known=request.known,
        commands=commands,
        size=Size(
            workers=workers,
            nodes=len(first_slots(hosts.listed, workers)) or 1,
            method=usual_method(request.given, target.settings),
        ),
        batch=batch,
    )
    return Tuner(
        place=request.place,
        training=training,
        budget_s=parse_duration_s(request.options.budget),
        seconds=request.options.seconds,
        check_quality=request.options.check_quality,
        print_line=print_line,
    )


def _write(request: _TuneRequest, tuner: Tuner) -> None:
    """Keep what was found, for programs."""
    content = {
        "kind": "tune",
        "asked": request.settled,
        "tried": [_described(tried) for tried in tuner.tried],
        "confirmed": _described(tuner.confirmed) if tuner.confirmed else None,
    }
    path = request.place / TUNE_JSON
    with writing(path):
        write_json(path, content)


def _described(tried: Tried) -> Mapping[str, object]:
    gain = tried.gain
    low, high = gain.bounds
    return {
        "name": tried.change.name,
        "settings": tried.change.settings,
        "kind": tried.change.kind,
        "ratios": gain.ratios,
        "mean": gain.mean if gain.ratios else None,
        "low": low if math.isfinite(high) else None,
        "high": high if math.isfinite(high) else None,
        "start_s": gain.start_s,
        "losses": tried.losses,
        "verdict": tried.verdict,
    }


def _as_text(tuner: Tuner) -> str:
    """Write a table of what was tried, and what else may help."""
    rows: list[tuple[str, ...]] = [
        ("change", "what it changes", "speed", "95 % bounds", "pays after", "verdict")
    ]
    rows += [_row(tried, _options(tried)) for tried in tuner.tried]
    if tuner.confirmed is not None:
        rows.append(_row(tuner.confirmed, "measured again: " + _options(tuner.confirmed)))
    if not any(row[4] for row in rows[1:]):
        rows = [(*row[:4], row[5]) for row in rows]
    last = len(rows[0]) - 1
    text = "\n".join(aligned(rows, left={0, 1, last}, width=line_width(sys.maxsize)))
    if not tuner.tried:
        text = "Nothing was tried yet."
    if len(tuner.usual) > 1:
        low, high = min(tuner.usual), max(tuner.usual)
        text += (
            f"\n\nAs it is: {low:,.0f} to {high:,.0f} samples/s in {len(tuner.usual)} trials, "
            f"{show_whole_percent(high / low - 1)} apart."
        )
    return f"{text}\n{tuner.advice}." if tuner.advice else text


def _row(tried: Tried, name: str) -> tuple[str, ...]:
    gain = tried.gain
    low, high = gain.bounds
    return (
        name,
        tried.change.kind,
        f"{gain.mean:.2f} x" if gain.ratios else "",
        f"{low:.2f} to {high:.2f}" if math.isfinite(high) else "",
        format_clock(gain.pays_after_s) if gain.start_s and gain.mean > 1 else "",
        tried.verdict,
    )


def _options(tried: Tried) -> str:
    return " ".join(words(tried.change.settings))


def _end(request: _TuneRequest, tuner: Tuner) -> int:
    print(f"\n{_as_text(tuner)}\n", flush=True)
    # Only what was measured again, and is faster still, is written down.
    best = tuner.confirmed
    if best is None or not best.is_recommended:
        return _end_as_it_is(request, tuner)
    settings, (low, high) = best.change.settings, best.gain.bounds
    speed = f"{best.gain.mean:.2f} times as fast ({low:.2f} to {high:.2f})"
    lines = [
        f"{_HEAD}{request.target.name} is {speed}",
        *(as_toml(n, v) for n, v in settings.items()),
    ]
    # As a file for --config; for a script also as arguments of `paceline.session`.
    path = Path(request.options.output).expanduser()
    with writing(path):
        write_atomic(path, ("\n".join(lines) + "\n").encode())
    print(f"{speed.capitalize()}, with {path}:\n  {_command(request, path)}")
    inside = {n: v for n, v in settings.items() if n not in ("workers", "threads")}
    if request.target.is_script and inside:
        listed = ", ".join(f"{name}={value!r}" for name, value in inside.items())
        print(f"Or in the script: paceline.session({listed})")
    if best.gain.start_s:
        print(
            f"It starts {format_duration(best.gain.start_s)} later, which pays in trainings of "
            f"more than {format_duration(best.gain.pays_after_s)}."
        )
    return ExitCode.DONE


def _end_as_it_is(request: _TuneRequest, tuner: Tuner) -> int:
    """Say that nothing is to be taken, and what may settle more."""
    name, verdicts = request.target.name, [tried.verdict for tried in tuner.tried]
    if any("--check-quality" in verdict for verdict in verdicts):
        again = _again(request, "--check-quality")
        print(
            f"What is sure to make {name} faster may change its result. Whole trainings from three "
            f"seeds say whether that is as good: {again}"
        )
    else:
        print(f"Nothing that was tried is sure to make {name} faster: leave it as it is.")
    if any("no time left" in verdict for verdict in verdicts):
        if any(tried.gain.ratios for tried in tuner.tried) or tuner.turn_s < tuner.budget_s:
            print(f"Not all of it is settled. With as much time again: {_again(request)}")
        else:
            least = format_duration(tuner.turn_s)
            print(f"--budget is too short: three trials beside each other take {least} here.")
    return ExitCode.DONE


def _command(request: _TuneRequest, path: Path) -> str:
    given = spelled({**request.hosts.given, **request.given})
    target = request.target
    script_args = ["--", *target.script_args] if target.script_args else []
    word = "run" if target.is_script else "train"
    return command_line(word, target.name, *given, "--config", str(path), *script_args)


def _again(request: _TuneRequest, *more: str) -> str:
    place = ("--tune-dir", str(request.place)) if request.options.tune_dir is None else ()
    return command_line("tune", *with_options(request.tokens, (*more, *place)))
