"""A group of tensors as the bytes of one safetensors file, in host memory that is kept and reused.

Copying into it is all that training waits for. The file is written from here rather than by the
safetensors library so that it can be hashed on the way and errors stay `OSError`s; the library
reads it. Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import final

import torch
from torch import Tensor

from paceline.distributed.device import can_pin, free_bytes
from paceline.distributed.device_copies import copy_all

DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""Types that the format has a code for."""

GROUPS = "groups"
"""Entry of the file's metadata that lists groups of tensors, the empty ones too."""

_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096
_WHOLE_FROM_BYTES = 64 << 10
"""Data from this size on makes a file of whole pages where it can, for writing past the cache."""
_Layout = tuple[tuple[str, torch.dtype, torch.Size, torch.device], ...]


@final
class HostTensors:
    """Host memory for one group of tensors, laid out as a safetensors file."""

    def __init__(self, tensors: Mapping[str, Tensor], groups: Iterable[str] = ()) -> None:
        """Allocate memory for tensors of these names, types and shapes; nothing is copied yet.

        Args:
            tensors: Name -> tensor on any device; the memory is pinned where one is on a GPU.
            groups: Names noted in the file's metadata, in this order.

        Raises:
            TypeError: A tensor is of a type or layout that the format can't hold.
        """
        self._layout = _layout_of(tensors)
        self._groups = tuple(groups)
        for name, tensor in tensors.items():
            _check_type(name, tensor)
        # The widest types come first, so that each tensor starts at a multiple of its own width;
        # of one width those on a device side by side, so that few copies bring them here.
        self._order = sorted(
            tensors, key=lambda n: (-tensors[n].element_size(), tensors[n].is_cpu, n)
        )
        # One buffer holds the whole file, header included: writing it needs no further copy.
        spans = _spans([tensors[name] for name in self._order])
        header = _header(tensors, dict(zip(self._order, spans, strict=True)), self._groups)
        self._devices = list(dict.fromkeys(t.device for t in tensors.values() if not t.is_cpu))
        size = len(header) + (spans[-1][1] if spans else 0)
        self._is_pinned = any(map(can_pin, self._devices))
        self._file = _whole_pages(size, pin_memory=self._is_pinned)[:size]
        self._file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._data = self._file[len(header) :]
        self._spans = spans
        self._views = self._seen_in(self._data, tensors)
        """The bytes of each tensor, seen in its type and shape."""
        is_beside = self._is_pinned and len(self._devices) == 1
        self._stream = torch.Stream(device=self._devices[0]) if is_beside else None
        self._copied: list[torch.Event] = []

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._file.numel()

    def fits(self, tensors: Mapping[str, Tensor], groups: Iterable[str] = ()) -> bool:
        """Say whether these have the names, types, shapes and devices that this was made for."""
        return self._layout == _layout_of(tensors) and self._groups == tuple(groups)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values; of those on a device only the copy's start is waited for, and `chunks`
        waits for its end. Where memory can't be pinned, the end is waited for here.

        What is computed next doesn't wait either, where the device has room for a copy of its own:
        from there they come beside it.

        Args:
            tensors: As `fits` accepts them; any strides, tied ones too (each gets a copy of its
                own).
        """
        if not self._views:
            return
        sources = [tensors[name] for name in self._order]
        on_device = [not source.is_cpu for source in sources]
        if self._stream is not None and free_bytes(self._devices[0]) > 2 * len(self._data):
            self._fill_beside(self._stream, tensors, on_device)
            return
        with torch.no_grad():
            torch._foreach_copy_(self._views, sources, non_blocking=self._is_pinned)
        self._copied = [
            torch.accelerator.current_stream(device).record_event()
            for device in filter(can_pin, self._devices)
        ]

    def _fill_beside(
        self, stream: torch.Stream, tensors: Mapping[str, Tensor], on_device: Sequence[bool]
    ) -> None:
        """Copy the values through a copy on the device, which training may overwrite meanwhile."""
        device = self._devices[0]
        staged = torch.empty(len(self._data), dtype=torch.uint8, device=device)
        views = self._seen_in(staged, tensors)
        sources = [tensors[name].detach() for name in self._order]
        copy_all(list(compress(views, on_device)), list(compress(sources, on_device)))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for start, stop in _runs(self._spans, on_device):
                self._data[start:stop].copy_(staged[start:stop], non_blocking=True)
            self._copied = [stream.record_event()]
        staged.record_stream(stream)
        on_host = [not is_there for is_there in on_device]
        copy_all(list(compress(self._views, on_host)), list(compress(sources, on_host)))

    def _seen_in(self, data: Tensor, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Give the parts of `data` that are the tensors', in their types and shapes."""
        return [
            data[start:stop].view(tensors[name].dtype).view(tensors[name].shape)
            for name, (start, stop) in zip(self._order, self._spans, strict=True)
        ]

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file's bytes from start to end, once the copy has ended; on any thread.

        All but the last are whole pages, and each starts at one.
        """
        for event in self._copied:
            event.synchronize()
        content = self._file.numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def on_host(tensors: Mapping[str, Tensor]) -> HostTensors:
    """Copy tensors into host memory of their own.

    Raises:
        TypeError: As `HostTensors`.
    """
    host = HostTensors(tensors)
    host.fill(tensors)
    return host


def raw_bytes(tensor: Tensor) -> memoryview:
    """Give a tensor's values in row-major order as little-endian bytes, on the host."""
    assert sys.byteorder == "little", (
        "torch's raw bytes are the host's; only little-endian is known"
    )
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _layout_of(tensors: Mapping[str, Tensor]) -> _Layout:
    return tuple((name, t.dtype, t.shape, t.device) for name, t in tensors.items())


def _check_type(name: str, tensor: Tensor) -> None:
    assert sys.byteorder == "little", "the format is little-endian"
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_CODES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
        raise TypeError(
            f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) "
            f"can't be saved: expected a dense tensor of one of the types {known}"
        )


def _whole_pages(num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Allocate (N,) uint8 that starts at a page, as writing past the page cache asks for."""
    memory = torch.empty(num_bytes + _PAGE_BYTES, dtype=torch.uint8, pin_memory=pin_memory)
    return memory[-memory.data_ptr() % _PAGE_BYTES :]


def _spans(tensors: list[Tensor]) -> list[tuple[int, int]]:
    spans, stop = [], 0
    for tensor in tensors:
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        spans.append((start, stop))
    return spans


def _runs(spans: Sequence[tuple[int, int]], chosen: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Join the chosen ones of adjacent spans: what can be copied at once. Pure."""
    begin = end = 0
    for (start, stop), is_chosen in zip(spans, chosen, strict=True):
        if not is_chosen:
            continue
        if start != end:
            if end > begin:
                yield begin, end
            begin = start
        end = stop
    if end > begin:
        yield begin, end


def _header(
    tensors: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]], groups: Sequence[str]
) -> bytes:
    metadata = {"format": "pt"} | ({GROUPS: " ".join(groups)} if groups else {})
    described: dict[str, object] = {"__metadata__": metadata}
    for name, span in spans.items():
        tensor = tensors[name]
        described[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": list(span),
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    # Padding with spaces is allowed by the format: large files end at a page, for writing past the
    # cache.
    data_bytes = max((stop for _, stop in spans.values()), default=0)
    if data_bytes % 8 == 0 and data_bytes >= _WHOLE_FROM_BYTES:
        text += b" " * (-(8 + len(text) + data_bytes) % _PAGE_BYTES)
    else:
        text += b" " * (-len(text) % 8)
    # safetensors: the header's length as 8 bytes, little-endian; the header, JSON; the data.
    return len(text).to_bytes(8, "little") + text


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash a model's tensors: names, types, shapes and values.

    In sorted name order, each as name (UTF-8), NUL, type like `float32`, NUL, shape like `(10,
    128)`, NUL, raw little-endian bytes in row-major order. Memory format and device don't count.

    Args:
        tensors: The unwrapped model's `state_dict()`; nothing is stripped from the names.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
