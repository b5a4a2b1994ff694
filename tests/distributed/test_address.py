import pytest

from paceline.distributed.address import Address, address_of, parse_init_method
from paceline.distributed.placement import Placement
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("env://", None),
        ("tcp://10.0.0.4:23456", Address(scheme="tcp", host="10.0.0.4", port=23456)),
        ("tcp://[fe80::1]:23456", Address(scheme="tcp", host="fe80::1", port=23456)),
        ("file:///mnt/shared/meeting", Address(scheme="file", path="/mnt/shared/meeting")),
    ],
)
def test_init_methods(text: str, address: Address | None) -> None:
    assert parse_init_method(text) == address
    if address is not None:
        assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "tcp://10.0.0.4",
        "tcp://:23456",
        "tcp://host:port",
        "tcp://host:99999",
        "tcp://host:1/x",
        "file://relative/path",
        "file:///",
        "http://host:1",
        "10.0.0.4:23456",
        "env",
        "",
    ],
)
def test_what_is_no_init_method(text: str) -> None:
    with pytest.raises(UsageError, match="Write env://, tcp://HOST:PORT or file:///PATH"):
        parse_init_method(text)


def test_the_option_counts_before_the_launcher() -> None:
    placement = Placement(world_size=2, master_addr="a", master_port=1)
    assert str(address_of(None, placement, agent_store=False)) == "tcp://a:1"
    assert str(address_of("env://", placement, agent_store=False)) == "tcp://a:1"
    assert address_of(None, placement, agent_store=True).scheme == "agent"
    assert str(address_of("tcp://b:2", placement, agent_store=True)) == "tcp://b:2"
    assert address_of("tcp://b:2", placement, agent_store=True).scheme == "tcp"


@pytest.mark.parametrize(
    ("placement", "missing"),
    [
        (Placement(world_size=2), "MASTER_ADDR"),
        (Placement(world_size=2, master_addr="a"), "MASTER_PORT"),
    ],
)
def test_an_address_that_nobody_named(placement: Placement, missing: str) -> None:
    with pytest.raises(UsageError, match=rf"{missing} is not set.*--init-method tcp://HOST:PORT"):
        address_of(None, placement, agent_store=False)
