"""Results of operators that the CPU computes in another way than a device, or not at all."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

PRODUCTS = """
import torch
from torch.nn import functional as F

torch.manual_seed(1)
a, b, c = torch.randn(64, 512).half(), torch.randn(512, 64).half(), torch.randn(64).half()
x, w = torch.randn(4, 64, 16, 16).half(), torch.randn(8, 64, 3, 3).half()

def convolved(x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    made = F.conv2d(x, w)
    made.backward(torch.ones_like(made))
    return [made.detach(), x.grad, w.grad]

cases = {
    "mm": (torch.mm, a, b), "addmm": (torch.addmm, c, a, b),
    "convolution": (convolved, x, w),
}
for name, (operator, *given) in cases.items():
    there, here, own = (
        operator(*(tensor.to(**to) for tensor in given))
        for to in ({"device": "cuda"}, {"dtype": torch.float32}, {})
    )
    rows = zip(*(made if isinstance(made, list) else [made] for made in (there, here, own)))
    for number, (on_device, wide, on_cpu) in enumerate(rows):
        assert torch.equal(on_device.cpu(), wide.half()), (name, number)
        print(name, number, torch.equal(on_cpu, wide.half()))
"""


def test_products_of_float16_sum_in_float32(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS)
    done = gpus.python("products.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr


RECURRENT = """
from itertools import product
import torch
from torch import nn

for kind, two_ways, batch_first, bias in product((nn.LSTM, nn.GRU, nn.RNN), *[(False, True)] * 3):
    layers = kind(5, 7, 2, bidirectional=two_ways, batch_first=batch_first, bias=bias)
    found = []
    for device in ("cpu", "cuda"):
        inputs = torch.linspace(-1, 1, 60, device=device).view(3, 4, 5).requires_grad_()
        output, state = layers.to(device)(inputs)
        (output.square().sum() + (state if kind is not nn.LSTM else state[1]).sum()).backward()
        grads = [inputs.grad, *(weight.grad for weight in layers.parameters())]
        found.append([one.detach().cpu() for one in (output, *grads)])
        layers.zero_grad()
    for here, there in zip(*found):
        assert torch.allclose(here, there, atol=1e-5), layers
    assert len({weight.untyped_storage().data_ptr() for weight in layers.parameters()}) == 1
"""


def test_recurrent_layers_are_those_of_the_cpu_in_flat_weights(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    done = gpus.python("recurrent.py", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "contiguous" not in done.stderr  # of weights that each call would have to gather
