"""Many small tensors in one copy; that it is one is counted on the pretend GPU."""

import torch

from paceline.distributed.device_copies import copy_all, cut, fetch, join, send


def mixed() -> list[torch.Tensor]:
    return [
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int64) * 2**40 + 1,
        torch.randn(3, 2).to(torch.bfloat16),
        torch.tensor(7.5),
        torch.zeros(0),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.float64),
    ]


def test_what_is_joined_can_be_cut_again_bit_by_bit() -> None:
    before = mixed()
    joined = join(before)
    assert joined.dtype == torch.uint8
    assert len(joined) == sum(tensor.nbytes for tensor in before)
    after = cut(joined, before)
    assert [t.dtype for t in after] == [t.dtype for t in before]
    assert all(map(torch.equal, after, before))


def test_on_the_host_tensors_are_taken_as_they_are() -> None:
    before = mixed()
    assert [t.data_ptr() for t in fetch(before)] == [t.data_ptr() for t in before]
    targets = [torch.zeros_like(tensor) for tensor in before]
    send(before, targets)
    assert all(map(torch.equal, targets, before))
    copy_all(targets, [torch.zeros_like(tensor) for tensor in before])
    assert not any(target.any() for target in targets)


def test_what_is_sent_takes_the_type_of_what_is_there() -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    send([torch.tensor([1.0, 2.0], dtype=torch.float64)], [target])
    assert target.tolist() == [1.0, 2.0]
