"""Options of what a training shows and records."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a training shows and records besides metrics.csv."""

    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """What is shown while training. auto: a progress bar on a terminal, plain lines in a pipe."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run directory (extra: paceline[tensorboard])."""
