"""Clipping equals torch's and never waits for the device."""

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.optim.build import clip_gradients


class _Operators(TorchDispatchMode):
    """Lists the names of all ATen operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.names: list[str] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _parameters(scale: float = 1.0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [Parameter(torch.zeros(shape)) for shape in ((4, 3), (4,), (2, 2, 2))]
    for parameter in made:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return [*made, Parameter(torch.zeros(5))]


def _gradients(parameters: list[Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


@pytest.mark.parametrize("scale", [10.0, 1e-3])
def test_equals_torch(scale: float) -> None:
    ours, torchs = _parameters(scale), _parameters(scale)
    norm = clip_gradients(ours, max_norm=1.0)
    expected = clip_grad_norm_(torchs, max_norm=1.0, foreach=False)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(_gradients(ours), _gradients(torchs))


def test_the_norm_afterwards_is_the_largest_allowed() -> None:
    parameters = _parameters(10.0)
    assert float(clip_gradients(parameters, max_norm=0.5)) > 0.5
    after = torch.cat([gradient.flatten() for gradient in _gradients(parameters)]).norm()
    assert float(after) == pytest.approx(0.5, rel=1e-5)


def test_short_gradients_stay_as_they_are() -> None:
    parameters, before = _parameters(1e-3), _gradients(_parameters(1e-3))
    clip_gradients(parameters, max_norm=1.0)
    assert all(map(torch.equal, _gradients(parameters), before))


def test_no_host_sync() -> None:
    with _Operators() as operators:
        clip_gradients(_parameters(10.0), max_norm=1.0)
    assert any("foreach_mul_" in name for name in operators.names)
    assert not any("_local_scalar_dense" in name for name in operators.names)


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    parameters = _parameters()
    _gradients(parameters)[0][0] = torch.nan
    assert torch.isnan(clip_gradients(parameters, max_norm=1.0))
