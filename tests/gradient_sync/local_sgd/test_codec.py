"""Rounding for the way: as good as its bytes allow, and nothing that isn't finite is hidden."""

import pytest
import torch

from paceline.gradient_sync.local_sgd.codec import BLOCK, ByteCodec, Codec, HalfCodec, codec_for


def test_int8_is_right_to_half_a_step_of_its_block() -> None:
    rows = torch.randn(3, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    rows[0, :BLOCK] *= 1e-6  # a block's scale is its own
    rows[1, :BLOCK] = 0
    codec = ByteCodec()
    sent = codec.encode(rows)
    assert (sent.dtype, sent.shape) == (torch.uint8, (3, 4 * BLOCK + 4 * 4))
    blocks = rows.view(3, 4, BLOCK)
    half_step = blocks.abs().amax(2, keepdim=True) / 127 / 2
    error = (codec.decode(sent).view(3, 4, BLOCK) - blocks).abs()
    assert (error <= half_step * 1.0001).all()
    assert (codec.decode(sent)[1, :BLOCK] == 0).all()
    again = codec.encode(codec.decode(sent))
    assert torch.equal(codec.decode(again), codec.decode(sent))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codec", [ByteCodec(), HalfCodec()], ids=["int8", "bf16"])
def test_what_isnt_finite_stays_so(codec: Codec, value: float) -> None:
    rows = torch.ones(1, 2 * BLOCK)
    rows[0, 3] = value
    found = codec.decode(codec.encode(rows))
    assert not found[0, 3].isfinite()
    assert found[0, BLOCK:].isfinite().all()


def test_choice() -> None:
    assert codec_for("fp32") is None
    assert isinstance(codec_for("bf16"), HalfCodec)
    assert isinstance(codec_for("int8"), ByteCodec)
