"""How far a study came, in the sentence under the page's title."""

from paceline.options.figures import plural
from paceline.report.formatting import length, listed
from paceline.report.run_outcome import RunOutcome
from paceline.report.scaling.series import find_methods
from paceline.results.study import Study


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
    ways = f" with {listed(methods)}" if len(methods) > 1 else ""
    each = f" for {length(study.seconds)}" if study.seconds else ""
    often = f", {_times(study.repeats)}{each}" if study.repeats else ""
    return f"{named}{ways}{often}. {_KEPT[study.mode]}"


def _times(repeats: int) -> str:
    return "once" if repeats == 1 else f"{repeats:,} times each"


_KEPT = {
    "weak": "More workers make the global batch larger, and each has as much to do as one alone.",
    "strong": "The global batch stays the same, so more workers have less to do each.",
}
