"""What to do, in plain sentences, given what was predicted. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.gradient_sync.cost_model import method_label
from paceline.gradient_sync.options import SyncOptions
from paceline.options.durations import format_duration
from paceline.options.figures import plural, show_bandwidth, show_whole_percent
from paceline.scaling.forecast import Forecast, Projection, every_prediction
from paceline.scaling.prediction import (
    Band,
    Predicted,
    cost_per_epoch,
    snapshot_interval_s,
)

_PLAIN = {"allreduce": "All-reduce", "ordered": "The ordered sum"}
_TRADES = {
    "bf16": "gradients are rounded to 8 bits of precision, which training rarely notices",
    "powersgd": "gradients are approximated, so compare the accuracy",
}
"""What the others give up. Those that change least come first."""
_MUCH_BETTER = 1.05
_LARGE_BATCH = 8192
"""Beyond it the learning rate can't simply grow with the batch. Goyal et al.: "Accurate, Large
Minibatch SGD" (2017), figure 1."""
_NOTABLE = 0.1
_NOTABLE_FAILURES = 0.95


def recommend(projection: Projection) -> tuple[str, ...]:
    """Say which sizes pay, with which way of combining gradients, and what else would help."""
    projection = _as_measured(projection)
    plain = _named(projection, "allreduce") or _named(projection, "ordered")
    sentences: list[str] = []
    if plain is not None:
        sentences += _on_plain(plain, projection)
    if plain is None or not _pays(plain.last, projection):
        sentences += _on_others(plain, projection)
        sentences += _on_link(projection) if plain is not None else ()
    return (*sentences, *_on_money(projection), *_on_limits(recommended(projection), projection))


def recommended(projection: Projection) -> Forecast:
    """Give the method to use: the one that changes least among those that pay on the most nodes."""
    projection = _as_measured(projection)
    careful = _in_order(projection, ("allreduce", *_TRADES))
    paying = [forecast for forecast in careful if _pays(forecast.last, projection)]
    return paying[0] if paying else max(projection.forecasts, key=_last)


def _as_measured(projection: Projection) -> Projection:
    """Put efficiencies that were measured in the place of predicted ones."""
    known = projection.request.measured
    if not known:
        return projection

    def as_measured(method: SyncOptions, band: Band) -> Band:
        """Put the measured efficiency into one prediction, where there is one."""
        size = band.predicted
        reached = known.get((method, size.nodes), size.efficiency)
        return replace(band, predicted=replace(size, efficiency=reached))

    forecasts = [
        replace(one, sizes=tuple(as_measured(one.method, band) for band in one.sizes))
        for one in projection.forecasts
    ]
    return replace(projection, forecasts=tuple(forecasts))


def _on_plain(plain: Forecast, projection: Projection) -> Iterator[str]:
    paying, failing = _split_by_efficiency(plain, projection)
    name = _PLAIN[_name(plain.method)]
    if not failing:
        yield f"{name} pays on all of these sizes: {_size(plain.last)}."
    elif not paying:
        first = failing[0]
        yield (
            f"{name} pays on none of these sizes: {_size(first)}, and "
            f"{projection.request.pays:.2f} is asked for."
        )
    else:
        first = failing[0]
        yield (
            f"With {name[0].lower()}{name[1:]}, {_size(paying[-1], 'pay')}, "
            f"{first.nodes:,} don't ({first.efficiency:.2f})."
        )


def _on_others(plain: Forecast | None, projection: Projection) -> Iterator[str]:
    others = _in_order(projection, tuple(_TRADES))
    if not others:
        return
    # The methods are in the order of how little they change: the first that pays is recommended.
    paying = [forecast for forecast in others if _pays(forecast.last, projection)]
    if paying:
        first = paying[0]
        yield f"With {_label(first)}, {_size(first.last, 'pay')}: {_trade(first)}."
        best = max(paying, key=lambda forecast: forecast.last.efficiency)
        if best.last.efficiency > _MUCH_BETTER * first.last.efficiency:
            yield f"Faster still is {_label(best)} ({best.last.efficiency:.2f}): {_trade(best)}."
        return
    # None pays on all nodes: say which comes furthest, if further than plain all-reduce.
    furthest = max(others, key=lambda forecast: (_furthest(forecast, projection), _last(forecast)))
    reached = _furthest(furthest, projection)
    if reached > (_furthest(plain, projection) if plain is not None else 0):
        (size,) = (b.predicted for b in furthest.sizes if b.predicted.nodes == reached)
        yield (
            f"Nothing pays on {plural(furthest.last.nodes, 'node')}; {_label(furthest)} comes "
            f"furthest: {_size(size, 'pay')}: {_trade(furthest)}."
        )
    else:
        best = max([*others, *([plain] if plain else [])], key=_last)
        yield (
            f"No way of combining gradients pays on {plural(best.last.nodes, 'node')}: the best, "
            f"{_label(best)}, reaches {best.last.efficiency:.2f}. Use fewer nodes, larger "
            "batches for each worker, or a faster network."
        )


def _on_link(projection: Projection) -> Iterator[str]:
    needed = projection.needed_bytes_per_s
    nodes = plural(projection.request.nodes[-1], "node")
    if needed is None:
        yield (
            f"No link is fast enough for all-reduce to pay on {nodes}: what is left is latency, "
            "waiting for the slowest and failures."
        )
        return
    has = projection.request.link.network.bandwidth_bytes_per_s
    if needed > has:
        yield (
            f"All-reduce would pay on {nodes} over links that carry {show_bandwidth(needed)}; "
            f"these are taken to carry {show_bandwidth(has)}."
        )


def _on_money(projection: Projection) -> Iterator[str]:
    price = projection.request.price_per_hour
    if price is None:
        return
    timed = [p for p in every_prediction(projection) if p.epoch_s is not None]
    if not timed:
        yield "What an epoch costs isn't known: the profile doesn't say how many steps it has."
        return
    # Of equals the one with fewest nodes.
    cheapest = min(timed, key=lambda p: (cost_per_epoch(p, price) or 0.0, p.nodes))
    fastest = min(timed, key=lambda p: (p.epoch_s or 0.0, p.nodes))
    if cheapest == fastest:
        yield f"Cheapest and fastest: {_size_and_cost(cheapest, price)}."
        return
    times = (cheapest.epoch_s or 0.0) / (fastest.epoch_s or 1.0)
    dearer = (cost_per_epoch(fastest, price) or 0.0) / (cost_per_epoch(cheapest, price) or 1.0)
    yield (
        f"Cheapest: {_size_and_cost(cheapest, price)}. Fastest: {_size_and_cost(fastest, price)}: "
        f"{times:.3g} times as fast for {dearer:.2f} times the money."
    )


def _on_limits(best: Forecast, projection: Projection) -> Iterator[str]:
    last, nodes = best.last, plural(best.last.nodes, "node")
    if last.epoch_s and last.fixed_s / last.epoch_s > _NOTABLE:
        yield (
            "Evaluation, snapshot and the loader's start are "
            f"{show_whole_percent(last.fixed_s / last.epoch_s)} of "
            f"an epoch on {nodes}: no way of combining gradients changes that."
        )
    if last.parts.waiting_s / last.step_s > _NOTABLE:
        yield (
            "Waiting for the slowest worker is "
            f"{show_whole_percent(last.parts.waiting_s / last.step_s)} of a step "
            f"on {nodes}: workers of one speed would help more than a faster network."
        )
    if last.available < _NOTABLE_FAILURES:
        lost = f"{show_whole_percent(1 - last.available)} of the time"
        yield f"Failures take {lost} on {nodes}: {_failure_advice(last, projection)}."
    alone = projection.request.profile.global_batch
    if last.global_batch > max(_LARGE_BATCH, alone):
        yield (
            f"On {nodes} a step takes {last.global_batch:,} samples. Whether such steps still "
            "teach as much a sample isn't predicted here; --mode strong keeps the batch."
        )


def _failure_advice(size: Predicted, projection: Projection) -> str:
    """Say what to change about failures: by the larger cost, repeated steps or restarts."""
    assumed = projection.request.assumed
    epoch_s = None if size.epoch_s is None else size.epoch_s * size.available
    again_s = snapshot_interval_s(epoch_s, assumed) / 2
    if again_s >= assumed.restart_s:
        return "write snapshots more often (--snapshot-every)"
    return (
        f"most of it is starting again, for which {format_duration(assumed.restart_s)} are taken "
        "(--restart)"
    )


def _split_by_efficiency(
    forecast: Forecast, projection: Projection
) -> tuple[Sequence[Predicted], Sequence[Predicted]]:
    sizes = [band.predicted for band in forecast.sizes]
    paying = [size for size in sizes if _pays(size, projection)]
    return paying, [size for size in sizes if size not in paying]


def _pays(size: Predicted, projection: Projection) -> bool:
    return size.efficiency >= projection.request.pays


def _furthest(forecast: Forecast, projection: Projection) -> int:
    """Give the most nodes that pay; 0 for none."""
    paying, _ = _split_by_efficiency(forecast, projection)
    return paying[-1].nodes if paying else 0


def _last(forecast: Forecast) -> float:
    return forecast.last.efficiency


def _named(projection: Projection, name: str) -> Forecast | None:
    return next((f for f in projection.forecasts if _name(f.method) == name), None)


def _name(method: SyncOptions) -> str:
    """Return the name under which `paceline predict --methods` lists it."""
    return "bf16" if method.sync_precision == "bf16" else method.sync or "allreduce"


def _in_order(projection: Projection, names: Sequence[str]) -> list[Forecast]:
    forecasts = (_named(projection, name) for name in names)
    return [forecast for forecast in forecasts if forecast is not None]


def _label(forecast: Forecast) -> str:
    return method_label(forecast.method)


def _trade(forecast: Forecast) -> str:
    return _TRADES[_name(forecast.method)]


def _size(size: Predicted, verb: str = "") -> str:
    """Write `8 nodes pay (0.91)`, or without a verb `8 nodes reach 0.91`."""
    number = plural(size.nodes, "node")
    ending = "" if size.nodes > 1 else "s"
    if verb:
        return f"{number} {verb}{ending} ({size.efficiency:.2f})"
    return f"{number} reach{ending and 'es'} {size.efficiency:.2f}"


def _size_and_cost(size: Predicted, price: float) -> str:
    with_what = f" with {size.label}" if size.workers > 1 else ""
    cost = cost_per_epoch(size, price) or 0.0
    return (
        f"{plural(size.nodes, 'node')}{with_what}, {format_duration(size.epoch_s or 0.0)} and "
        f"{cost:.3g} an epoch"
    )
