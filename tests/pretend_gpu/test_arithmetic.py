"""Products of float16 are cuBLAS's and cuDNN's: they sum in float32, and are rounded once."""

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
