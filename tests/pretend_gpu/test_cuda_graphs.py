"""`--cuda-graphs` gives the bits of a training without, by fewer launches; or says why it can't."""

import json
from pathlib import Path

import pytest

from tests.pretend_gpu.counters import counted_steps, usual
from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

DROPPING = """
import torch
from torch import nn
from torch.nn import functional as F
import paceline

with paceline.session(epochs=2) as s:
    torch.manual_seed(1)
    images, labels = torch.randn(92, 1, 8, 8), torch.arange(92) % 4
    model = s.model(nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(144, 4),
    ))
    optimizer = s.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = s.loader(torch.utils.data.TensorDataset(images, labels), global_batch=8)
    for epoch in s.epochs():
        for inputs, targets in loader:
            s.step(F.cross_entropy(model(inputs), targets))
"""

GROWING = """
import torch
from torch import nn
import paceline

with paceline.session() as s:
    model = s.model(nn.Linear(1, 1))
    optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in s.steps(110):
        s.step(model(torch.ones(1 + step, 1, device=s.device)).mean())
"""

# What can't be captured, each with what it leaves; and passes that overlap.
CASES = """
import json, random
import torch
from torch import nn
from torch.nn import functional as F
from paceline.training.cuda_graphs import GraphSwitch, GraphedForward

class Odd(nn.Module):
    def __init__(self, odd=None):
        super().__init__()
        self.inner, self.odd, self.count = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), odd, 0

    def forward(self, x):
        made = self.inner(x)
        if self.odd is not None:
            made = self.odd(self, made)
        return made

def counts(model, made):
    model.count += 1
    return made

def keeps(model, made):
    model.kept = made.detach()
    return made

def hooked():
    model = Odd()
    model.inner[0].register_forward_hook(lambda *_: None)
    return model

def eats(model, made):
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return made

def fills(model, made):
    return made + torch.empty(200 << 20, dtype=torch.uint8, device="cuda")[0]

other = nn.Parameter(torch.ones(4, device="cuda"))
odd = {
    "hook": hooked(),
    "attribute": Odd(keeps),
    "counter": Odd(counts),
    "random": Odd(lambda model, made: made * random.random()),
    "waits": Odd(lambda model, made: F.dropout(made) * float(made.detach().sum())),
    "foreign": Odd(lambda model, made: made * other),
    "output": Odd(lambda model, made: [made, object()]),
    "full": Odd(eats),
    "large": Odd(fills),
    "fine": Odd(),
}
inputs = torch.randn(8, 4, device="cuda")
found = {}
for name, model in odd.items():
    model.cuda()
    torch.cuda.manual_seed(7)
    switch = GraphSwitch("auto", None)
    switch.is_on = True
    graphed = GraphedForward(model, model.forward, switch)
    for _ in range(4):
        graphed(inputs)
    batches = int(model.inner[1].num_batches_tracked)
    found[name] = [switch.problem, switch.captures, batches, model.count]

# No memory is kept that a side stream has used.
before, side = torch.cuda.memory_reserved(), torch.cuda.Stream()
with torch.cuda.stream(side):
    used = torch.ones(4 << 20, device="cuda")
    used.record_stream(torch.cuda.default_stream())
    del used
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.ones(1, device="cuda")
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() - before < 16 << 20

# An evaluation that needs the graph's memory gets it.
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if not torch.is_grad_enabled() and graphed._graph is not None:
            raise torch.OutOfMemoryError
        return self.inner(x)

large = Large().cuda()
switch = GraphSwitch("auto", None)
switch.is_on = True
graphed = GraphedForward(large, large.forward, switch)
for _ in range(4):
    graphed(inputs)
assert (switch.captures, switch.problem) == (1, None)
with torch.no_grad():
    assert graphed(inputs).shape == (8, 4)
assert switch.problem == "an evaluation needs their memory"
torch.cuda.empty_cache()

# Two forward passes before the backward passes; gradients that are added up.
plain, model = Odd().cuda(), Odd().cuda()
plain.load_state_dict(model.state_dict())
switch = GraphSwitch("on", None)
graphed = GraphedForward(model, model.forward, switch)
outputs = []
for turn in range(6):
    inputs = torch.randn(8, 4, device="cuda")
    for one, run in ((plain, plain.forward), (model, graphed)):
        first, second = run(inputs), run(inputs * 2)
        kept = first.clone()
        (first * first).sum().backward()
        (second * second).sum().backward()
        outputs.append((first.detach(), kept))
        assert all(torch.equal(*pair) for pair in outputs), turn
    assert all(map(torch.equal, [p.grad for p in plain.parameters()],
                   [p.grad for p in model.parameters()])), turn
assert all(map(torch.equal, plain.buffers(), model.buffers()))
assert switch.captures == 1

# A factor that the script changes between two steps.
scaled = Odd(lambda model, made: made * model.count).cuda()
switch = GraphSwitch("on", None)
graphed_scaled = GraphedForward(scaled, scaled.forward, switch)
for scaled.count in (3, 3, 3, 3, 5, 5, 5, 5, 5):
    assert torch.equal(graphed_scaled(inputs), scaled.forward(inputs)), scaled.count
assert switch.captures == 2

# Everything else that a pass depends on: after each change its graph is another one.
class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x, by=1, *, plus=0, times=1):
        return (self.inner(x) * by + self.offset + plus) * times

keyed, given, named = Keyed().cuda(), [inputs], {}
switch = GraphSwitch("on", None)
graphed_keyed = GraphedForward(keyed, keyed.forward, switch)
factor = torch.full((4,), 3.0, device="cuda")
changes = {
    "nothing": lambda: None,
    "a number": lambda: given.append(2),
    "another": lambda: given.__setitem__(1, 3),
    "a tensor": lambda: named.update(plus=factor),
    "its name": lambda: named.update(times=named.pop("plus")),
    "its shape": lambda: named.update(times=factor[:1]),
    "trained": lambda: keyed.inner.weight.requires_grad_(False),
    "and again": lambda: keyed.inner.weight.requires_grad_(),
    "a weight": lambda: setattr(keyed.inner.weight, "data", keyed.inner.weight.data * 2),
    "a buffer": lambda: setattr(keyed, "offset", torch.ones(4, device="cuda")),
}
for captured, (name, change) in enumerate(changes.items(), start=1):
    change()
    for _ in range(5):
        made, wanted = graphed_keyed(*given, **named), keyed.forward(*given, **named)
        assert torch.equal(made, wanted), name
        trained = [p for p in keyed.parameters() if p.requires_grad]
        pair = [torch.autograd.grad(output.sum(), trained) for output in (made, wanted)]
        assert all(map(torch.equal, *pair)), name
    assert switch.captures == captured, name

loss = graphed(inputs).sum()
loss.backward(retain_graph=True)
graphed(inputs)
try:
    loss.backward()
except Exception as error:
    found["again"] = str(error)
print(json.dumps(found))
"""


def train(
    gpus: Host, directory: Path, graphs: str, devices: int, *words: str
) -> tuple[object, list[int], str]:
    """Train, and give the weights' sum, launches and graphs of a usual step, and what was said."""
    counters = directory / f"counters-{graphs}"
    counters.mkdir()
    done = gpus.paceline(
        *(*words, "--run-dir", graphs, "--cuda-graphs", graphs),
        directory=directory,
        devices=devices,
        PRETEND_GPU_COUNTERS=str(counters),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = counted_steps(counters)[0]
    summary = json.loads((directory / graphs / "summary.json").read_text())
    return summary["weights_sha256"], [usual(steps, n) for n in ("launches", "graphs")], done.stdout


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, ()), (2, ("--precision", "bf16")), (2, ("--max-batch-per-worker", "12"))],
)
def test_a_training_has_the_same_bits_with_graphs(
    gpus: Host, devices: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("train", "digits", "--epochs", "2", *options)  # each ends with a short batch
    plain, (launches, none), _ = train(gpus, tmp_path, "off", devices, *words)
    graphed, (fewer, replays), said = train(gpus, tmp_path, "on", devices, *words)
    assert graphed == plain
    assert (none, replays) == (0, 4 if "--max-batch-per-worker" in options else 2)
    assert fewer < launches
    assert "graphs    on" in said


def test_dropout_draws_what_it_does_without_graphs(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DROPPING)
    plain, _, _ = train(gpus, tmp_path, "off", 1, "run", "train.py")
    graphed, (_, replays), _ = train(gpus, tmp_path, "on", 1, "run", "train.py")
    assert (graphed, replays) == (plain, 2)


def test_auto_measures_and_says_what_it_keeps(gpus: Host, tmp_path: Path) -> None:
    words = ("train", "digits", "--epochs", "4")
    _, _, said = train(gpus, tmp_path, "auto", 1, *words)
    assert "graphs    auto: measuring the first steps" in said
    run = json.loads((tmp_path / "auto" / "run.json").read_text())
    label = run["derived"]["cuda_graphs"]
    assert "with graphs," in label
    assert f"--cuda-graphs {label}" in said


def test_a_recipe_has_auto_by_default_and_resumes_with_it(gpus: Host, tmp_path: Path) -> None:
    found = {}
    for run, options in (("plain", ("--cuda-graphs", "off")), ("usual", ())):
        for words in (
            ("train", "digits", "--epochs", "2", *options, "--run-dir", run),
            ("resume", run, "--epochs", "5", "--allow-change", "epochs"),
        ):
            done = gpus.paceline(*words, directory=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        described = json.loads((tmp_path / run / "run.json").read_text())
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        found[run] = (described["derived"].get("cuda_graphs"), summary["weights_sha256"])
    assert found["plain"][0] is None
    assert "with graphs," in str(found["usual"][0])  # measured anew
    assert found["usual"][1] == found["plain"][1]


def test_what_a_replay_would_not_do_is_refused_and_changes_nothing(
    gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = gpus.python("cases.py", directory=tmp_path, PRETEND_GPU_BYTES=str(400 << 20))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "after the model has been called again" in found.pop("again")
    assert found.pop("fine") == [None, 1, 4, 0]
    assert found.pop("counter") == [None, 0, 4, 4]  # no pass is as one before
    reasons = {
        "hook": "inner.0 has hooks",
        "attribute": "the forward pass of Odd sets kept",
        "random": "the model draws random numbers on the host",
        "waits": "operation not permitted when stream is capturing",
        "foreign": "the model computes with a parameter that isn't its own",
        "output": "the model's output has a object in it",
        "full": "CUDA out of memory",
        "large": "their memory doesn't fit: 21",
    }
    assert found.keys() == reasons.keys()
    for name, (problem, captures, batches, count) in found.items():
        assert reasons[name] in problem, (name, problem)
        # Four passes: those of the attempt have left nothing.
        assert (captures, batches, count) == (0, 4, 0), name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--shards", "2"), "each shard has buffers of its own"),
        (("--sync-batchnorm",), "sends something within the forward pass"),
    ],
)
def test_on_is_an_error_and_auto_says_why_not(
    gpus: Host, options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    words = ("train", "digits", "--epochs", "1", *options)
    for asked, code in (("on", 2), ("auto", 0)):
        given = (*words, "--cuda-graphs", asked, "--run-dir", asked)
        done = gpus.paceline(*given, directory=tmp_path, devices=2)
        assert done.returncode == code, done.stdout + done.stderr
        assert reason in (done.stdout if code == 0 else done.stderr)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("on", "--cuda-graphs on: nothing was captured, since no batch"),
        ("auto", "auto: off, since no batch that a graph can have came three times in one shape"),
    ],
)
def test_where_no_shape_repeats_it_is_said(
    gpus: Host, asked: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(GROWING)
    done = gpus.paceline("run", "train.py", "--cuda-graphs", asked, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr
