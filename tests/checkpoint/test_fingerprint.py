import hashlib

import torch

from paceline.checkpoint.fingerprint import weights_sha256


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
