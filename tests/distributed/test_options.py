import pytest

from paceline.distributed.options import DistOptions
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "--timeout-s must be greater than 0"),
        ({"backend": "nccl", "device": "cpu"}, "--backend nccl needs GPUs"),
        ({"backend": "xccl", "device": "cpu"}, "--backend xccl needs Intel GPUs"),
        ({"backend": "nccl", "device": "mps"}, "--backend nccl doesn't go with --device mps"),
        ({"init_method": "tcp://a"}, "--init-method is 'tcp://a'"),
        ({"rank": 0}, "needs both --rank and --world-size"),
        ({"world_size": 2}, "needs both --rank and --world-size"),
        ({"local_rank": 0}, "--local-rank goes with --rank"),
        ({"rank": 2, "world_size": 2}, "--rank 2 is none of --world-size 2"),
        ({"rank": -1, "world_size": 2}, "--rank -1 is none of --world-size 2"),
        ({"rank": 0, "world_size": 2, "local_rank": -1}, "--local-rank is -1"),
        ({"rank": 0, "world_size": 2, "local_rank": 2}, "--local-rank is 2"),
    ],
)
def test_what_cant_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistOptions(**options)  # type: ignore[arg-type]


def test_what_can_be() -> None:
    DistOptions(init_method="tcp://a:1", rank=1, world_size=2, local_rank=1, interface="eth0")
    DistOptions(backend="smddp", device="cpu")  # what it can carry is asked when it is there
