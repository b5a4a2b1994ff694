from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.distributed.work_division import Division, share
from paceline.errors import UsageError


@given(total=st.integers(0, 200), parts=st.integers(1, 40))
def test_shares_are_contiguous_and_differ_by_one_at_most(total: int, parts: int) -> None:
    cuts = [share(total, part, parts) for part in range(parts)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    sizes = [stop - start for start, stop in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_a_part_that_isnt_there() -> None:
    with pytest.raises(ValueError, match="part 3 is none of 3 parts"):
        share(10, 3, 3)


@given(shards=st.integers(1, 24), data=st.data())
def test_rows_come_back_in_the_order_of_the_parts(shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, shards))
    division = Division.of(shards, world_size)
    rows = torch.arange(3 * shards).view(shards, 3)
    gathered = []
    for rank in range(world_size):
        mine = division.parts_of(rank)
        assert 1 <= len(mine) <= division.most
        gathered.append(division.padded(rows[mine.start : mine.stop]))
    assert torch.equal(division.in_order(torch.stack(gathered)), rows)


def test_without_shards_every_worker_is_a_part() -> None:
    division = Division.of(None, 3)
    assert [list(division.parts_of(rank)) for rank in range(3)] == [[0], [1], [2]]
    assert not division.is_fixed


def test_more_workers_than_shards_are_refused() -> None:
    with pytest.raises(UsageError, match="4 workers are more than --shards 3"):
        Division.of(3, 4)


@given(st.integers(1, 300), st.data())
def test_a_workers_shards_are_contiguous_and_of_almost_one_number(
    shards: int, data: st.DataObject
) -> None:
    workers = data.draw(st.integers(1, shards))
    found = list(map(Division.of(shards, workers).parts_of, range(workers)))
    assert [shard for run in found for shard in run] == list(range(shards))
    lengths = [len(run) for run in found]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
