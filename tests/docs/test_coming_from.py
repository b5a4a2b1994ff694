"""The pages for users of other tools: their words are found again, and what is shown is so."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.optim.schedule import scaled_lr
from paceline.recipes.registry import BUILT_IN
from paceline.training.config import TrainConfig
from paceline.training.recipe import load_recipe
from tests.cli.conftest import Paceline
from tests.docs.pages import COMING_FROM, Block, blocks, inline_code, rows
from tests.script.scripts import plain

pytestmark = pytest.mark.xdist_group("pages")

PAGES = [page for page in sorted(COMING_FROM.glob("*.md")) if page.name != "index.md"]
OURS = [block for page in PAGES for block in blocks(page, "python")]
THEIRS = [block for page in PAGES for block in blocks(page, "py")]

KNOBS: Mapping[str, Sequence[str]] = {
    "aws-tutorial": (
        "rank",
        "local rank",
        "world_size",
        "tcp://",
        "file://",
        "env://",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "nccl",
        "NCCL_SOCKET_IFNAME",
        "batch_size=32",
        "loader workers",
        "epochs",
        "learning rate",
        "momentum",
        "weight decay",
        "every 30 epochs",
        "224",
        "deviation",
        "set_epoch",
        "Prec@1",
        "Prec@5",
        "batch time",
        "data time",
        "best accuracy",
        "security group",
        "shutting",
    ),
    "ddp-article": (
        "--standalone",
        "--nnodes",
        "--nproc_per_node",
        "--master_addr",
        "4 GPUs on A, 2 on B",
        "nccl",
        "gloo",
        "LOCAL_RANK",
        "DistributedSampler",
        "batch 64",
        "epochs",
        "Adadelta",
        "0.1307",
        "0.3081",
        "shared disk",
        "per node",
        "barrier",
        "map_location",
        "state_dict",
    ),
    "ddp-course": (
        "--batch-size",
        "--epochs",
        "--base-lr",
        "--target-accuracy",
        "--patience",
        "--num-nodes",
        "--node-id",
        "--num-gpus",
        "--momentum",
        "--warmup-epochs",
        "sqrt K",
        "linear K",
        "SyncBatchNorm",
        "NovoGrad",
        "grad_averaging",
        "dropout",
        "16-160-320-640",
        "shear",
        "colour jitter",
        "barrier",
        "CSV",
        "images/s",
        "training accuracy",
    ),
    "ec2-study": (
        "hours",
        "worker number",
        "world size",
        "name",
        "batch size per device",
        "learning rate",
        "number of epochs",
        "pretrained",
        "20 classes",
        "best validation loss",
        "test loss",
        "top-1",
        "snapshot on failure",
        "loss histories",
        "notebook for the data",
        "notebook for the results",
        "scaling efficiency",
    ),
    "sagemaker-guide": (
        "torch_smddp",
        'backend="smddp"',
        "batch_size //= world_size",
        "LOCAL_RANK",
        "DistributedSampler",
        "checkpoints on rank 0",
        "evaluation on rank 0",
        "Adadelta",
        "StepLR",
        "estimator",
    ),
    "torchrun": (
        "init_process_group",
        "find_unused_parameters",
        "broadcast_buffers",
        "no_sync",
        "SyncBatchNorm",
        "DistributedSampler",
        "num_workers",
        "Join",
        "clip_grad_norm_",
        "GradScaler",
        "lr_scheduler",
        "all_reduce",
        "barrier",
        "torch.save",
        "--standalone",
        "--nnodes",
        "--max-restarts",
        "OMP_NUM_THREADS",
    ),
    "lightning": (
        "accelerator",
        "devices",
        "num_nodes",
        "strategy",
        "precision",
        "max_epochs",
        "max_time",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "sync_batchnorm",
        "use_distributed_sampler",
        "deterministic",
        "seed_everything",
        "check_val_every_n_epoch",
        "training_step",
        "validation_step",
        "configure_optimizers",
        "EarlyStopping",
        "ModelCheckpoint",
        "ckpt_path",
        "logger",
    ),
    "accelerate": (
        "accelerate launch",
        "--num_machines",
        "mixed_precision",
        "gradient_accumulation_steps",
        "prepare",
        "split_batches",
        "even_batches",
        "backward",
        "clip_grad_norm_",
        "gather_for_metrics",
        "save_state",
        "skip_first_batches",
        "wait_for_everyone",
        "is_main_process",
        "notebook_launcher",
    ),
}
"""What users of each have in their hands: by the page's name."""

TABLE = "The study's table, and what follows here by itself"

RECIPES: Mapping[str, Sequence[str]] = {
    "aws-tutorial": ("stl10-resnet18",),
    "ddp-article": ("mnist",),
    "ddp-course": ("fashion-wideresnet", "cifar10-wideresnet"),
    "ec2-study": ("imagefolder-vgg19",),
}


def name_of(page: Path) -> str:
    return page.stem


def knobs(page: Path) -> list[list[str]]:
    head, *found = rows(page, "Each knob")
    assert head[0] == "theirs"
    return found


def test_every_source_has_its_page() -> None:
    assert {page.stem for page in PAGES} == KNOBS.keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_knob_of_theirs_has_become_something(page: Path) -> None:
    theirs = " ".join(cells[0] for cells in knobs(page))
    assert [knob for knob in KNOBS[page.stem] if knob not in theirs] == []
    assert all(cell for cells in knobs(page) for cell in cells)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_page_says_what_goes_wrong_and_what_is_missing(page: Path) -> None:
    text = page.read_text()
    for heading in ("Their lines", "Ours", "Each knob", "What goes wrong there", "Not there yet"):
        assert f"\n## {heading}\n" in text


@pytest.mark.parametrize("page", RECIPES)
def test_the_numbers_of_the_recipes_are_those_of_the_page(page: str) -> None:
    """`lr=0.1` in the right columns is what the recipe sets."""
    recipes = RECIPES[page]
    checked = 0
    for cells in knobs(COMING_FROM / f"{page}.md"):
        for recipe, cell in zip(recipes, cells[1:], strict=False):
            settings = load_recipe(BUILT_IN[recipe]).settings
            for code in inline_code(cell):
                name, equals, value = code.partition("=")
                if equals and name in TrainConfig().settings() and not code.startswith("--"):
                    assert str(settings[name]) == value, f"{recipe}: {code}"
                    checked += 1
    assert checked >= 2


def judged(samples: int, workers: int, batch_size: int, *, drop_last: bool) -> int:
    """Count what a DistributedSampler and a DataLoader of torch's make of a test set."""
    data = TensorDataset(torch.empty(samples))
    loaders: list[DataLoader[object]] = [
        DataLoader(
            data,
            batch_size=batch_size,
            sampler=DistributedSampler(data, num_replicas=workers, rank=rank, shuffle=False),
            drop_last=drop_last,
        )
        for rank in range(workers)
    ]
    return sum(len(batch[0]) for loader in loaders for batch in loader)


def test_the_samples_that_are_lost_or_repeated_are_counted_right() -> None:
    course = (COMING_FROM / "ddp-course.md").read_text()
    for count in (
        judged(10_000, 4, 256, drop_last=True),
        judged(10_000, 4, 32, drop_last=True),
        judged(10_000, 3, 64, drop_last=False),
        judged(50_000, 4, 256, drop_last=True),
    ):
        assert f"{count:,}" in course
    assert judged(10_000, 6, 64, drop_last=False) == 10_002
    assert "10,002" in (COMING_FROM / "ddp-article.md").read_text()
    assert judged(5_000, 3, 32, drop_last=False) == 5_001
    assert "5,001" in (COMING_FROM / "aws-tutorial.md").read_text()


def test_the_table_of_the_study_follows_from_the_recipe() -> None:
    found = rows(COMING_FROM / "ec2-study.md", TABLE)
    table = {cells[0]: cells[1:] for cells in found}
    settings = load_recipe(BUILT_IN["imagefolder-vgg19"]).settings
    config = TrainConfig.from_settings(settings)
    workers = [int(cell) for cell in table["nodes"]]
    own = config.data.batch_per_worker
    assert own is not None
    batches = [own * count for count in workers]
    rates = [scaled_lr(config.optim, batch)[0] for batch in batches]
    assert table["global batch"] == [str(batch) for batch in batches]
    assert table["learning rate, 1e-4"] == [f"{rate * 1e4:.2f}" for rate in rates]
    samples = 650 * 32
    assert table["steps an epoch"] == [str(-(-samples // batch)) for batch in batches]
    minutes = [float(cell) for cell in table["study: minutes an epoch"]]
    efficiency = [minutes[0] / (n * m) for n, m in zip(workers, minutes, strict=True)]
    assert table["study: scaling efficiency"] == [f"{value:.2f}" for value in efficiency]


@pytest.mark.parametrize("block", THEIRS, ids=lambda block: block.page.stem)
def test_their_lines_are_python(block: Block) -> None:
    compile(block.text, block.page.name, "exec")


@pytest.mark.ranks
@pytest.mark.parametrize("block", OURS, ids=lambda block: block.page.stem)
@pytest.mark.slow
def test_our_lines_train_as_the_page_starts_them(block: Block, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READERS_OWN + block.text)
    alone = plain(tmp_path / "train.py")
    assert alone.returncode == 0, alone.stderr
    losses = [ended(tmp_path, 1)]
    done = Paceline(tmp_path).run("run", "train.py", "--workers", "2")
    assert done.code == 0, done.err
    losses.append(ended(tmp_path, 2))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # one page trains in bf16


def ended(directory: Path, workers: int) -> float:
    """Check how the only training of a directory ended, and remove it; returns its loss."""
    (path,) = directory.glob("*/*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["stopped_because"], summary["world_size"]) == ("epochs", workers)
    assert summary["val_samples"] == 21
    shutil.rmtree(path.parent)
    return float(summary["train_loss"])


READERS_OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
data = torch.Generator().manual_seed(1)


def points(count):
    inputs = torch.randn(count, 4, generator=data)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=data))


def Net():
    return nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))


train_set, test_set = points(101), points(21)
"""
"""What a page takes for the reader's own."""
