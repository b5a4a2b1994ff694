"""The interface of clusters: a `Launcher` renders a training into files, and submits them.

`registry.py` lists the implementations; docs/internals/add-a-launcher.md shows how to add one.
"""

import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A training as a cluster takes it, and the commands that belong to it."""

    files: Mapping[str, str]
    """Text by file name. They are written into `ClusterJob.folder`."""
    submit: tuple[str, ...]
    """Words of the command that submits them, with the cluster's own tool."""
    follow: str
    """Shell command that shows what the training prints."""
    stop: str
    """Shell command that ends the training."""


class Launcher(ABC):
    """One kind of cluster, with the options that its dataclass gives it."""

    shares_files = False
    """Whether nodes and this machine share the run directory."""

    @abstractmethod
    def render(self, job: ClusterJob) -> Rendered:
        """Return what is to be submitted. Asks no cluster and writes nothing.

        Raises:
            UsageError: Something is missing, or can't go together.
        """

    @abstractmethod
    def submit(self, rendered: Rendered) -> None:
        """Submit what `render` returned, once its files are written.

        Raises:
            UsageError: The cluster's tool isn't installed, or has failed.
        """


def run_tool(command: Sequence[str]) -> None:
    """Run a cluster's own command, whose output is the user's to read.

    Raises:
        UsageError: It isn't installed, or fails.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"--submit needs {command[0]}, which isn't on the PATH. Submit from a machine that has "
            f"it: {shlex.join(command)}"
        )
    code = subprocess.run(command, check=False).returncode
    if code:
        raise UsageError(f"not submitted: {command[0]} ended with exit code {code}")
