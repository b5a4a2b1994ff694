"""`paceline verify`: is a training the same on any number of workers? Trains on each, compares."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.options import DEFAULT_GLOBAL_BATCH, choose_global_batch
from paceline.distributed.environment import current_variables
from paceline.errors import ExitCode, JobError, UsageError
from paceline.files import write_json
from paceline.launch.failures import WorkerFailure, one_line
from paceline.launch.restart_policy import Policy
from paceline.launch.scratch import own_directory_is, scratch_directory
from paceline.launch.worker_count import (
    check_machine,
    threads_per_worker,
    usable_cores,
)
from paceline.options.command_line import (
    note,
    parse_options,
    part_script_args,
    show_help,
    take_word,
    wants_help,
)
from paceline.options.command_line import with_defaults as shown_with
from paceline.options.fields import OptionField, OptionValue
from paceline.options.figures import plural
from paceline.options.quantities import parse_count
from paceline.options.shell import command_line
from paceline.options.text import printable
from paceline.recipes.registry import reference_of
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import count_gpus
from paceline.runtime.script_options import script_options
from paceline.training.config import TrainConfig, TrainRequest, merge, training_options
from paceline.training.recipe import Recipe, absolute_reference, load_recipe
from paceline.verify.landlock import landlock_version

if TYPE_CHECKING:
    from paceline.verify.text_report import VerifyResult
    from paceline.verify.trace import Trace

ENTRY = "paceline.script.verified:run_watched"
PRELOAD = ("paceline.script.verified", "torch._dynamo")
_USAGE = "paceline verify RECIPE|SCRIPT.py [options] [-- the script's own arguments]"
_ABOUT = (
    "Train the same steps on several numbers of workers, one after the other, and compare samples, "
    "losses, gradients and weights step by step. A script may be written for paceline.session(), "
    "or be plain PyTorch as torchrun starts it, or by mp.spawn: it runs unchanged; {workers} in "
    "its arguments stands for their number. Where there are fewer GPUs than workers, all train on "
    "the CPU. What it writes is kept apart, and thrown away. Exit code 0: the same bits, or the "
    "same to rounding; 65: something differs or is wrong."
)
_OPTIONS = (
    OptionField(
        name="workers",
        annotation=str,
        default="1,2",
        help="Numbers of workers to train on; the others are held against the first.",
        group="Verify",
    ),
    OptionField(
        name="steps",
        annotation=int,
        default=50,
        help="Steps after which an epoch is cut off. Two epochs are trained.",
        group="Verify",
    ),
    OptionField(
        name="tolerance",
        annotation=float | None,
        default=None,
        help="Relative difference of gradients and weights that counts as rounding. Default: "
        "measured, by one more training that is disturbed in its last bits.",
        group="Verify",
    ),
    OptionField(
        name="json",
        annotation=str | None,
        default=None,
        help="Also write all that was found to this file.",
        group="Verify",
    ),
)
_OWN = {option.name for option in _OPTIONS}
_NOT_OURS = {"workers", "max_restarts", "on", "rank", "world_size", "local_rank", "init_method"}
"""Options of training that say where workers run: the verification does."""
_NOT_OURS |= {"name", "tag", "note"}  # nothing is kept
_TIMEOUT_S = 120.0
_WORKERS = "{workers}"
"""Stands for the number of workers in a script's arguments."""
_LAST_LINES = 20
_REFUSALS = ("Permission denied", "os error 13")
_REFUSED_WRITES = (
    "If it was refused to write a file: verify keeps what Python code writes in a directory of its "
    "own, and has the kernel refuse what C code and other programs write elsewhere. Leave that "
    "out where PACELINE_VERIFIED_WORKER is set, or write it by Python's open()."
)


@dataclass(frozen=True, kw_only=True)
class _VerifyRequest:
    request: TrainRequest
    config: TrainConfig
    workers: tuple[int, ...]
    steps: int
    tolerance: float | None
    json: str | None


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens) and (not tokens or tokens[0].startswith("-")):
        show_help(_USAGE, _ABOUT, [*_OPTIONS, *_training_options()], tokens)
    asked = _read(tokens)
    with scratch_directory() as place:
        return _verify(asked, place)


def _read(tokens: Sequence[str]) -> _VerifyRequest:
    """Read the command line."""
    own, script_args = part_script_args(tokens)
    # What to verify decides which options there are.
    target, own = take_word(own, _USAGE, "what to verify")
    if RunDirectory.named(target).run_json.exists():
        raise UsageError(f"{target} is a run directory: give the recipe or the script it is of")
    is_script = target.endswith(".py")
    recipe = None if is_script else load_recipe(reference_of(target))
    listed = [*_OPTIONS, *_training_options(recipe)]
    command = command_line("verify", target)
    if wants_help(own):
        show_help(command, _ABOUT, listed, own)
    if script_args and not is_script:
        raise UsageError("arguments after -- are for a script; a recipe's are options like others")
    # Settings of the training, without those of this command.
    given = parse_options(command, _ABOUT, own, listed)
    settings = {n: v for n, v in given.items() if n not in _OWN}
    request = _script_request(target, settings, script_args)
    if recipe is not None:
        request = _recipe_request(target, recipe, settings)
    config = TrainConfig.from_settings(request.settings)
    # The numbers of workers, each of which must be able to share the batch.
    workers = _numbers(str(given.get("workers", "1,2")))
    check_machine(max(workers))
    for count in workers if recipe is not None else ():
        choose_global_batch(config.data, DEFAULT_GLOBAL_BATCH, count)
    tolerance, where = given.get("tolerance"), given.get("json")
    asked = _VerifyRequest(
        request=request,
        config=config,
        workers=workers,
        steps=int(str(given.get("steps", 50))),
        tolerance=None if tolerance is None else float(str(tolerance)),
        json=None if where is None else str(Path(str(where)).expanduser()),
    )
    return _checked(asked)


def _training_options(recipe: Recipe | None = None) -> list[OptionField]:
    if recipe is None:
        return [o for o in script_options().values() if o.name not in _NOT_OURS]
    options = {n: o for n, o in training_options().items() if n not in _NOT_OURS}
    return [*recipe.arguments(), *shown_with(options, recipe.settings)]


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        number = parse_count(word)
        if number is None:
            wrong = f"{word!r} is no number"
        elif number < 1:
            wrong = f"{word} is less than 1"
        elif number in numbers:
            wrong = f"{number} stands there twice"
        else:
            numbers.append(number)
            continue
        raise UsageError(f"--workers is {text}, but {wrong}: give numbers of workers, such as 1,2")
    if len(numbers) < 2:
        raise UsageError(f"--workers is {text}: give at least two numbers of workers, such as 1,2")
    return tuple(numbers)


def _checked(asked: _VerifyRequest) -> _VerifyRequest:
    """Refuse what would fail after minutes of training only."""
    shards, most = asked.config.data.shards, max(asked.workers)
    if shards is not None and most > shards:
        raise UsageError(
            f"--workers says {most}, more than --shards {shards}: give at least {most} shards, "
            "or fewer workers"
        )
    if asked.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {asked.steps}")
    if asked.tolerance is not None and not asked.tolerance >= 0:
        raise UsageError(f"--tolerance must be at least 0, not {asked.tolerance:g}")
    if asked.json is not None and not Path(asked.json).absolute().parent.is_dir():
        raise UsageError(f"--json {asked.json}: there is no directory for it, make it first")
    if asked.json is not None and Path(asked.json).is_dir():
        raise UsageError(f"--json {asked.json} is a directory: give a file's name")
    return asked


def _script_request(
    target: str, settings: Mapping[str, OptionValue], arguments: Sequence[str]
) -> TrainRequest:
    path = Path(target).expanduser().absolute()
    if target.endswith(".py") and not path.is_file():
        raise UsageError(f"there is no file {target}")
    return TrainRequest(
        kind="script",
        recipe=path.name,
        reference=str(path),
        arguments={},
        script_args=tuple(arguments),
        settings=settings,
        given=tuple(settings),
        run_dir="",
        command=("paceline", "verify", target),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _recipe_request(target: str, recipe: Recipe, given: Mapping[str, OptionValue]) -> TrainRequest:
    own = {argument.name for argument in recipe.arguments()}
    options = {n: v for n, v in given.items() if n not in own}
    return TrainRequest(
        recipe=target,
        reference=absolute_reference(reference_of(target)),
        arguments=recipe.resolved({n: v for n, v in given.items() if n in own}),
        settings=merge(options, recipe.settings),
        given=tuple(given),
        run_dir="",
        command=("paceline", "verify", target),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _verify(asked: _VerifyRequest, place: Path) -> int:
    from paceline.verify.text_report import as_json, as_text

    outcome = _study(_Launcher(asked, place, _is_on_cpu(asked)))
    print(printable(as_text(outcome)), flush=True)
    if asked.json is not None:
        write_json(Path(asked.json), as_json(outcome))
    return ExitCode.DONE if outcome.is_good else ExitCode.JOB


def _is_on_cpu(asked: _VerifyRequest) -> bool:
    dist = asked.config.dist
    return count_gpus(dist.device, dist.backend) < max(asked.workers)


def _study(launcher: "_Launcher") -> "VerifyResult":
    from paceline.verify.compare import compare, given_limits, measured_limits
    from paceline.verify.text_report import VerifyResult
    from paceline.verify.verdict import (
        evaluate_first,
        evaluate_launch,
        needs_yardstick,
        not_run,
        unseen,
    )

    asked = launcher.asked
    # Phase 1: train on each number of workers.
    first = launcher.launch(asked.workers[0])
    counts = () if first.failure else asked.workers[1:]
    others = [launcher.launch(count) for count in counts]
    # Phase 2: how much may differ? The user's tolerance, or what rounding alone does to this
    # training, measured by one that is disturbed by a rounding error.
    limits, yardstick = given_limits(asked.tolerance or 0.0), None
    if asked.tolerance is None and needs_yardstick(first, others):
        yardstick = compare(first, launcher.launch(asked.workers[0], disturbed=True))
        if not yardstick.differences:
            raise JobError("the training could not be measured: give a --tolerance, such as 1e-4")
        limits = measured_limits(yardstick)
    if launcher.keeps_dropout and not (first.in_session or first.failure):
        note("--shards has no effect here: it is for recipes and for scripts on paceline.session()")
    # Phase 3: compare each with the first.
    results = [evaluate_first(first), *(evaluate_launch(first, other, limits) for other in others)]
    results += map(not_run, asked.workers[1:] if first.failure else ())
    dropout = not (launcher.keeps_dropout and first.in_session) and any(
        drew.by == "dropout" for trace in (first, *others) for rank in trace.drew for drew in rank
    )
    return VerifyResult(
        results=tuple(results),
        limits=limits,
        unseen=tuple(unseen([first, *others], limits, cut_at=asked.steps, dropout=dropout)),
        yardstick=yardstick,
    )


@dataclass(frozen=True)
class _Launcher:
    """Launches the training that is verified, again and again."""

    asked: _VerifyRequest
    place: Path
    on_cpu: bool

    @property
    def keeps_dropout(self) -> bool:
        """Whether the training promises the same dropout on any number of workers."""
        return self.asked.config.data.shards is not None

    def launch(self, workers: int, *, disturbed: bool = False) -> "Trace":
        """Train on a number of workers, and read what they saw.

        Raises:
            UsageError: The workers say that the command is at fault.
            KeyboardInterrupt: A signal came.
        """
        from paceline.launch.local.launcher import launch_local, prepare
        from paceline.verify.deadlock_locations import lost_one_another, read_locations
        from paceline.verify.events import read_events
        from paceline.verify.subprocesses import programs_started, refused
        from paceline.verify.trace import collect_trace
        from paceline.verify.trial import record_path

        # Train in a directory of its own.
        run = RunDirectory.named(self.place / f"{workers}{'-disturbed' if disturbed else ''}")
        run.create()
        records = run.path / "seen"
        records.mkdir()
        threads = self.threads(workers)
        prepare(PRELOAD, threads)
        with own_directory_is(self.place), self._changes_told():
            outcome = launch_local(
                ENTRY,
                self._trial(run, records, workers, disturbed=disturbed),
                workers=workers,
                threads=threads,
                policy=Policy(),
                log_dir=run.logs,
                progress=lambda: -1,
            )
        if outcome.interrupted:
            raise KeyboardInterrupt
        if refusal := refused(records):
            raise UsageError(refusal)
        # Read what the workers saw, also where they failed or waited for one another.
        events = [read_events(record_path(records, r)) for r in range(workers)]
        places = read_locations(records, events)
        if not (outcome.failures and lost_one_another(outcome.failures[0], places)):
            places = []
        failure = _told(
            outcome.failures, self.asked.request.reference, records, traceback=not places
        )
        trace = collect_trace(events, failure, places, programs_started(records))
        what = "disturbed: the yardstick" if disturbed else "trained"
        note(f"{plural(workers, 'worker')}: {plural(len(trace.steps), 'step')} {what}")
        return trace

    def threads(self, workers: int) -> int:
        """Give as many threads per worker as `paceline run` and `train` would."""
        asked, omp = self.asked.config.worker_threads, current_variables().get("OMP_NUM_THREADS")
        return threads_per_worker(asked, workers, usable_cores(), omp)

    @contextmanager
    def _changes_told(self) -> Iterator[None]:
        """Say what a script has changed all the same, where the kernel can't forbid it."""
        from paceline.verify.file_isolation import changes, files_below

        if self.confines or not self.holds_back:
            yield
            return
        places = dict.fromkeys((Path.cwd(), Path(self.asked.request.reference).parent))
        before = [files_below(place) for place in places]
        yield
        after = [files_below(place) for place in places]
        for path in (p for pair in zip(before, after, strict=True) for p in changes(*pair)):
            note(f"WARNING: the script has changed {path}: C code or another program wrote it")

    @property
    def holds_back(self) -> bool:
        """Whether there is code of the user's, which may write anything."""
        request = self.asked.request
        return request.kind == "script" or not request.reference.startswith("paceline.")

    @property
    def confines(self) -> bool:
        """Whether the kernel can forbid workers to write."""
        return landlock_version() > 0

    def _trial(self, run: RunDirectory, records: Path, workers: int, *, disturbed: bool) -> str:
        from dataclasses import replace

        from paceline.verify.trial import Trial

        given = self.asked.request.script_args
        arguments = tuple(word.replace(_WORKERS, str(workers)) for word in given)
        request = replace(self.asked.request, run_dir=str(run.path), script_args=arguments)
        if request.kind == "recipe":
            more = {"progress": "off"} | ({"device": "cpu"} if self.on_cpu else {})
            request = replace(request, settings={**request.settings, **more})
        return Trial(
            request=request.to_json(),
            records=str(records),
            place=str(self.place) if self.holds_back else "",
            confines=self.confines,
            steps=self.asked.steps,
            disturbed=disturbed,
            keeps_dropout=self.keeps_dropout,
            on_cpu=self.on_cpu,
            timeout_s=self._timeout_s(),
        ).to_json()

    def _timeout_s(self) -> float:
        """Wait less long than trainings do: a verification has few steps, and a user looks on."""
        config = self.asked.config
        return config.dist.timeout_s if "timeout_s" in self.asked.request.given else _TIMEOUT_S


def _told(failures: Sequence[WorkerFailure], script: str, records: Path, *, traceback: bool) -> str:
    """Give the cause of a failed launch in a line; its traceback may go to standard error.

    Raises:
        UsageError: The command is at fault, not the script.
    """
    if not failures:
        return ""
    cause = failures[0]
    if cause.kind == "usage":
        raise UsageError(cause.message)
    if traceback:
        parts = [cause.traceback.strip("\n"), *_last_output(records, cause.rank)]
        parts += [_REFUSED_WRITES] * any(word in cause.traceback for word in _REFUSALS)
        print(*filter(None, parts), sep="\n", file=sys.stderr, flush=True)
    return one_line(cause) + _line_of_script(cause.traceback, script)


def _line_of_script(traceback: str, script: str) -> str:
    """Name the last line of the script itself that a traceback goes through."""
    lines = traceback.splitlines()
    for number in reversed(range(len(lines))):
        found = re.match(rf'  File "{re.escape(script)}", line (\d+)', lines[number])
        if found:
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return f" (line {found[1]} of {Path(script).name}: {code})"
    return ""


def _last_output(records: Path, rank: int) -> list[str]:
    """Show what the script itself has said last, which may explain its failure."""
    from paceline.verify.trial import output_path

    path = output_path(records, rank)
    lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:] if path.exists() else []
    return [f"The last of what the script printed on rank {rank}:", *(f"  {x}" for x in lines)] * (
        len(lines) > 0
    )
