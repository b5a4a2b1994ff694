"""The table of scripts in the idioms of others: what each of them changes, keeps and gives up."""

import atexit
import difflib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.diffs import apply_diff

HERE = Path(__file__).parent
EXACT = 1e-5
"""Weights of the same sums in another order, after 20 to 40 steps in fp32."""


@dataclass(frozen=True, kw_only=True)
class Idiom:
    """One script of one process (or of torchrun), and the same one with a session."""

    name: str
    kind: str
    """What it is, for the docs."""
    new: int
    """Lines of the later script that the earlier one doesn't have, changed ones included."""
    gone: int
    """Lines of the earlier script that the later one doesn't have."""
    watch: str
    """What had to be given up, or has to be watched for; for the docs."""
    arguments: tuple[str, ...] = ()
    """With which 1 and 2 workers can be compared: no noise, and no optimizer that enlarges it."""
    options: tuple[str, ...] = ()
    """Of `paceline run`, for that comparison."""
    within: float | None = EXACT
    """Largest difference of a weight on 1 and 2 workers; None where the losses are compared."""
    loss_within: float = 0.0
    """Relative difference of the last training loss, where the weights can't be compared."""
    models: tuple[str, ...] = ("model/",)
    """How the names of each model's tensors begin, in a snapshot."""
    without_noise: tuple[str, str] = ("", "")
    """What is replaced in both scripts before one process is compared with plain PyTorch."""
    plain_within: float = EXACT
    """Largest difference of a weight there."""
    shards: bool = True
    """Whether `--shards` can be asked for."""
    kept: str | None = None
    """A name that `s.keep` has, in the snapshots."""
    verdict: str = "same to rounding"
    """What `paceline verify` concludes with these options."""
    causes: tuple[str, ...] = ()
    """What it finds."""

    @property
    def before(self) -> Path:
        return HERE / f"{self.name}_before.py"

    @property
    def after(self) -> Path:
        """The script with the changes of `NAME.diff`, in a temporary directory of this process."""
        path = _written() / f"{self.name}_after.py"
        if not path.exists():
            diff = (HERE / f"{self.name}.diff").read_text()
            path.write_text(apply_diff(self.before.read_text(), diff))
        return path

    def row(self) -> str:
        """Write the line of the table in docs/tutorial/own-loop.md."""
        return f"| {self.kind} | {self.new} | {self.gone} | {self.watch} |"


IDIOMS = (
    Idiom(
        name="mnist",
        kind="MNIST: functions `train` and `test`",
        new=9,
        gone=4,
        watch="counts of the evaluation go through `s.sum`; dropout differs with the workers",
        within=None,
        loss_within=0.1,
    ),
    Idiom(
        name="mnist_rnn",
        kind="LSTM with BatchNorm, a test loader that shuffles",
        new=13,
        gone=19,
        watch="BatchNorm: `s.evaluate` rather than a loop, which has running statistics of its own",
        options=("--sync-batchnorm",),
    ),
    Idiom(
        name="vae",
        kind="VAE at module level, a loss summed over the batch",
        new=10,
        gone=4,
        watch="the sum becomes a mean (`loss / len(data)`); each worker draws its own noise",
        arguments=("--batch-size", "60"),
        within=None,
        loss_within=0.05,
        verdict="same but for chance",
        causes=("chance",),
    ),
    Idiom(
        name="dcgan",
        kind="DCGAN: two models, two optimizers, two backward passes",
        new=11,
        gone=4,
        watch="`more=True` for the first pass; several optimizers: no `--shards`",
        within=None,
        loss_within=0.1,
        models=("model/model.", "model/model2."),
        shards=False,
        verdict="different",
        causes=("batchnorm-share",),
    ),
    Idiom(
        name="siamese",
        kind="Siamese network, a data set that draws its pairs",
        new=8,
        gone=3,
        watch="nothing: samples are seeded by epoch and position in its order",
    ),
    Idiom(
        name="super_resolution",
        kind="Super-resolution at module level",
        new=13,
        gone=12,
        watch="PSNR is the mean over images, not over batches",
        arguments=("--lr", "1e-4"),
    ),
    Idiom(
        name="imagenet",
        kind="ImageNet: meters, `best_acc1`, checkpoints",
        new=25,
        gone=43,
        watch="`--resume` and `--start-epoch` go; meters of the training show this worker's share",
        options=("--sync-batchnorm",),
        kept="best_acc1",
    ),
    Idiom(
        name="word_language_model",
        kind="Word language model: hidden state, columns cut by hand, SGD by hand",
        new=34,
        gone=19,
        watch="the columns become a data set (8 lines), so that workers can share them",
        arguments=("--dropout", "0"),
        kept="best_val_loss",
    ),
    Idiom(
        name="cifar",
        kind="CIFAR-10 with globals, transforms, `best_acc`",
        new=16,
        gone=30,
        watch="`--resume` goes; figures of the training are this worker's share",
        options=("--sync-batchnorm",),
        kept="best_acc",
    ),
    Idiom(
        name="nanogpt",
        kind="nanoGPT: random windows, accumulation, a learning rate for each step",
        new=33,
        gone=33,
        watch="`get_batch` is a data set (8 lines), on the host; estimates come behind the update",
        within=None,
        loss_within=0.02,
        without_noise=("2, 2, 32, 0.1", "2, 2, 32, 0.0"),
        kept="best_val_loss",
    ),
    Idiom(
        name="multigpu",
        kind="torchrun's tutorial: `Trainer`, DistributedSampler, DDP",
        new=9,
        gone=29,
        watch="its batch size was each worker's, and is the global one now",
    ),
)
BY_NAME = {idiom.name: idiom for idiom in IDIOMS}


@cache
def _written() -> Path:
    """Make the directory of the later scripts, which goes with this process."""
    made, owner = tempfile.mkdtemp(prefix="paceline-idioms-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and no process that was forked from it
            shutil.rmtree(made)

    atexit.register(remove)
    return Path(made)


def code_of(path: Path) -> list[str]:
    """List the lines of code, with their indentation: no docstrings, comments, blank lines."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def count_changes(before: Path, after: Path) -> tuple[int, int]:
    """Count the lines that only the later script has, and those that only the earlier one has."""
    matcher = difflib.SequenceMatcher(None, code_of(before), code_of(after), autojunk=False)
    changed = [codes for codes in matcher.get_opcodes() if codes[0] != "equal"]
    return sum(j2 - j1 for *_, j1, j2 in changed), sum(i2 - i1 for _, i1, i2, *_ in changed)
