"""What a study set out to measure and couldn't, in sentences."""

from paceline.options.figures import plural
from paceline.report.formatting import listed
from paceline.report.scaling.series import size_name
from paceline.results.study import SizeResult, Study


def find_gaps(study: Study) -> tuple[str, ...]:
    """List what is missing: sizes, repeats, the parts of steps, fixed costs, trainings."""
    told = [sentence for size in study.sizes for sentence in _size_gaps(study, size)]
    told += _missing(
        study,
        [size for size in study.measured if size.parts is None],
        "Where the time of a step goes isn't known for",
    )
    told += _missing(
        study,
        [size for size in study.measured if size.fixed.total_s is None],
        "The fixed cost of an epoch wasn't measured for",
    )
    if any(size.trained is not None for size in study.sizes):
        lacking = [size for size in study.sizes if size.trained is None]
        told += _missing(study, lacking, "No training was made with")
    return tuple(told)


def _size_gaps(study: Study, size: SizeResult) -> list[str]:
    name = size_name(study, size)
    failed = [repeat.problem for repeat in size.repeats if repeat.problem]
    if size.images_per_s is None:
        why = size.problem or (failed[0] if failed else "")
        return [f"{name}: {why}" if why else f"{name}: not measured."]
    told = [f"{name}: {size.problem}"] if size.problem else []
    if failed and not size.problem:
        told.append(f"{name}: {len(failed)} of {plural(len(size.repeats), 'repeat')}: {failed[0]}")
    done = len(size.repeats) - len(failed)
    if size.repeats and not failed and done < study.repeats:
        told.append(f"{name}: {done} of {plural(study.repeats, 'repeat')} done.")
    return told


def _missing(study: Study, sizes: list[SizeResult], what: str) -> list[str]:
    names = [size_name(study, size) for size in sizes]
    separated = "; ".join(names) if any("," in name for name in names) else listed(names)
    return [f"{what} {separated}."] if names else []
