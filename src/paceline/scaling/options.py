"""What a user may say about studies of scaling and about predictions. Imports no torch."""

from dataclasses import dataclass, replace
from math import isfinite

from paceline.errors import UsageError
from paceline.gradient_sync.network_model import Library
from paceline.gradient_sync.options import SyncMethod, SyncOptions
from paceline.gradient_sync.registry import sync_methods
from paceline.options.durations import parse_duration_s
from paceline.options.fields import flag
from paceline.options.quantities import parse_sizes
from paceline.results.study import Mode

METHODS: tuple[SyncMethod, ...] = tuple(sync_methods())
PLAIN: SyncMethod = "allreduce"
"""What one worker is always measured with: it combines nothing."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """What is measured, how often and for how long."""

    workers: str | None = None
    """Numbers of workers, such as 1,2,4,8, or 1..8 for the same. One worker is always measured:
    efficiency is against it. Default: 1, 2, 4 and so on, up to the workers that the hosts have, or
    GPUs or cores here."""

    mode: Mode = "weak"
    """weak: each worker has the same batch, so that the global batch grows with the workers.
    strong: the global batch stays."""

    repeats: int = 3
    """Measurements of each size. They take turns, so that a disturbance doesn't hit one size."""

    seconds: float = 20.0
    """Seconds of training in each measurement."""

    methods: str | None = None
    """Ways of combining gradients to measure, as in --sync, such as allreduce,powersgd. Default:
    the recipe's own, or allreduce."""

    train: bool = False
    """Also train each size as `paceline train` would, to the end of its epochs or of its time
    budget: what does scaling do to the result?"""

    study_dir: str | None = None
    """Directory of the study. Where it holds this study already, what is missing is measured.
    Default: runs/scale-NAME-TIME."""

    def __post_init__(self) -> None:
        """Check what can be checked alone.

        Raises:
            UsageError: A value is out of range or unknown; the message says which.
        """
        parse_workers(self.workers)
        parse_methods(self.methods)
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, not {self.repeats}")
        if not 1 <= self.seconds < float("inf"):
            raise UsageError(f"--seconds must be at least 1, not {self.seconds:g}")


def parse_workers(text: str | None) -> tuple[int, ...]:
    """Read numbers of workers, the smallest first; empty where nothing is said.

    Raises:
        UsageError: They are none.
    """
    return () if text is None else parse_sizes(text, "workers")


def parse_methods(text: str | None) -> tuple[SyncMethod, ...]:
    """Read ways of combining gradients; empty where nothing is said.

    Raises:
        UsageError: One is unknown, or stands there twice.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in METHODS:
            raise UsageError(
                f"--methods is {text}, but {word!r} is none. Known: {', '.join(METHODS)}"
            )
        if words.count(word) > 1:
            raise UsageError(f"--methods is {text}: {word} stands there twice")
    return tuple(words)


def usual_workers(most: int) -> tuple[int, ...]:
    """Choose the default numbers of workers: powers of two, and all that there are."""
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    return tuple(sorted({*powers, most}))


PREDICTED = {
    "allreduce": SyncOptions(sync="allreduce"),
    "ordered": SyncOptions(sync="ordered"),
    "bf16": SyncOptions(sync="allreduce", sync_precision="bf16"),
    "powersgd": SyncOptions(sync="powersgd"),
}
"""Ways of combining gradients that can be predicted; bf16 is `--sync-precision bf16`."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """For which hosts, networks and prices.

    Flat, since each field is an option of the command line.
    """

    nodes: str = "2,4,8"
    """Numbers of nodes: 1,2,4,8, or doubled from the first to the last, 2..1024."""

    gpus_per_node: int = 1
    """Workers on each node, which share its link."""

    link: str | None = None
    """Speed of each node's link, such as 25gbit (bits) or 1.2GB/s (bytes). Default: of a study,
    what explains its sizes."""

    rtt: str | None = None
    """Round-trip of a small message between nodes, such as 50us. Default: 0.1 ms, or the
    doctor's."""

    link_within: str | None = None
    """Speed between the workers of a node, such as 64gbit. Default: as if it took no time."""

    doctor: str | None = None
    """File with what `paceline doctor --hosts ... --json` printed, in place of --link."""

    library: Library | None = None
    """What carries the bytes. gloo: a ring. nccl: ring or tree, whatever is faster. Default: nccl
    for a profile of GPUs, else gloo."""

    mode: Mode | None = None
    """weak: each worker keeps its batch, so that the global batch grows with the workers. strong:
    the global batch stays. Default: as a study scaled, else weak."""

    methods: str | None = None
    """Ways of combining gradients to predict: allreduce, ordered, bf16 (--sync-precision bf16),
    powersgd. Default: all of them."""

    powersgd_rank: int = 4
    """Columns of PowerSGD's matrices."""

    pays: float = 0.8
    """Efficiency from which on a size is said to pay."""

    price: float | None = None
    """What a node costs in an hour, in any currency."""

    mtbf: str | None = None
    """Mean time between failures of one node, such as 1000h. Default: none fails."""

    restart: str = "2m"
    """From a failure until the training goes on."""

    snapshot_every: str | None = None
    """Time between two snapshots, to which a failure throws the training back. Default: an
    epoch."""

    json: bool = False
    """Print JSON: all methods, all sizes, with bands."""

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: A value is out of range or unknown; the message says which.
        """
        # Values by themselves.
        parse_sizes(self.nodes)
        self.chosen_methods()
        for name in ("gpus_per_node", "pays", "price"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise UsageError(f"{flag(name)} must be above 0, not {value:g}")
        if self.pays > 1:
            raise UsageError(f"--pays is an efficiency, at most 1, not {self.pays:g}")
        # Options that exclude or need each other.
        if self.link is not None and self.doctor is not None:
            raise UsageError("--link and --doctor both say what the network is: give one of them")
        for name in ("mtbf", "restart", "snapshot_every"):
            text = getattr(self, name)
            if text is not None:
                parse_duration_s(text, flag(name))
        if self.link_within is not None and self.gpus_per_node == 1:
            raise UsageError(
                "--link-within is the speed between the workers of a node, and --gpus-per-node is "
                "1: give more of them, or leave it out"
            )
        if self.mtbf is None and self.snapshot_every is not None:
            raise UsageError("--snapshot-every counts where nodes fail: give --mtbf as well")

    def chosen_methods(self) -> tuple[SyncOptions, ...]:
        """List what is to be predicted.

        Raises:
            UsageError: A method or one of its options can't be.
        """
        words = [*PREDICTED] if self.methods is None else self.methods.split(",")
        words = [word.strip() for word in words]
        for word in words:
            if word not in PREDICTED:
                raise UsageError(
                    f"--methods is {self.methods}, but {word!r} can't be predicted. Known: "
                    + ", ".join(PREDICTED)
                )
        chosen = {name: method for name, method in PREDICTED.items() if name in words}
        if "powersgd" in chosen:
            chosen["powersgd"] = replace(chosen["powersgd"], powersgd_rank=self.powersgd_rank)
        return tuple(chosen.values())
