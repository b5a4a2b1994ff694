import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from paceline.checkpoint.host_tensors import (
    DTYPE_CODES,
    HostTensors,
    _runs,
    on_host,
    raw_bytes,
    weights_sha256,
)


def file_of(host: HostTensors) -> bytes:
    return b"".join(host.chunks())


def same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and raw_bytes(a) == raw_bytes(b)


def round_trip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return load(file_of(on_host(tensors)))


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_each_type_is_read_by_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tensors = {"x": bits.view(dtype), "zero-dim": bits[0, :8].view(dtype)[0]}
    (tmp_path / "x.safetensors").write_bytes(file_of(on_host(tensors)))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert all(same(file.get_tensor(name), tensors[name]) for name in tensors)


def test_types_of_all_widths_side_by_side_stay_aligned() -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(5).half(),
        "one": torch.tensor(1.5),
        "many/é.weight": torch.randn(3, 5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "count": torch.tensor(7),
    }
    back = round_trip(tensors)
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_no_tensors_make_a_file_too() -> None:
    assert round_trip({}) == {}


def test_strides_and_tied_memory_dont_matter() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {
        "image": image,
        "tied": image,
        "transposed": torch.randn(4, 6).t(),
        "slice": torch.arange(20).reshape(4, 5)[1:3, ::2],
        "expanded": torch.tensor([1.0]).expand(3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    back = round_trip(tensors)
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_memory_is_reused_and_holds_the_newest_values() -> None:
    first = {"x": torch.randn(4), "y": torch.zeros(2, dtype=torch.int64)}
    host = on_host(first)
    before = file_of(host)
    second = {"x": torch.randn(4), "y": torch.ones(2, dtype=torch.int64)}
    assert host.fits(second)
    host.fill(second)
    assert file_of(host) != before
    assert same(load(file_of(host))["x"], second["x"])
    assert len(file_of(host)) == host.num_bytes


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(5)},
        {"x": torch.zeros(4, dtype=torch.float64)},
        {"z": torch.zeros(4)},
        {"x": torch.zeros(4), "y": torch.zeros(1)},
        {},
    ],
)
def test_other_names_shapes_or_types_dont_fit(other: dict[str, Tensor]) -> None:
    assert not HostTensors({"x": torch.zeros(4)}).fits(other)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
)
def test_what_the_format_cant_hold_is_named(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"tensor 'odd' .* can't be saved: expected a dense tensor"):
        HostTensors({"odd": tensor})


@pytest.mark.parametrize(
    ("chosen", "runs"),
    [
        ("yyy", [(0, 16)]),
        ("nnn", []),
        ("yny", [(0, 8), (12, 16)]),
        ("nyy", [(8, 16)]),
        ("yyn", [(0, 12)]),
    ],
)
def test_what_lies_side_by_side_is_copied_at_once(chosen: str, runs: list[tuple[int, int]]) -> None:
    spans = [(0, 8), (8, 12), (12, 16)]
    assert list(_runs(spans, [letter == "y" for letter in chosen])) == runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_cuda_later_changes_dont_reach_the_copy() -> None:
    x = torch.randn(1 << 22, device="cuda")
    expected = x.cpu()
    host = on_host({"x": x})
    x.zero_()
    assert same(load(file_of(host))["x"], expected)


def test_it_is_the_contracted_hash() -> None:
    tensors = {
        "b.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "a": torch.tensor(5),
        "é": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    expected = hashlib.sha256(
        b"a\0int64\0()\0" + (5).to_bytes(8, "little")
        + b"b.weight\0float32\0(2, 2)\0"
        + bytes.fromhex("0000803f000000400000404000008040")
        + "é".encode() + b"\0bfloat16\0(1,)\0" + bytes.fromhex("c03f")
    )  # fmt: skip
    assert weights_sha256(tensors) == expected.hexdigest()


def test_memory_format_and_order_of_names_dont_count() -> None:
    x = torch.randn(2, 3, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    y = torch.nn.Parameter(torch.randn(3))
    assert weights_sha256({"x": x, "y": y}) == weights_sha256({"y": y, "x": last})


def test_name_type_shape_and_sign_of_zero_count() -> None:
    x = torch.zeros(4)
    others = [{"y": x}, {"x": x.int()}, {"x": x.view(2, 2)}, {"x": -x}, {"x": x, "y": x[:0]}]
    assert len({weights_sha256(o) for o in [{"x": x}, *others]}) == 6


def test_a_model_with_buffers() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    before = weights_sha256(net.state_dict())
    net(torch.randn(2, 1, 5, 5))
    assert weights_sha256(net.state_dict()) != before
