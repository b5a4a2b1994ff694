"""Which methods a study compares, and what each reached: pure choices, no drawing."""

from dataclasses import dataclass

from paceline.options import figures
from paceline.options.figures import plural
from paceline.results.json_object import JsonObject
from paceline.results.study import PredictedSize, SizeResult, Study

_Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of combining gradients, over the sizes."""

    label: str
    place: int
    """Its number among the methods, from 0: chooses the colour."""
    sizes: tuple[SizeResult, ...]
    """Measured ones in growing order, among them the one worker that all methods share."""
    predicted: tuple[PredictedSize, ...]


def find_methods(study: Study) -> tuple[Method, ...]:
    """List the methods in the order of the study; predicted ones that weren't measured last."""
    keys = _keys(study)
    groups: dict[_Key, list[SizeResult]] = {}
    for size, key in zip(study.sizes, keys, strict=True):
        groups.setdefault(key, []).append(size)
    # The fastest run of one worker, which each method is compared with.
    alone = max((s for s in study.measured if s.workers == 1), key=_speed, default=None)
    if len(groups) > 1:  # One worker combines nothing: alone it makes no method.
        several = {k: found for k, found in groups.items() if any(s.workers > 1 for s in found)}
        groups = several or groups
    predicted = {} if study.predicted is None else study.predicted.methods
    labels = {key: _label(key, groups) for key in groups}
    rest = [name for name in predicted if name not in {name for name, _ in groups}]
    measured = [
        Method(
            label=labels[key],
            place=place,
            sizes=_with_one_worker(found, alone),
            predicted=predicted.get(key[0], ()),
        )
        for place, (key, found) in enumerate(groups.items())
    ]
    return (
        *measured,
        *(
            Method(label=name, place=place, sizes=(), predicted=predicted[name])
            for place, name in enumerate(rest, len(measured))
        ),
    )


def size_name(study: Study, size: SizeResult) -> str:
    """Name a size for a sentence: `8 workers`, and where there are several methods `…, ordered`."""
    methods = find_methods(study)
    named = plural(size.workers, "worker")
    several = sum(bool(method.sizes) for method in methods) > 1
    if not (several if size.workers > 1 else has_several_alone(study)):
        return named
    return f"{named}, {method_name(study, size)}"


def has_several_alone(study: Study) -> bool:
    """Whether one worker was measured with several methods: some cost something even there."""
    return sum(size.workers == 1 for size in study.sizes) > 1


def size_phrase(study: Study, size: SizeResult) -> str:
    """Name a size in the middle of a sentence: `8 workers with ordered`."""
    return size_name(study, size).replace(", ", " with ", 1)


def method_name(study: Study, size: SizeResult) -> str:
    """Name a size's method as its series is named."""
    keys = _keys(study)
    return _label(keys[study.sizes.index(size)], dict.fromkeys(keys))


def efficiency(study: Study, size: SizeResult) -> float | None:
    """Give the measured efficiency, or what follows from the throughput; a fraction."""
    if size.efficiency is not None:
        return size.efficiency.median
    speed_up = speed_up_of(study, size)
    return None if speed_up is None else speed_up / size.workers


def speed_up_of(study: Study, size: SizeResult) -> float | None:
    """Give how many times the work of one worker is done; None where it isn't known."""
    if size.images_per_s is None or study.baseline_images_per_s is None:
        return None
    return size.images_per_s.median / study.baseline_images_per_s


def largest(study: Study) -> tuple[SizeResult, ...]:
    """The measured sizes with the most workers, the fastest method first."""
    most = max((size.workers for size in study.measured), default=0)
    found = [size for size in study.measured if size.workers == most]
    return tuple(sorted(found, key=_speed, reverse=True))


def one_worker(study: Study) -> SizeResult | None:
    """The fastest measurement of one worker, with its step's parts where any has them."""
    alone = [size for size in study.measured if size.workers == 1]
    return max(alone, key=lambda size: (size.parts is not None, _speed(size)), default=None)


def _speed(size: SizeResult) -> float:
    return 0.0 if size.images_per_s is None else size.images_per_s.median


def _with_one_worker(sizes: list[SizeResult], alone: SizeResult | None) -> tuple[SizeResult, ...]:
    measured = tuple(size for size in sizes if size.images_per_s is not None)
    if alone is None or any(size.workers == 1 for size in measured):
        return measured
    return (alone, *measured)


def _keys(study: Study) -> list[_Key]:
    """Tell methods apart by name; by options too where one name was measured with several."""
    plain = [(size.workers, size.nodes, size.method) for size in study.sizes]
    repeated = {name for *_, name in (place for place in plain if plain.count(place) > 1)}
    return [
        (size.method, _options(size.method_options) if size.method in repeated else "")
        for size in study.sizes
    ]


def _options(options: JsonObject) -> str:
    return ", ".join(f"{n.replace('_', '-')} {figures.show_value(v)}" for n, v in options.items())


def _label(key: _Key, keys: "dict[_Key, list[SizeResult]] | dict[_Key, None]") -> str:
    name, options = key
    return f"{name} ({options})" if options and len(keys) > 1 else name
