"""The pretend device's arithmetic: what an operator of torch would compute, the CPU computes.

A kernel that is launched does nothing. So every operator with a kernel for CUDA gets another one
here: the CPU computes the result on views of the same memory, which is the host's after all; the
operator's own kernel runs, for its launches, copies and waits; then the result is put where it
belongs. In a stream that is being captured the graph's launch does all but the second; on a late
stream (PRETEND_GPU_STREAMS) whoever waits for it does.
"""

import atexit
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, cast, final, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.pretend_gpu.device import recurrent

_NO_ARITHMETIC = (
    "empty", "resize", "set_", "as_strided", "_reshape_alias", "view", "record_stream",
    "is_pinned", "_pin_memory", "_local_scalar_dense", "_cudnn_init_dropout_state",
    "_cudnn_rnn_flatten_weight",
)  # fmt: skip
"""What operators begin with that make room or another view, or move bytes: that is real."""
_COMPOSED = ("convolution", "convolution_backward", "copy_")
"""They have one kernel for all devices, which finds that of CUDA in another way."""
_OF_DATA = ("nonzero", "masked_select", "unique", "_unique", "bincount", "repeat_interleave")
"""Their results' shapes depend on data: the device's kernel would wait for it."""

_WITHOUT_KERNEL = ("linalg_qr",)
"""By cuSOLVER, which isn't there."""

refusals: list[Callable[[str, Mapping[str, object]], None]] = []
"""Called with each operator and what it is given: to raise where the device lacks it."""

_library: list[torch.library.Library] = []
_thread = threading.local()


def install() -> None:
    """Give every operator its arithmetic; once in a process."""
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not _needs_arithmetic(name):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not _gives_a_view(operator):
            made = _Arithmetic(operator, torch.library.get_kernel(name, "CUDA"))
            library.impl(name.removeprefix("aten::"), made.call, "CUDA", with_keyset=True)
    _library.append(library)  # it ends with its library
    # Fused attention has no CPU kernel of the same name; without it torch composes attention.
    for fused in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    _device.pretend_gpu_on_replay(_replay)
    # What nobody has waited for is never done: Python can't be called while it ends.
    atexit.register(_device.pretend_gpu_on_replay, None)


def _base(name: str) -> str:
    return name.removeprefix("aten::").partition(".")[0]


def _needs_arithmetic(name: str) -> bool:
    if _base(name) in _COMPOSED:
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    return bool(has_kernel) and not _base(name).startswith(_NO_ARITHMETIC)


def _gives_a_view(operator: torch._ops.OpOverload) -> bool:
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


_Made = tuple[object, list[list[Tensor]]]
"""What an operator gives, and the new values of the arguments that it writes."""


@final
class _Arithmetic:
    """An operator's kernel for CUDA: its own, and what the CPU has computed."""

    def __init__(
        self, operator: torch._ops.OpOverload, kernel: torch._C._SafeKernelFunction
    ) -> None:
        arguments = operator._schema.arguments
        self._name = operator.name()
        self._kernel = kernel
        self._computed = cast("Callable[..., object]", _ON_CPU.get(operator.name(), operator))
        self._names = [argument.name for argument in arguments]
        self._takes_tensor = {a.name for a in arguments if isinstance(a.type, torch.TensorType)}
        self._written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        self._is_random = torch.Tag.nondeterministic_seeded in operator.tags
        self._depends_on_data = _base(operator.name()) in _OF_DATA
        self._has_kernel = _base(operator.name()) not in _WITHOUT_KERNEL
        self._takes_masks = _base(operator.name()) == "index"
        self._gives_tensors = all("Tensor" in str(r.type) for r in operator._schema.returns)

    def call(self, keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> object:
        """Be the operator."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        given = _with_tensors(given, self._takes_tensor)
        # A kernel's own calls are part of it, but those that size its results.
        if getattr(_thread, "inside", False) and not self._depends_on_data:
            return self._kernel.call_boxed(keys, **given)
        for refuse in refusals:
            refuse(self._name, given)
        stream = _Stream.current()
        by_mask = self._takes_masks and any(
            t.dtype is torch.bool for t in tensors_in(given["indices"])
        )
        is_at_once = not self._has_kernel or self._depends_on_data or by_mask
        if stream.is_late and not is_at_once and self._gives_tensors and _may_be_late(given):
            return self._put_off(stream, keys, given)
        stream.drain()
        if not self._has_kernel:
            return tree_map(_made_on_device, self._compute(given, None)[0])
        if is_at_once:
            return tree_map(_to_device, self._compute(given, None)[0])
        # What is captured is computed when the graph is launched, from what stands there then.
        found: list[_Made] = []
        if capture := stream.captures(lambda: found.append(self._compute(given, draw()))):
            draw = self._draw_in(capture, keys, given) if self._is_random else _nothing
            targets = self._run_kernel(keys, given)
            # Behind what the kernel itself does to its results: clear them, say.
            stream.captures(lambda: self._put(given, targets, found.pop()))
            return targets
        made = self._compute(given, _draw(given) if self._is_random else None)
        targets = self._run_kernel(keys, given)
        self._put(given, targets, made)
        numbers = iter(tree_flatten(made[0])[0])
        return tree_map(lambda target: _result(target, next(numbers)), targets)

    def _put_off(
        self, stream: "_Stream", keys: torch._C.DispatchKeySet, given: dict[str, object]
    ) -> object:
        """Run the kernel; what it would compute is due when somebody waits for the stream.

        Until then no tensor is kept: their memory may be given to others, as on a device.
        """
        seed = _draw(given) if self._is_random else None
        sources = {name: tree_map(_place, value) for name, value in given.items()}
        targets = self._run_kernel(keys, given)
        written = {name: tree_map(_place, given[name]) for name in self._written if name in given}
        places = tree_map(_place, targets)

        def due() -> None:
            made = self._compute(_seen(sources), seed)
            self._put(_seen(written), tree_map(_at_place, places), made)

        stream.put_off(due)
        return targets

    def _run_kernel(self, keys: torch._C.DispatchKeySet, given: Mapping[str, object]) -> object:
        _thread.inside = True
        try:
            return self._kernel.call_boxed(keys, **given)
        finally:
            _thread.inside = False

    def _draw_in(
        self, capture: int, keys: torch._C.DispatchKeySet, given: Mapping[str, object]
    ) -> Callable[[], int]:
        """Give what each replay draws: as without a graph, from where the generator stands then.

        How much the kernel draws shows outside of the capture. A replay moves the generator on by
        all that its graph draws, and then begins.
        """
        generator = _generator(given)
        # The state itself may draw in the capture alone, with torch 2.11.
        with torch.cuda.stream(torch.cuda.default_stream()):
            state = generator.graphsafe_get_state()
            generator.graphsafe_set_state(generator.clone_state())
            before = generator.get_offset()
            self._run_kernel(keys, given)
            drawn = generator.get_offset() - before
            generator.graphsafe_set_state(state)
        whole = _drawn.setdefault((capture, id(generator)), [0])
        begins = whole[0]
        whole[0] += drawn
        return lambda: _seed(generator, generator.get_offset() - whole[0] + begins)

    def _compute(self, given: Mapping[str, object], seed: int | None) -> _Made:
        """Compute the results, and what becomes of the arguments that are written."""
        own = {name: tree_map(_on_host, value) for name, value in given.items()}
        own |= {name: tree_map(_copied, own[name]) for name in self._written if name in own}
        if own.get("device") is not None:
            own["device"] = torch.device("cpu")
        own.pop("pin_memory", None)
        with _seeded(seed, own):
            results = self._computed(**own)
        return results, [tensors_in(own.get(name)) for name in self._written]

    def _put(self, given: Mapping[str, object], targets: object, made: _Made) -> None:
        for name, values in zip(self._written, made[1], strict=True):
            _fill(tensors_in(given.get(name)), values)
        if not self._written:
            _fill(tree_flatten(targets)[0], tree_flatten(made[0])[0])


def _fill(targets: Iterable[object], values: Iterable[object]) -> None:
    for target, value in zip(targets, values, strict=True):
        # The CPU leaves out what its own backward pass doesn't need.
        if isinstance(target, Tensor) and isinstance(value, Tensor) and value.numel():
            _on_host(target).copy_(value)


def _made_on_device(value: object) -> object:
    """Put a result on the device by no copy that would be counted."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    _fill([made], [value])
    return made


def _to_device(value: object) -> object:
    return value.to("cuda") if isinstance(value, Tensor) else value


def _with_tensors(given: dict[str, object], takes_tensor: set[str]) -> dict[str, object]:
    """Make numbers tensors where these are expected, of a type that changes no result's type."""
    floats = [t for t in tensors_in(list(given.values())) if t.is_floating_point()]
    of_float = torch.get_default_dtype()
    if any(t.dim() for t in floats):
        of_float = torch.float64  # without dimensions it counts less than those
    elif floats:
        of_float = functools.reduce(torch.promote_types, (t.dtype for t in floats))

    def made(value: object) -> object:
        if not isinstance(value, bool | int | float):
            return value
        return torch.tensor(value, dtype=of_float if isinstance(value, float) else None)

    return {name: made(v) if name in takes_tensor else v for name, v in given.items()}


def _result(of_device: object, of_host: object) -> object:
    """A tensor is the device's; a number is what the CPU has computed."""
    return of_device if isinstance(of_device, Tensor) or of_device is None else of_host


def tensors_in(value: object) -> list[Tensor]:
    """List the tensors in what an operator is given, or gives."""
    return [one for one in tree_flatten(value)[0] if isinstance(one, Tensor)]


@overload
def _on_host(value: Tensor) -> Tensor: ...
@overload
def _on_host(value: object) -> object: ...
def _on_host(value: object) -> object:
    """Give a tensor on the CPU with the same memory, shape and strides; anything else as it is."""
    return _at_place(_place(value)) if isinstance(value, Tensor) and value.is_cuda else value


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, which is not kept from ending."""

    address: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def seen(self) -> Tensor:
        """Give the tensor that lies there now."""
        if self.num_bytes == 0:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        memory = (ctypes.c_char * self.num_bytes).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.strides, self.offset)


def _place(value: object) -> object:
    """Give a tensor's place; a single number of the host's, as a kernel's argument is, copied."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_cuda and value.dim() == 0:
        return value if _is_wrapped(value) else value.clone()
    storage = value.untyped_storage()
    whole = storage.nbytes() // value.element_size() * value.element_size()
    return _Place(
        address=storage.data_ptr(),
        num_bytes=whole if value.numel() else 0,
        dtype=value.dtype,
        shape=tuple(value.shape),
        strides=value.stride(),
        offset=int(value.storage_offset()),
    )


def _is_wrapped(value: Tensor) -> bool:
    """Say whether torch has made this of Python's number: it then changes no result's type."""
    narrow = torch.zeros((), dtype=torch.float16 if value.is_floating_point() else torch.int8)
    return torch.result_type(value, narrow) is narrow.dtype


def _at_place(value: object) -> object:
    return value.seen() if isinstance(value, _Place) else value


def _seen(given: Mapping[str, object]) -> dict[str, object]:
    return {name: tree_map(_at_place, value) for name, value in given.items()}


def _may_be_late(given: Mapping[str, object]) -> bool:
    """Say whether the host waits for nothing here: memory of its own is pinned, if there is any."""
    on_host = [
        t for value in given.values() for t in tensors_in(value) if not t.is_cuda and t.dim() > 0
    ]
    return not on_host or (
        bool(given.get("non_blocking")) and all(tensor.is_pinned() for tensor in on_host)
    )


def _copied(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return own.copy_(value)


# --- Random numbers: the CPU's, from the device's seed and how much has been drawn from it


def _generator(given: Mapping[str, object]) -> torch.Generator:
    generator = given.get("generator")
    if isinstance(generator, torch.Generator):
        return generator
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _draw(given: Mapping[str, object]) -> int:
    generator = _generator(given)
    return _seed(generator, generator.get_offset())


def _seed(generator: torch.Generator, offset: int) -> int:
    return hash((generator.initial_seed(), offset)) % 2**62


def _nothing() -> None:
    return None


@contextmanager
def _seeded(seed: int | None, own: dict[str, object]) -> Iterator[None]:
    if seed is None:
        yield
    elif own.get("generator") is not None:
        own["generator"] = torch.Generator().manual_seed(seed)
        yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield


# --- Operators that the CPU hasn't got


def _cudnn_batch_norm(
    input: Tensor,
    weight: Tensor,
    exponential_average_factor: float,
    epsilon: float,
    **others: Any,
) -> tuple[Tensor | None, ...]:
    made = torch.native_batch_norm(
        input, weight, momentum=exponential_average_factor, eps=epsilon, **others
    )
    return (*made, None)  # what it reserves is its own


def _cudnn_batch_norm_backward(
    grad_output: Tensor, input: Tensor, save_var: Tensor, epsilon: float, **others: Any
) -> tuple[Tensor, ...]:
    del others["reserveSpace"]
    made: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        grad_output,
        input,
        save_invstd=save_var,
        train=True,
        eps=epsilon,
        output_mask=[True] * 3,
        **others,
    )
    return made


def _by_channel(of_channel: Tensor, like: Tensor) -> Tensor:
    return of_channel.view(1, -1, *[1] * (like.dim() - 2))


def _over_all_but_channels(values: Tensor) -> Tensor:
    return values.sum([d for d in range(values.dim()) if d != 1])


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = input.float()
    count = values.numel() / values.shape[1]
    mean = _over_all_but_channels(values) / count
    variance = _over_all_but_channels((values - _by_channel(mean, values)) ** 2) / count
    return mean, (variance + eps).rsqrt()


def _gathered_stats(
    input: Tensor, mean: Tensor, invstd: Tensor,
    running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor, **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert counts.dtype is (input if running_mean is None else running_mean).dtype
    weights = counts.view(-1, 1) / counts.sum()
    whole_mean = (mean * weights).sum(0)
    variance = ((invstd**-2 - eps + (mean - whole_mean) ** 2) * weights).sum(0)
    if running_mean is not None and running_var is not None:
        unbiased = variance * counts.sum() / (counts.sum() - 1)
        running_mean.lerp_(whole_mean, momentum)
        running_var.lerp_(unbiased, momentum)
    return whole_mean, (variance + eps).rsqrt()


def _normalized(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    **_: object,
) -> Tensor:
    made = (input - _by_channel(mean, input)) * _by_channel(invstd, input)
    made = made if weight is None else made * _by_channel(weight, input)
    made = made if bias is None else made + _by_channel(bias, input)
    return made.to(input.dtype)


def _reduced(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, **_: object
) -> tuple[Tensor, ...]:
    grad = grad_out.float()
    sum_dy = _over_all_but_channels(grad)
    sum_dy_xmu = _over_all_but_channels(grad * (input - _by_channel(mean, input)))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def _normalized_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None,
    sum_dy: Tensor, sum_dy_xmu: Tensor, count: Tensor,
) -> Tensor:  # fmt: skip
    mean_dy, mean_dy_xmu = sum_dy / count.sum(), sum_dy_xmu / count.sum()
    slope = _by_channel(mean_dy_xmu * invstd**2, input)
    grad = grad_out - _by_channel(mean_dy, input) - (input - _by_channel(mean, input)) * slope
    scale = invstd if weight is None else invstd * weight
    return (grad * _by_channel(scale, input)).to(input.dtype)


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(self.float() if half_to_float else self, dim)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(self.float() if half_to_float else self, dim)


def _softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    made = output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
    return made.to(input_dtype)


def _log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    made = grad_output - output.exp() * grad_output.sum(dim, keepdim=True)
    return made.to(input_dtype)


def _in_float(operator: Callable[..., object]) -> Callable[..., object]:
    """Give a product that sums in float32, as cuBLAS and cuDNN do, and rounds its results.

    The CPU's own products of float16 take 10 to 40 times as long.
    """

    def computed(**given: object) -> object:
        if not any(t.dtype is torch.float16 for t in tensors_in(given)):
            return operator(**given)
        wide = tree_map(lambda one: _cast(one, torch.float16, torch.float32), given)
        return tree_map(lambda one: _cast(one, torch.float32, torch.float16), operator(**wide))

    return computed


def _cast(value: object, source: torch.dtype, target: torch.dtype) -> object:
    return value.to(target) if isinstance(value, Tensor) and value.dtype is source else value


_ON_CPU: dict[str, Callable[..., object]] = {
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _log_softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::cudnn_batch_norm": _cudnn_batch_norm,
    "aten::cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_gather_stats_with_counts": _gathered_stats,
    "aten::batch_norm_elemt": _normalized,
    "aten::batch_norm_backward_reduce": _reduced,
    "aten::batch_norm_backward_elemt": _normalized_backward,
    "aten::convolution": _in_float(torch.ops.aten.convolution.default),
    "aten::convolution_backward": _in_float(torch.ops.aten.convolution_backward.default),
    "aten::mm": _in_float(torch.ops.aten.mm.default),
    "aten::addmm": _in_float(torch.ops.aten.addmm.default),
    "aten::_cudnn_rnn": _in_float(recurrent.forward),
    "aten::_cudnn_rnn_backward": _in_float(recurrent.backward),
}


# --- What is computed later: in a graph, or on a late stream

_device = ctypes.CDLL(None)
_device.pretend_gpu_capture.restype = ctypes.c_uint64
_recorded: dict[int, Callable[[], None]] = {}
_numbers = count()
_drawn: dict[tuple[int, int], list[int]] = {}
"""How much a capture has drawn from a generator so far."""


def _compute_now(number: int) -> None:
    # A graph may be launched again; on a stream it is done once, and has taken itself out.
    _recorded[number]()


_replay = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(_compute_now)


@final
class _Stream:
    """The stream that a kernel is launched on, as the device knows it."""

    def __init__(self, handle: int | None) -> None:
        """Args:
        handle: None before CUDA is used.
        """
        self._is_used = handle is not None
        self._handle = ctypes.c_void_p(handle)
        self.is_late = self._is_used and bool(_device.pretend_gpu_is_late(self._handle))

    @classmethod
    def current(cls) -> "_Stream":
        """Give the calling thread's."""
        if not torch.cuda.is_initialized():
            return cls(None)
        return cls(torch.cuda.current_stream().cuda_stream)

    def drain(self) -> None:
        """Wait for what comes before on this stream, as its next kernel would."""
        if self._is_used:
            _device.pretend_gpu_drain(self._handle)

    def captures(self, work: Callable[[], None]) -> int:
        """Leave work to the graph that is being captured, and give the capture's number; or 0."""
        if not self._is_used:
            return 0
        number = next(_numbers)
        capture = int(_device.pretend_gpu_capture(self._handle, ctypes.c_uint64(number)))
        if capture:
            _recorded[number] = work
        return capture

    def put_off(self, due: Callable[[], None]) -> None:
        """Have the stream compute this in its turn."""
        number = next(_numbers)

        def once() -> None:
            del _recorded[number]
            due()

        _recorded[number] = once
        _device.pretend_gpu_put_off(self._handle, ctypes.c_uint64(number))
