"""A prediction as text, and as JSON."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.options.durations import format_clock
from paceline.options.figures import plural, show_bandwidth, show_time, show_whole_percent
from paceline.options.text import aligned, line_width, wrapped
from paceline.scaling.forecast import Forecast, ForecastRequest, Projection, project
from paceline.scaling.prediction import (
    Assumptions,
    Band,
    Predicted,
    cost_per_epoch,
    library_of,
)
from paceline.scaling.prediction_inputs import PredictionInputs, fitted_link, read_inputs
from paceline.scaling.recommending import recommend, recommended

_WIDTH = 88
_BEYOND = 4
_CARRIERS = {"gloo": "a ring (Gloo)", "nccl": "a ring or a tree, whatever is faster (NCCL)"}


def as_text(projection: Projection, inputs: PredictionInputs) -> str:
    """Write it as text: what is assumed, all efficiencies, two methods in detail, what to do."""
    lines = [*_assumptions(projection, inputs.source), "", *_efficiencies(projection)]
    # In detail: plain all-reduce, and what is recommended instead.
    plain = next((f for f in projection.forecasts if f.method.sync == "allreduce"), None)
    best = None if inputs.not_reliable else recommended(projection)
    for forecast in dict.fromkeys(f for f in (plain, best) if f is not None):
        lines += ["", *_details(forecast, projection)]
    lines.append("")
    for sentence in _advice(projection, inputs):
        lines += wrapped(sentence, line_width(_WIDTH))
    if inputs.warnings:
        lines += ["", f"Of the measurements in {inputs.source}:"]
    for warning in inputs.warnings:
        lines += wrapped(f"- {warning}", line_width(_WIDTH), "  ")
    return "\n".join(lines)


def _advice(projection: Projection, inputs: PredictionInputs) -> tuple[str, ...]:
    """Say what to do, unless what it would follow from isn't reliable."""
    return (inputs.not_reliable,) if inputs.not_reliable else recommend(projection)


def as_json(projection: Projection, inputs: PredictionInputs) -> dict[str, object]:
    """Give all of it as JSON; efficiencies are fractions, times seconds."""
    q = projection.request
    best = None if inputs.not_reliable else recommended(projection).last.label
    return {
        "text": list(_advice(projection, inputs)),
        "not_reliable": inputs.not_reliable,
        "warnings": list(inputs.warnings),
        "link": {
            "bandwidth_bytes_per_s": q.link.network.bandwidth_bytes_per_s,
            "round_trip_s": q.link.network.round_trip_s,
            "source": q.link.source,
        },
        "mode": q.assumed.mode,
        "library": library_of(q.profile, q.assumed),
        "gpus_per_node": q.gpus_per_node,
        "needed_bytes_per_s": projection.needed_bytes_per_s,
        "recommended": best,
        "alone": _size_json(projection.alone, q.price_per_hour),
        "methods": [
            {
                "method": forecast.method.sync or "allreduce",
                "label": forecast.last.label,
                "sizes": [_band_json(band, q.price_per_hour) for band in forecast.sizes],
            }
            for forecast in projection.forecasts
        ],
    }


def predict_study(study_dir: Path) -> dict[str, object] | None:
    """Predict from a study what it didn't measure: its methods, up to four times its nodes.

    Sizes count that have as many workers on each node as the largest one.

    Args:
        study_dir: With a `study.json` and the run directories that it names.

    Returns:
        As `as_json`; None where nothing was measured on several nodes, so that no network is known.

    Raises:
        DataError: A file is damaged, or one worker wasn't measured.
    """
    every = read_inputs(study_dir)
    if not every.sizes:
        return None
    per_node = every.sizes[-1].per_node
    # Sizes with another number of workers a node use other links: they say nothing about this one.
    alike = tuple(size for size in every.sizes if size.per_node == per_node)
    inputs = replace(every, sizes=alike)
    measured = sorted({size.nodes for size in inputs.sizes})
    assumed = Assumptions(mode=inputs.mode)
    # Double and four times as many nodes, as far as a fixed global batch can be shared.
    most = measured[-1] * _BEYOND
    if inputs.mode == "strong":
        most = min(most, inputs.profile.global_batch // per_node)
    beyond = {n for n in (measured[-1] * 2, measured[-1] * _BEYOND) if n <= most}
    request = ForecastRequest(
        profile=inputs.profile,
        link=fitted_link(inputs, None, library_of(inputs.profile, assumed)),
        nodes=tuple(sorted({*measured, *beyond})),
        gpus_per_node=per_node,
        methods=inputs.methods,
        assumed=assumed,
        measured={
            (method, nodes): reached
            for (method, nodes, each), reached in inputs.efficiencies.items()
            if each == per_node
        },
    )
    return as_json(project(request), inputs)


def _size_json(size: Predicted, price: float | None) -> dict[str, object]:
    parts = size.parts
    return {
        "workers": size.workers,
        "nodes": size.nodes,
        "global_batch": size.global_batch,
        "efficiency": size.efficiency,
        "images_per_s": size.images_per_s,
        "step_s": size.step_s,
        "compute_s": parts.compute_s,
        "exposed_s": parts.exposed_s,
        "codec_s": parts.codec_s,
        "waiting_s": parts.waiting_s,
        "sent_bytes": parts.sent_bytes,
        "epoch_s": size.epoch_s,
        "fixed_s": size.fixed_s,
        "available": size.available,
        "epoch_cost": None if price is None else cost_per_epoch(size, price),
    }


def _band_json(band: Band, price: float | None) -> dict[str, object]:
    ranges = {"step_s": band.step_s, "images_per_s": band.images_per_s, "epoch_s": band.epoch_s}
    return {
        **_size_json(band.predicted, price),
        "low": band.efficiency.low,
        "high": band.efficiency.high,
        "bands": {n: r and {"low": r.low, "high": r.high} for n, r in ranges.items()},
    }


def _assumptions(projection: Projection, source: str) -> Iterator[str]:
    q, profile = projection.request, projection.request.profile
    measured = plural(profile.world_size, "worker")
    step = show_time(profile.step_s.median)
    yield f"from      {source}: {measured}, {profile.device}, steps of {step}"
    yield f"link      {q.link.source}"
    if q.gpus_per_node > 1:
        inside = "taken as if it took no time"
        if q.within is not None:
            inside = show_bandwidth(q.within.bandwidth_bytes_per_s)
        yield f"nodes     {plural(q.gpus_per_node, 'worker')} each; between them {inside}"
    yield f"assumed   {_CARRIERS[library_of(profile, q.assumed)]}; {_batches(projection)}"


def _batches(projection: Projection) -> str:
    q = projection.request
    if q.assumed.mode == "strong":
        return f"{q.profile.global_batch:,} samples a step, however many workers (strong scaling)"
    each = q.profile.global_batch / q.profile.world_size
    return f"{each:,.4g} samples a step for each worker (weak scaling)"


def _efficiencies(projection: Projection) -> Iterator[str]:
    labels = [forecast.last.label for forecast in projection.forecasts]
    width = max(len("efficiency"), *map(len, labels))
    nodes = [f"{nodes:,}" for nodes in projection.request.nodes]
    yield f"{'nodes':{width}}" + "".join(f"{number:>7}" for number in nodes)
    for label, forecast in zip(labels, projection.forecasts, strict=True):
        row = (f"{band.predicted.efficiency:7.2f}" for band in forecast.sizes)
        yield f"{label:{width}}" + "".join(row)


def _details(forecast: Forecast, projection: Projection) -> list[str]:
    price = projection.request.price_per_hour
    head = ["nodes", "batch", "efficiency", "images/s", "step", "not hidden", "epoch"]
    rows = [[*head, *(["cost"] if price is not None else [])]]
    for band in forecast.sizes:
        size = band.predicted
        idle_s = size.parts.exposed_s + size.parts.waiting_s + size.parts.codec_s
        row = [
            f"{size.nodes:,}",
            f"{size.global_batch:,}",
            f"{size.efficiency:.2f} ({band.efficiency.low:.2f}-{band.efficiency.high:.2f})",
            f"{size.images_per_s:,.3g}"
            if size.images_per_s < 1000
            else f"{size.images_per_s:,.0f}",
            show_time(size.step_s),
            show_whole_percent(idle_s / size.step_s),
            "-" if size.epoch_s is None else format_clock(size.epoch_s),
        ]
        cost = None if price is None else cost_per_epoch(size, price)
        rows.append([*row, *([] if price is None else ["-" if cost is None else f"{cost:.3g}"])])
    return [forecast.last.label, *aligned(rows)]
