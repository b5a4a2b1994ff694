"""`paceline predict RUN|STUDY|PROFILE`: how a training would scale on hosts that aren't there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError, ExitCode, UsageError
from paceline.options.command_line import flag, read_command
from paceline.options.durations import parse_duration_s
from paceline.options.fields import option_fields
from paceline.options.quantities import parse_bandwidth_bytes_per_s, parse_sizes
from paceline.options.text import printable
from paceline.scaling.options import PLAIN, PredictOptions
from paceline.scaling.plan import idle_of_methods

if TYPE_CHECKING:
    from paceline.scaling.forecast import ForecastRequest
    from paceline.scaling.prediction import Assumptions
    from paceline.scaling.prediction_inputs import NetworkLink, PredictionInputs

_OPTIONS = option_fields(PredictOptions, "Predict")
_ABOUT = (
    "Predict how a training scales on more nodes, and what it costs there, for every way of "
    "combining gradients: from a run directory, from that of `paceline scale`, or from a "
    "profile.json. A run of one worker says most."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where,), given = read_command(
        "paceline predict RUN|STUDY|PROFILE", _ABOUT, tokens, _OPTIONS, "the run directory"
    )
    options = PredictOptions(**given)  # type: ignore[arg-type]  # checked by the parser
    if "restart" in given and options.mtbf is None:
        raise UsageError("--restart counts where nodes fail: give --mtbf as well")
    idle = idle_of_methods([m.sync or PLAIN for m in options.chosen_methods()], given)
    for name, why in idle.items():
        raise UsageError(f"{flag(name)} {why}")
    from paceline.scaling.forecast import project
    from paceline.scaling.prediction_inputs import read_inputs
    from paceline.scaling.prediction_report import as_json, as_text

    try:
        inputs = read_inputs(Path(where).expanduser())
    except DataError as error:  # what the user has named: nothing was started
        raise UsageError(str(error)) from error
    projection = project(_forecast_request(inputs, options))
    if options.json:
        print(json.dumps(as_json(projection, inputs), indent=2))
    else:
        print(printable(as_text(projection, inputs)))
    return ExitCode.DONE


def _forecast_request(inputs: "PredictionInputs", options: PredictOptions) -> "ForecastRequest":
    from paceline.gradient_sync.network_model import Network
    from paceline.scaling.forecast import ForecastRequest

    within = options.link_within
    return ForecastRequest(
        profile=inputs.profile,
        link=_link(inputs, options),
        nodes=parse_sizes(options.nodes),
        gpus_per_node=options.gpus_per_node,
        within=Network(bandwidth_bytes_per_s=parse_bandwidth_bytes_per_s(within))
        if within is not None
        else None,
        methods=options.chosen_methods(),
        pays=options.pays,
        price_per_hour=options.price,
        assumed=_assumed(inputs, options),
    )


def _link(inputs: "PredictionInputs", options: PredictOptions) -> "NetworkLink":
    from paceline.scaling.prediction import library_of
    from paceline.scaling.prediction_inputs import examined_link, fitted_link, stated_link

    library = library_of(inputs.profile, _assumed(inputs, options))
    if options.link is not None:
        return stated_link(options.link, options.rtt, library)
    if options.doctor is not None:
        return examined_link(Path(options.doctor).expanduser(), options.rtt, library)
    return fitted_link(inputs, options.rtt, library)


def _assumed(inputs: "PredictionInputs", options: PredictOptions) -> "Assumptions":
    from paceline.scaling.prediction import Assumptions

    def seconds(text: str | None) -> float | None:
        return None if text is None else parse_duration_s(text)

    return Assumptions(
        mode=options.mode or inputs.mode,
        library=options.library,
        mtbf_s=seconds(options.mtbf),
        restart_s=parse_duration_s(options.restart),
        snapshot_every_s=seconds(options.snapshot_every),
    )
