"""What is refused with --shards on CUDA is what torch itself refuses, in the backward pass."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

PROGRAM = """
import torch
from torch import nn
from paceline.errors import UsageError
from paceline.training.nondeterministic import refuse_nondeterministic

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
layers = []
for dim in (1, 2, 3):
    shape = (2, 4, *[8] * dim)
    for size in (1, 3, 8):
        layers += [(f"AdaptiveAvgPool{dim}d", (size,), {}, shape)]
        layers += [(f"AdaptiveMaxPool{dim}d", (size,), {}, shape)] if dim < 3 else []
    layers += [(f"{name}Pool{dim}d", (2,), {}, shape) for name in ("Max", "Avg")]
    layers += [(f"LPPool{dim}d", (2, 2), {}, shape)]
    pads = ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad")
    layers += [(f"{name}{dim}d", (1,), {}, shape) for name in pads]
    if dim > 1:
        layers += [(f"FractionalMaxPool{dim}d", (2,), {"output_size": 3}, shape)]
modes = {"nearest": 2, "linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
for mode, dim in modes.items():
    layers += [("Upsample", (), {"scale_factor": 2, "mode": mode}, (2, 4, *[8] * dim))]

def refused_by(check, *given):
    try:
        check(*given)
    except (RuntimeError, UsageError) as error:
        assert "determinis" in str(error), error
        return True
    return False

def train(model, shape):
    model(torch.randn(shape, device="cuda")).sum().backward()

for name, given, named, shape in layers:
    first = getattr(nn, f"Conv{len(shape) - 2}d")(4, 4, 1)
    model = nn.Sequential(first, getattr(nn, name)(*given, **named)).cuda()
    theirs, ours = refused_by(train, model, shape), refused_by(refuse_nondeterministic, model)
    assert theirs == ours, f"{name}{given}{named}: torch {theirs}, paceline {ours}"
print("compared", len(layers))
"""


def test_layers_are_refused_as_torch_does(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(PROGRAM)
    done = gpus.python("compare.py", directory=tmp_path, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert done.returncode == 0, done.stderr
    assert "compared" in done.stdout
