"""Where gradients lie in flat buffers: aligned, in equal slices, each once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.gradient_sync.buckets import (
    ALIGNMENT,
    Arrivals,
    Bucket,
    bucket_bytes,
    cut,
    lay_out,
    rounded_up,
)

SIZES = st.lists(st.integers(1, 70), min_size=1, max_size=8)


def parameters(sizes: list[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(float(size))) for size in sizes]


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(1, 5))
def test_every_parameter_begins_at_an_aligned_place_of_its_own(
    sizes: list[int], workers: int
) -> None:
    """Some kernels add in another order where memory is not aligned: other bits."""
    bucket = Bucket(list(enumerate(parameters(sizes))), workers, shards=4)
    ends = [0]
    for member, size in zip(bucket.members, sizes, strict=True):
        assert member.offset % ALIGNMENT == 0
        assert ends[-1] <= member.offset < ends[-1] + ALIGNMENT
        ends.append(member.offset + size)
    assert ends[-1] <= bucket.size < ends[-1] + 2 * workers * ALIGNMENT
    assert bucket.size % (workers * ALIGNMENT) == 0  # a slice for each worker, aligned as well


def test_gradients_come_back_as_they_were_packed_and_none_is_zero() -> None:
    first, second = parameters([5, 40])
    bucket = Bucket([(0, first), (1, second)], slices=3, shards=2)
    # A buffer that an earlier step has used.
    second.grad = torch.ones(40)
    bucket.pack()
    bucket.begin()
    first.grad = torch.full((5,), 7.0)
    flat = bucket.pack()
    assert flat.views[0].tolist() == [7.0] * 5
    assert flat.views[1].tolist() == [0.0] * 40
    assert first.grad is None


def test_passes_that_begin_alike_are_told_apart() -> None:
    named = dict(zip("abc", parameters([1, 1, 1]), strict=True))
    arrivals = Arrivals(named)

    def came(names: str) -> tuple[str, ...]:
        for name in names:
            (2 * named[name]).backward()
        return arrivals.take()

    for names in ("abc", "abc", "ab", "acb", "ab", "c", "", "abcb", "abc"):
        assert came(names) == tuple(names)
    arrivals.release()
    assert came("a") == ()


def test_buffers_are_lent_in_the_same_order_in_every_step() -> None:
    bucket = Bucket([(0, parameters([3])[0])], slices=1, shards=4)
    first = [bucket.take() for _ in range(3)]
    bucket.begin()
    assert [id(bucket.take()) for _ in range(3)] == [id(flat) for flat in first]
    assert bucket.held_bytes == 3 * bucket.size * 4
    bucket.free()
    assert bucket.held_bytes == 0


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from("ab")), min_size=1, max_size=20),
    st.integers(1, 60),
    st.integers(1, 100),
    st.integers(0, 40),
)
def test_buckets_hold_one_kind_and_are_full_but_not_too_full(
    items: list[tuple[int, str]], first: int, most: int, least: int
) -> None:
    sizes, kinds = [size for size, _ in items], [kind for _, kind in items]
    found = cut(sizes, kinds, first, most, least)
    assert sorted(place for group in found for place in group) == list(range(len(items)))
    assert [group[-1] for group in found] == sorted(group[-1] for group in found)
    for group in found:
        assert group == sorted(group)
        assert len({kinds[place] for place in group}) == 1
        *before, last = [sizes[place] for place in group]
        assert not before or sum(before) < least or sum(before) + last <= max(first, most)


def test_only_the_last_bucket_of_a_kind_may_be_a_small_one() -> None:
    """A classifier's last bias comes first, and a large matrix behind it."""
    assert cut([4, 6, 900, 5, 3], ["a"] * 5, 8, 100) == [[0], [1], [2], [3, 4]]
    assert cut([4, 6, 900, 5, 3], ["a"] * 5, 8, 100, 20) == [[0, 1, 2], [3, 4]]


def test_what_gets_no_gradient_is_in_no_bucket() -> None:
    found = lay_out(parameters([3, 4, 5]), [2, 0], most=1000, slices=2, shards=2)
    assert found.without == [1]
    assert sorted(found.bucket_of) == [0, 2]


def test_a_bucket_is_a_part_of_the_model_but_as_large_as_its_messages_need() -> None:
    assert bucket_bytes(8 << 20, 2, 2, by_memory=True) == 2 << 20
    assert bucket_bytes(1 << 10, 2, 2, by_memory=True) == 1 << 20
    assert bucket_bytes(1 << 10, 8, 8, by_memory=True) == 64 * (40 << 10)
    assert bucket_bytes(1 << 10, 32, 2, by_memory=True) == 64 * (40 << 10)
    assert bucket_bytes(1 << 10, 2, 2, by_memory=False) == 4 * (40 << 10)
    assert bucket_bytes(1 << 30, 2, 2, by_memory=True) == 25 << 20  # DDP's
    assert bucket_bytes(12 << 20, 2, 2, by_memory=False) == 1 << 20


def test_rounding_up_gives_at_least_one() -> None:
    assert [rounded_up(n, 16) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]
