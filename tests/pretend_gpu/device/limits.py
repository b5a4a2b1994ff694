"""Takes from the pretend device what Apple's GPUs lack in torch: then it stands for one of them.

They have no float64 and no `foreach=True`. Memory that copies go beside isn't pinned, and a copy
from or to the host that isn't waited for may carry other bytes (pytorch/pytorch#139550, #189690).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from tests.pretend_gpu.device import arithmetic


def become_apples() -> None:
    """Let this process's CUDA devices be like Apple's GPUs; before anything is trained."""
    from paceline.distributed import device

    kinds = cast("dict[str, object]", device._KINDS)
    kinds["cuda"] = kinds["mps"]
    arithmetic.refusals.append(_refuse)
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: ["xpu"]
    for owner, name in ((Tensor, "pin_memory"), (Tensor, "record_stream")):
        setattr(owner, name, _refused(f"Tensor.{name}"))
    torch.empty = _without_pinning(torch.empty)
    # It leaves out its float64 on a device of that name.
    scaler = torch.amp.GradScaler
    scaler.unscale_ = _let(scaler.unscale_)  # type: ignore[method-assign]
    scaler._check_inf_per_device = _let(scaler._check_inf_per_device)  # type: ignore[method-assign]


_let_through: list[None] = []


def _refuse(operator: str, given: Mapping[str, object]) -> None:
    """Refuse what such a device can't do.

    Raises:
        RuntimeError: It would compute in float64, or the host doesn't wait for a copy.
    """
    if _let_through:
        return
    tensors = arithmetic.tensors_in(list(given.values()))
    to_device = "cuda" in str(given.get("device"))
    if given.get("dtype") is torch.float64 and (to_device or any(t.is_cuda for t in tensors)):
        raise RuntimeError(f"{operator}: the MPS framework doesn't support float64")
    if any(t.is_cuda and t.dtype is torch.float64 for t in tensors):
        raise RuntimeError(f"{operator}: a tensor of float64 on the device")
    on_host = any(not t.is_cuda and t.dim() for t in tensors)
    if given.get("non_blocking") and on_host:
        raise RuntimeError(f"{operator}: a copy of the host's memory that isn't waited for")


def _refused(name: str) -> Callable[..., None]:
    def refused(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} isn't there on MPS")

    return refused


def _without_pinning(empty: Any) -> Any:
    @functools.wraps(empty)
    def made(*args: object, pin_memory: bool = False, **kwargs: object) -> object:
        assert not pin_memory, "pinned memory"
        return empty(*args, **kwargs)

    return made


def _let(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def let(*args: object, **kwargs: object) -> object:
        with _everything():
            return method(*args, **kwargs)

    return let


@contextlib.contextmanager
def _everything() -> Iterator[None]:
    _let_through.append(None)
    try:
        yield
    finally:
        _let_through.pop()
