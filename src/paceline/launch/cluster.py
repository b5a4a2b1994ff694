"""A training that a cluster is to start: what every kind of cluster needs to know of it."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s
from paceline.options.fields import check_at_least

Plain = str | int | float | bool | None | Mapping[str, "Plain"] | Sequence["Plain"]
"""What YAML and JSON consist of."""
Manifest = dict[str, Plain]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What to ask of a cluster, whatever its kind."""

    nodes: int = 1
    """Nodes to ask for; --workers is then the number of workers on each of them."""

    gpus_per_node: int | None = None
    """GPUs to ask for on each node, one worker each unless --workers says otherwise. Default: none.
    On SageMaker and SkyPilot the type of instance or accelerator decides instead."""

    time_limit: None | str = None  # noqa: RUF036  # the first type that fits is taken
    """How long the cluster lets the job run, such as 12h. Default: the cluster's own limit."""

    job_name: str | None = None
    """The job's name. Default: paceline- and the recipe's name."""

    image: str | None = None
    """Container image to run in, with PyTorch, Paceline and your code in it."""

    job_patch: str | None = None
    """YAML file that is merged into what is rendered for the cluster: anything that has no option
    here. For Slurm a mapping of sbatch's options."""

    submit: bool = False
    """Submit what was rendered, by the cluster's own tool."""

    resume: bool = False
    """Resume the training that --run-dir holds, or start it where there is none yet: for commands
    that are run again, such as those that are rendered for clusters."""

    dry_run: bool = False
    """Print what would be started or rendered (settings, steps an epoch, memory, workers), and
    start nothing."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A count is out of range, or the time limit can't be read.
        """
        check_at_least(self, nodes=1, gpus_per_node=0)
        if self.time_limit is not None:
            parse_duration_s(self.time_limit, "--time-limit")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of a launcher that has none."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """One training, as it is handed to a cluster."""

    command: tuple[str, ...]
    """`train` or `run` and what is trained; or `resume`."""
    options: tuple[str, ...] = ()
    """Words of the training's options, without `--run-dir`."""
    script_args: tuple[str, ...] = ()
    name: str
    nodes: int
    workers: int | None
    """On each node; None: one per GPU, or what the node's Paceline chooses."""
    gpus_per_node: int | None
    time_limit_s: int | None
    image: str | None
    max_restarts: int
    """How often the cluster may start the training again after a failure of infrastructure."""
    directory: Path
    """The working directory, absolute."""
    run_dir: str
    """As the user has it: relative to the working directory, or absolute."""
    folder: Path
    """Where the rendered files are written."""
    patch: Mapping[str, Plain] = field(default_factory=dict)
    """What the user merges into the rendered job."""

    def words(self, run_dir: str, *more: str) -> list[str]:
        """Return the words after `paceline` that each node runs; a restarted node goes on by them.

        Args:
            run_dir: The run directory, as the nodes see it.
            more: Further options.
        """
        if self.command[0] == "resume":
            return ["resume", run_dir, *self.options, *more]
        resume = ["--run-dir", run_dir, "--resume"]
        script = ["--", *self.script_args] if self.script_args else []
        return [*self.command, *self.options, *resume, *more, *script]

    def unique_name(self, longest: int) -> str:
        """Return a name that DNS takes (RFC 1123), different for each submission."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if not plain[:1].isalpha():  # a Service's name begins with a letter (RFC 1035)
            plain = f"job-{plain}".strip("-")
        own = secrets.token_hex(3)
        return f"{plain[: longest - len(own) - 1].rstrip('-')}-{own}"

    def check_image(self, on: str) -> str:
        """Return the image.

        Raises:
            UsageError: None was named.
        """
        if self.image is None:
            raise UsageError(
                f"--on {on} needs --image: an image with PyTorch, Paceline and your code in it"
            )
        return self.image


def merged(rendered: Plain, patch: Plain) -> Plain:
    """Return what is rendered with a patch merged into it.

    Mappings are merged key by key, and null removes a key. The items of a list of mappings are
    merged by their `name`, others appended. Anything else is replaced.
    """
    if isinstance(rendered, Mapping) and isinstance(patch, Mapping):
        both = {**rendered, **{k: merged(rendered.get(k), v) for k, v in patch.items()}}
        return {key: value for key, value in both.items() if key not in patch or value is not None}
    if not _of_mappings(rendered) or not _of_mappings(patch):
        return patch
    items: list[Plain] = list(rendered)
    names = [item.get("name") for item in rendered]
    for item in patch:
        name = item.get("name")
        if name is not None and name in names:
            items[names.index(name)] = merged(items[names.index(name)], item)
        else:
            items.append(item)
    return items


def _of_mappings(value: Plain) -> TypeGuard[list[Mapping[str, Plain]]]:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def read_patch(path: str | None) -> dict[str, Plain]:
    """Read the file of `--job-patch`.

    Raises:
        UsageError: It can't be read, or isn't a YAML mapping.
    """
    import yaml

    if path is None:
        return {}

    # As in YAML 1.2, 12:00:00 is text: to PyYAML it is a number to the base of 60.
    loader: Any = type("_Loader", (yaml.SafeLoader,), {})
    loader.add_constructor(
        "tag:yaml.org,2002:int",
        lambda it, node: node.value if ":" in node.value else it.construct_yaml_int(node),
    )
    try:
        content = yaml.load(Path(path).expanduser().read_text(), loader)
    except OSError as error:
        raise UsageError(f"--job-patch {path} can't be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--job-patch {path} can't be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"--job-patch {path} isn't a YAML mapping")
    return content
