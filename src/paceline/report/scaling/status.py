"""How far a study came, and what it set out to measure and couldn't, in sentences."""

from paceline.options.figures import listed, plural, show_length
from paceline.report.run_outcome import RunOutcome
from paceline.report.scaling.series import find_methods, size_name
from paceline.results.study import SizeResult, Study


def describe_state(study: Study) -> RunOutcome:
    """Say what was measured, and whether that is all."""
    there = len(study.measured)
    if not study.sizes:
        return RunOutcome(state="running", sentence="nothing is measured yet", resume="")
    if not there:
        sizes = plural(len(study.sizes), "size")
        return RunOutcome(state="failed", sentence=f"none of {sizes} could be measured", resume="")
    if there < len(study.sizes):
        done = f"{there:,} of {plural(len(study.sizes), 'size')} measured: {_what(study)}"
        return RunOutcome(state="interrupted", sentence=done, resume="")
    if study.not_reliable:
        sentence = f"not reliable; measured {_what(study)}"
        return RunOutcome(state="interrupted", sentence=sentence, resume="")
    return RunOutcome(state="finished", sentence=f"measured {_what(study)}", resume="")


def _what(study: Study) -> str:
    workers = sorted({size.workers for size in study.measured})
    named = f"{listed([f'{n:,}' for n in workers])} {'worker' if workers == [1] else 'workers'}"
    methods = [method.label for method in find_methods(study) if method.sizes]
    compared = f" with {listed(methods)}" if len(methods) > 1 else ""
    each = f" for {show_length(study.seconds)}" if study.seconds else ""
    times = "once" if study.repeats == 1 else f"{study.repeats:,} times each"
    often = f", {times}{each}" if study.repeats else ""
    return f"{named}{compared}{often}. {_KEPT[study.mode]}"


_KEPT = {
    "weak": "More workers make the global batch larger, and each has as much to do as one alone.",
    "strong": "The global batch stays the same, so more workers have less to do each.",
}


def find_gaps(study: Study) -> tuple[str, ...]:
    """List what is missing: sizes, repeats, the parts of steps, fixed costs, trainings."""
    sentences = [sentence for size in study.sizes for sentence in _size_gaps(study, size)]
    sentences += _missing(
        study,
        [size for size in study.measured if size.parts is None],
        "Where the time of a step goes isn't known for",
    )
    sentences += _missing(
        study,
        [size for size in study.measured if size.fixed.total_s is None],
        "The fixed cost of an epoch wasn't measured for",
    )
    if any(size.trained is not None for size in study.sizes):
        lacking = [size for size in study.sizes if size.trained is None]
        sentences += _missing(study, lacking, "No training was made with")
    return tuple(sentences)


def _size_gaps(study: Study, size: SizeResult) -> list[str]:
    name = size_name(study, size)
    failed = [repeat.problem for repeat in size.repeats if repeat.problem]
    if size.images_per_s is None:
        why = size.problem or (failed[0] if failed else "")
        return [f"{name}: {why}" if why else f"{name}: not measured."]
    sentences = [f"{name}: {size.problem}"] if size.problem else []
    if failed and not size.problem:
        sentences.append(
            f"{name}: {len(failed)} of {plural(len(size.repeats), 'repeat')}: {failed[0]}"
        )
    done = len(size.repeats) - len(failed)
    if size.repeats and not failed and done < study.repeats:
        sentences.append(f"{name}: {done} of {plural(study.repeats, 'repeat')} done.")
    return sentences


def _missing(study: Study, sizes: list[SizeResult], what: str) -> list[str]:
    names = [size_name(study, size) for size in sizes]
    separated = "; ".join(names) if any("," in name for name in names) else listed(names)
    return [f"{what} {separated}."] if names else []
