"""What a study has found: follows from the records of its measurements alone. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median

from paceline.options.figures import listed, show_whole_percent
from paceline.results.profile import EpochCosts, Spread, StepParts
from paceline.results.study import Measured, Repeat, SizeResult, Study, Trained
from paceline.scaling.plan import SLOWER_ALONE, Size

_FEW_STEPS = 5
_WIDE = 0.2
_MAX_EFFICIENCY = 1.1
"""More than this doesn't come from more workers, but from one that was held up alone."""


def summarise(
    study: Study,
    sizes: Sequence[Size],
    measured: Mapping[Size, Sequence[Measured]],
    options: Mapping[str, Mapping[str, object]],
    trained: Mapping[Size, Trained],
) -> Study:
    """Put together what the measurements say.

    Args:
        sizes: In the order of the tables.
        measured: What was measured of each, round by round.
        options: Of each method, the options of training that make it.
    """
    # The fastest run of one worker is the yardstick of all efficiencies.
    alone = [m.images_per_s for size in sizes if size.workers == 1 for m in measured.get(size, ())]
    best = max((rate for rate in alone if rate is not None), default=None)
    results = tuple(
        replace(
            _size(size, measured.get(size, ()), best, options.get(size.method, {})),
            trained=trained.get(size),
        )
        for size in sizes
    )
    every = [m for size in sizes for m in measured.get(size, ()) if m.profile]
    first = every[0] if every else None
    cores = [m.cores for m in every if m.cores is not None]
    return replace(
        study,
        versions=first.versions or {} if first else {},
        device=first.profile.device if first and first.profile else "",
        cores=min(cores, default=None),
        baseline_images_per_s=best,
        sizes=results,
        not_reliable=_not_reliable(results),
        notes=_notes(study, best, measured, results),
    )


def _size(
    size: Size, measured: Sequence[Measured], best: float | None, options: Mapping[str, object]
) -> SizeResult:
    good = [m for m in measured if m.profile is not None]
    # What isn't a spread over all repeats is taken from the median one.
    middle = sorted(good, key=lambda m: m.step_s or 0.0)[len(good) // 2] if good else None
    profile = middle.profile if middle else None
    rates = [m.images_per_s for m in good if m.images_per_s]
    steps = [m.step_s for m in good if m.step_s]
    problems = [m.problem for m in measured if m.problem]
    result = SizeResult(
        workers=size.workers,
        nodes=size.nodes,
        method=size.method,
        method_options=_options_of(size, middle, options),
        global_batch=profile.global_batch if profile else None,
        lr=middle.lr if middle else None,
        steps_per_epoch=profile.steps_per_epoch if profile else None,
        images_per_s=_spread(rates),
        step_s=_spread(steps),
        efficiency=_spread([rate / (size.workers * best) for rate in rates] if best else []),
        parts=_parts(middle, median(steps)) if middle and steps else None,
        epoch_s=None,
        fixed=profile.epoch if profile else EpochCosts(),
        wire_bytes_per_step=profile.wire_bytes_per_step if profile else None,
        repeats=tuple(
            Repeat(
                run_dir=m.run_dir,
                images_per_s=m.images_per_s,
                step_s=m.step_s,
                problem=m.problem,
            )
            for m in measured
        ),
        problem=problems[-1] if problems and not good else None,
    )
    if result.step_s is None or not result.steps_per_epoch:
        return result
    # The time of an epoch: its steps and its fixed costs.
    steps_s = result.steps_per_epoch * result.step_s.median
    return replace(result, epoch_s=steps_s + (result.fixed.total_s or 0.0))


def _options_of(
    size: Size, middle: Measured | None, requested: Mapping[str, object]
) -> Mapping[str, object]:
    """Give a method's options as it was measured with them, else as they were requested."""
    if size.workers == 1 and size.method not in SLOWER_ALONE:
        return {}
    return {**requested, **(middle.method_options or {})} if middle else requested


def _parts(middle: Measured, step_s: float) -> StepParts | None:
    """Share the median step out as in one repeat: of an even number none has just that step."""
    if middle.profile is None or not middle.step_s:
        return None
    factor = step_s / middle.step_s
    return StepParts(**{n: part * factor for n, part in asdict(middle.profile.parts).items()})


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(median=median(values), low=min(values), high=max(values))


def _not_reliable(results: Sequence[SizeResult]) -> str:
    """Say what the measurements themselves show to be wrong with them; empty where nothing is."""
    doubts = []
    # Repeats of one measurement that differ too much.
    wide = sorted({result.workers for result in results if _is_wide(result.images_per_s)})
    if wide:
        much = show_whole_percent(_WIDE)
        doubts.append(f"repeats differ by more than {much} with {_workers(wide)}")
    # Several workers that do more than as many single ones: impossible but by other load.
    beyond = [r for r in results if r.efficiency and r.efficiency.median > _MAX_EFFICIENCY]
    if beyond:
        most = max(beyond, key=lambda r: r.efficiency.median if r.efficiency else 0.0)
        share = most.efficiency.median if most.efficiency else 0.0
        doubts.append(
            f"each of {_workers([most.workers])} with {most.method} seems to do "
            f"{show_whole_percent(share)} of "
            "what one does alone"
        )
    if not doubts:
        return ""
    return (
        f"Not reliable: {', and '.join(doubts)}. Something else was using the machine or the "
        "network, so that no conclusion is drawn. Measure again, in another --study-dir, when it "
        "has nothing else to do; more --repeats and more --seconds help."
    )


def _notes(
    study: Study,
    best: float | None,
    measured: Mapping[Size, Sequence[Measured]],
    results: Sequence[SizeResult],
) -> tuple[str, ...]:
    """Say what a reader of the figures should know."""
    notes = [*_shared_cores(measured)]
    few = sorted(
        {size.workers for size, all_of in measured.items() for m in all_of if _saw_few_steps(m)}
    )
    if few:
        notes.append(
            f"Fewer than {_FEW_STEPS} steps could be looked at with {_workers(few)}: give more "
            f"than {study.seconds:g} --seconds"
        )
    for result in results:
        bad = sum(repeat.problem is not None for repeat in result.repeats)
        if 0 < bad < len(result.repeats):
            notes.append(
                f"{bad} of {len(result.repeats)} measurements of {_workers([result.workers])} with "
                f"{result.method} failed, and are left out"
            )
    if best is None and any(r.images_per_s for r in results):
        notes.append("One worker couldn't be measured, so that there is no efficiency")
    return tuple(notes)


def _shared_cores(measured: Mapping[Size, Sequence[Measured]]) -> list[str]:
    """Tell where workers of one host computed on cores that a single one has to itself."""
    alone = [m.threads for size, all_of in measured.items() if size.workers == 1 for m in all_of]
    usual = max((threads for threads in alone if threads is not None), default=None)
    crowded, fewer = set(), set()
    for size, all_of in measured.items():
        for m in all_of:
            if m.profile is None or m.profile.device != "cpu" or not m.cores or not m.threads:
                continue
            # Workers of the fullest node.
            on_one = -(-size.workers // size.nodes)
            if on_one * m.threads > m.cores:
                crowded.add(size.workers)
            elif usual is not None and m.threads < usual:
                fewer.add(size.workers)
    notes = []
    if crowded:
        notes.append(
            f"{_workers(sorted(crowded))} shared too few CPU cores: what is measured is how they "
            "share this machine, not how the training scales over several"
        )
    if fewer:
        notes.append(
            f"One worker computed with {usual} threads, {_workers(sorted(fewer))} with fewer each: "
            "they shared the cores that it had to itself. --threads 1 gives all the same"
        )
    return notes


def _is_wide(spread: Spread | None) -> bool:
    return spread is not None and spread.high - spread.low > _WIDE * spread.median


def _saw_few_steps(measured: Measured) -> bool:
    return measured.profile is not None and measured.profile.steps_seen < _FEW_STEPS


def _workers(counts: Sequence[int]) -> str:
    return f"{listed([*map(str, counts)])} {'worker' if counts == [1] else 'workers'}"
