"""With fp16 no step waits for the device, and those that overflow leave what PyTorch's scaler does.

Expected are the bits of `torch.amp.GradScaler`, which asks the device before each step.
"""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

CASES = """
import os
import torch
from pytorch_optimizer import LARS, Lamb, NovoGrad
from torch import nn, optim
from paceline.optim.loss_scaler import LossScaler, _copy_unless, _like, _scratch
from tests.pretend_gpu.counters import SYNCS, counted_here

LOST = {0, 7, 8, 20, 21, 29}
if "PRETEND_GPU_STREAMS" in os.environ:
    torch.cuda.set_stream(torch.cuda.Stream())

def lamb(parameters, **group):
    optimizer = Lamb(parameters, weight_decouple=False, pre_norm=False, max_grad_norm=0.0)
    optimizer.param_groups[0].update(group)
    return optimizer

def hooked(parameters):
    optimizer = optim.SGD(parameters, 0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return optimizer

def replaced(parameters):
    optimizer = optim.SGD(parameters, 0.1)
    plain = optimizer.step
    def step():
        plain()
        calls.append(1)
    optimizer.step = step
    return optimizer

def scheduled(parameters):
    optimizer = optim.SGD(parameters, 0.1, momentum=0.9)
    optimizer.schedule = optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer

MADE = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": scheduled,
    "adam": lambda p: optim.Adam(p, amsgrad=True, capturable=True),
    "adadelta": lambda p: optim.Adadelta(p, foreach=True),
    "novograd": lambda p: NovoGrad(p, lr=0.01, betas=(0.95, 0.98)),
    "lars": lambda p: LARS(p, lr=0.1),
    "lamb": lambda p: lamb(p, adam_debias=True),
    "adamw": lambda p: optim.AdamW(p, foreach=True),
    "lamb with bias": lamb,
    "rmsprop": optim.RMSprop,
    "hooked": hooked,
    "replaced": replaced,
}

def train(make, kind, steps):
    "Two groups, of which one has no gradients at first; the state is read and loaded on the way."
    drawn = torch.Generator().manual_seed(1)
    shapes = [(32, 16), (32,), (10, 32), (10,)]
    weights = [nn.Parameter(torch.randn(shape, generator=drawn).cuda()) for shape in shapes]
    late = nn.Parameter(torch.randn(5, 3, generator=drawn).cuda().t())
    weights[0].data[0, 0] = -0.0
    optimizer = make([{"params": weights}, {"params": [late]}])
    scaler = kind("cuda", init_scale=8.0, growth_interval=3)
    waits, scales = 0, []
    for step in range(steps):
        for each in [*weights, late]:
            gradient = torch.randn(each.shape, generator=drawn) * scaler.get_scale()
            if step in LOST:
                gradient.flatten()[0] = float("inf" if step % 2 else "nan")
            each.grad = gradient.cuda() if each is not late or step > 10 else None
        if step == 15:
            optimizer.load_state_dict(optimizer.state_dict())
        scaler.scale(torch.ones((), device="cuda"))
        before = counted_here()
        scaler.step(optimizer)
        scaler.update()
        spent = counted_here() - before
        if step not in (0, 1, 11):  # what there was nothing of before
            waits += sum(spent[name] for name in SYNCS)
        if hasattr(optimizer, "schedule"):
            optimizer.schedule.step()
        scales.append(scaler.get_scale())
    state = optimizer.state_dict()
    tensors = [*weights, late, *(v for s in state["state"].values() for v in s.values())]
    bits = [t.detach().cpu().contiguous().view(torch.int32).tolist() for t in tensors]
    return [bits, scales, repr(state["param_groups"]), len(calls)], waits

for name, make in MADE.items():
    found = []
    for kind in (torch.amp.GradScaler, LossScaler):
        calls = []
        found.append(train(make, kind, 30))
    (expected, _), (own, waits) = found
    assert len(expected[0]) >= 5
    print(name, "equal" if expected == own else "differs", waits)

# What is copied, and what isn't: numbers that compare equal or with nothing, and other layouts.
odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.0, 7.0])
sources = [odd.cuda(), torch.randn(2, 3, 4, 4).cuda().to(memory_format=torch.channels_last)]
for flag in (0.0, 1.0):
    targets = [torch.full_like(one, 5.0) for one in sources]
    before = [one.clone() for one in (*sources, *targets)]
    _copy_unless(torch.tensor(flag, device="cuda"), sources, targets, _scratch(sources))
    expected = [*before[:2], *before[2 * int(flag):2 * int(flag) + 2]]
    pairs = zip((*sources, *targets), expected, strict=True)
    print(all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs))

# Nothing else waits for the device here.
gradients = [torch.randn(9, generator=torch.Generator().manual_seed(n)).cuda() for n in range(8)]
gradients[3][0] = gradients[4][0] = float("inf")
for make in (optim.SGD, optim.AdamW):
    found = []
    for kind in (torch.amp.GradScaler, LossScaler):
        weight, scaler = nn.Parameter(torch.ones(9, device="cuda")), kind("cuda")
        optimizer = make([weight], 0.1)
        counted = []
        for gradient in gradients:
            weight.grad = gradient.clone()
            scaler.scale(torch.ones((), device="cuda"))
            before = counted_here()
            scaler.step(optimizer)
            scaler.update()
            spent = counted_here() - before
            counted.append(sum(spent[name] for name in SYNCS))
        found.append((weight.tolist(), counted))
    print(make.__name__, found[0][0] == found[1][0], *found[1][1])

# Without memory for a copy it is asked again.
weight = nn.Parameter(torch.ones(1_000_000, device="cuda"))
optimizer, scaler = optim.SGD([weight], 0.1, momentum=0.9), LossScaler("cuda", init_scale=1.0)
for step in range(5):
    weight.grad = torch.full_like(weight, scaler.get_scale())
    if step == 3:
        weight.grad[0] = float("inf")
    if step == 2:
        free = torch.cuda.mem_get_info()[0] - (1 << 20)
        hog = torch.empty(free, dtype=torch.uint8, device="cuda")
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
print(weight.detach().cpu().unique().mul(1e4).round().tolist())
"""


UNDONE = ("sgd", "momentum", "adam", "adadelta", "novograd", "lars", "lamb")
COUNTING = ("adamw", "lamb with bias")


def test_steps_that_overflow_leave_the_bits_of_pytorchs_scaler(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = gpus.python("cases.py", directory=tmp_path, PRETEND_GPU_BYTES=str(64 << 20))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        *(f"{name} equal 0" for name in (*UNDONE, *COUNTING)),
        # What Paceline doesn't know may look at weights before they are put back.
        *(f"{name} equal 27" for name in ("rmsprop", "hooked", "replaced")),
        *("True", "True"),
        "SGD True 1 0 0 0 0 0 0 0",
        "AdamW True 1 0 0 0 0 0 0 0",
        # Momentum 1, 1.9, 2.71, 3.439 of four steps that count: 1 - 0.1 * their sum.
        "[951.0]",
    ]


def test_counts_wait_for_the_step_before_where_the_device_is_late(
    gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = gpus.python(
        "cases.py",
        directory=tmp_path,
        PRETEND_GPU_STREAMS="late",
        PRETEND_GPU_BYTES=str(64 << 20),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {f"{name} equal 0" for name in (*UNDONE, *COUNTING)} < set(lines)
    assert lines[-3:-1] == ["SGD True 1 0 0 0 0 0 0 0", "AdamW True 1 0 1 1 1 1 1 1"]


TRAINING = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from pytorch_optimizer import NovoGrad
from torch import nn
from torch.nn import functional as F
import paceline

LOST = {0, 6, 7, 13, 23}

with paceline.session(epochs=3, snapshot_every_steps=4) as s:
    torch.manual_seed(1)
    images, labels = torch.randn(124, 1, 8, 8), torch.arange(124) % 4
    model = s.model(nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    ))
    if "novograd" in sys.argv:
        optimizer = NovoGrad(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    s.optimizer(optimizer)
    if "asks" in sys.argv:
        optimizer.register_step_post_hook(lambda *_: None)
    model[-1].bias.register_hook(
        lambda gradient: gradient * (float("inf") if s.steps_done in LOST else 1.0)
    )
    loader = s.loader(torch.utils.data.TensorDataset(images, labels), global_batch=16)
    for epoch in s.epochs():
        for inputs, targets in loader:
            if "dies" in sys.argv and s.steps_done == 15 and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = F.cross_entropy(model(inputs), targets)
            if "backward" in sys.argv:
                s.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            else:
                s.step(loss)
    state = optimizer.state_dict()
    slots = [one[name] for one in state["state"].values() for name in sorted(one)]
    held = [*model.parameters(), *slots]
    digest = hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in held))
    if s.rank == 0:
        count = state["param_groups"][0].get("step", state["state"][0].get("step"))
        print("trained", s.steps_done, int(count), digest.hexdigest())
"""


def trained(gpus: Host, directory: Path, devices: int, options: str, words: str = "") -> str:
    """Train, and say how many steps were taken, how many of them counted, and to which bits."""
    directory.mkdir(parents=True)
    (directory / "train.py").write_text(TRAINING)
    where = "--on here" if devices == 1 else "--workers 2"
    waits = {} if "asks" in words else {"PRETEND_GPU_WAITS": "refused"}
    done = gpus.paceline(
        *f"run train.py --run-dir run --precision fp16 --progress off {where} {options}".split(),
        *("--", *words.split()),
        directory=directory,
        devices=devices,
        PRETEND_GPU_COUNTERS=str(directory),
        **waits,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if "trained" in line).split("trained")[1]


@pytest.mark.parametrize("optimizer", ["adamw", "novograd"])
def test_shards_have_the_same_bits_on_any_number_of_devices_and_after_a_death(
    gpus: Host, optimizer: str, tmp_path: Path
) -> None:
    expected = trained(gpus, tmp_path / "asks", 1, "--shards 4", f"{optimizer} asks")
    assert expected.split()[:2] == ["24", "19"]
    assert trained(gpus, tmp_path / "1", 1, "--shards 4", optimizer) == expected
    assert trained(gpus, tmp_path / "2", 2, "--shards 4", f"{optimizer} dies") == expected
    assert (tmp_path / "2" / "died").exists()


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ("--sync powersgd --sync-warmup-steps 4 --clip-norm 0.5", 2, "novograd"),
        ("--max-batch-per-worker 8", 1, "novograd"),
        ("", 1, "novograd backward"),
    ],
    ids=["powersgd", "pieces", "backward"],
)
def test_trainings_have_the_bits_of_pytorchs_scaler(
    gpus: Host, options: str, devices: int, words: str, tmp_path: Path
) -> None:
    expected = trained(gpus, tmp_path / "asks", devices, options, "novograd asks")
    assert expected.split()[:2] == ["24", "19"]
    assert trained(gpus, tmp_path / "own", devices, options, words) == expected
