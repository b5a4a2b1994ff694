"""The clusters that `--on` can name: ours, and those of other packages that are installed.

Such a package has an entry point of the group `paceline.launchers`, which names a `LauncherEntry`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from paceline.launch.base import Launcher
from paceline.options.entry_points import added_names, imported, with_added

GROUP = "paceline.launchers"
PLACES = ("auto", "local", "here", "node")
"""What `--on` can say beside a cluster."""


@dataclass(frozen=True, kw_only=True)
class LauncherEntry:
    """Where a launcher is: nothing is imported before it is needed."""

    heading: str
    """Over its options, in `--help`."""
    options: str
    """`module:class`: the dataclass of its options, in a small module: every command imports it."""
    launcher: str
    """`module:class`: the Launcher, made of these options."""

    def options_class(self) -> type:
        """Import the dataclass of options."""
        options: type = imported(self.options)
        return options

    def make(self, options: object) -> Launcher:
        """Import the launcher, and make one."""
        launcher: Callable[[object], Launcher] = imported(self.launcher)
        return launcher(options)


_BUILT_IN: Mapping[str, LauncherEntry] = {
    "slurm": LauncherEntry(
        heading="Slurm",
        options="paceline.launch.slurm:SlurmOptions",
        launcher="paceline.launch.slurm:SlurmLauncher",
    ),
    "kubernetes": LauncherEntry(
        heading="Kubernetes",
        options="paceline.launch.cluster:NoOptions",
        launcher="paceline.launch.kubernetes:KubernetesLauncher",
    ),
    "skypilot": LauncherEntry(
        heading="SkyPilot",
        options="paceline.launch.cluster:NoOptions",
        launcher="paceline.launch.skypilot:SkypilotLauncher",
    ),
    "sagemaker": LauncherEntry(
        heading="SageMaker",
        options="paceline.launch.sagemaker:SagemakerOptions",
        launcher="paceline.launch.sagemaker:SagemakerLauncher",
    ),
}


def launcher_names() -> tuple[str, ...]:
    """List the names that `--on` takes for a cluster. No other package is imported for that."""
    return tuple(dict.fromkeys((*_BUILT_IN, *added_names(GROUP))))


@cache
def launchers() -> Mapping[str, LauncherEntry]:
    """Give all launchers by their names, ours first.

    Raises:
        UsageError: Another package's has a name that is taken, or can't be imported.
    """
    return with_added(_BUILT_IN, GROUP, LauncherEntry, "the launcher {!r}", PLACES)
