"""Options of what a training shows and records."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a training shows and records besides metrics.csv."""

    progress: Literal["auto", "bar", "plain", "off"] = "auto"
    """What is shown while training. auto: a progress bar on a terminal, plain lines in a pipe."""

    share_run_dir: bool = False
    """Let others read the run directory, as your umask says: a team's. By default nobody but you
    may enter it."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run directory (extra: paceline[tensorboard])."""

    tracker: tuple[str, ...] = ()
    """Also show the run at a tracker: wandb, mlflow (extras paceline[wandb], paceline[mlflow]), or
    one that another package adds. Repeat it for several."""

    tracker_project: str | None = None
    """W&B's project, MLflow's experiment. Default: what the tracker's own variables say, then the
    recipe's name."""
