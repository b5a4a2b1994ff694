"""The trackers that `--tracker` can name: ours, and those of other packages that are installed.

Such a package has an entry point of the group `paceline.sinks`, which names a `SinkEntry`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from paceline.errors import UsageError
from paceline.options.entry_points import imported, with_added
from paceline.options.fields import unknown_name
from paceline.tracking.base import Sink

GROUP = "paceline.sinks"


@dataclass(frozen=True, kw_only=True)
class SinkEntry:
    """Where a sink is: nothing is imported before it is needed."""

    sink: str
    """`module:class`: a `Sink`, made without arguments."""
    package: str = ""
    """The module that has to be installed for it; empty for none."""
    install: str = ""
    """What installs that, as pip takes it."""

    def make(self) -> Sink:
        """Import the sink, and make one."""
        made: Callable[[], Sink] = imported(self.sink)
        return made()


_BUILT_IN: Mapping[str, SinkEntry] = {
    "wandb": SinkEntry(
        sink="paceline.tracking.wandb_sink:WandbSink",
        package="wandb",
        install="paceline[wandb]",
    ),
    "mlflow": SinkEntry(
        sink="paceline.tracking.mlflow_sink:MlflowSink",
        package="mlflow",
        install="paceline[mlflow]",
    ),
}


@cache
def trackers() -> Mapping[str, SinkEntry]:
    """Give all sinks by their names, ours first.

    Raises:
        UsageError: Another package's has a name that is taken, or can't be imported.
    """
    return with_added(_BUILT_IN, GROUP, SinkEntry, "--tracker {}")


def require_trackers(names: Iterable[str]) -> None:
    """Check that these trackers are known and their packages installed; imports none of them.

    Raises:
        UsageError: One isn't; the message names the extra.
    """
    for name in names:
        if name not in trackers():
            other = (
                ". TensorBoard has its own option: --tensorboard" if name == "tensorboard" else ""
            )
            raise UsageError(unknown_name(name, trackers(), "tracker") + other)
        entry = trackers()[name]
        if entry.package and find_spec(entry.package) is None:
            raise UsageError(f"--tracker {name} needs the extra: pip install '{entry.install}'")
