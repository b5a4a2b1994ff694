"""Prices, quotas and instance types, read from what AWS answers; and what is shown of them."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from paceline.launch.json_fields import Answer
from paceline.provision.aws.formatting import price_line, status_lines
from paceline.provision.aws.instance_type import read_type
from paceline.provision.aws.nodes import Instance, read_node
from paceline.provision.aws.plan import stop_after_minutes
from paceline.provision.aws.price import Price, read_price_list
from paceline.provision.aws.quota import Quota, quota_family


def product(usd: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    return json.dumps({"terms": {"OnDemand": {"x": {"priceDimensions": {"y": dimension}}}}})


def test_the_price_is_the_highest_of_an_hour() -> None:
    listed = [product("0.0000000000"), product("5.6720000000"), product("99", unit="Quantity")]
    assert read_price_list(listed) == 5.672
    assert read_price_list([]) is None
    assert read_price_list([json.dumps({"terms": {"Reserved": {}}})]) is None


def test_the_total_is_nodes_times_hours() -> None:
    price = Price(usd_per_hour=5.672, note="on demand in us-east-1")
    assert price.total_usd(2, 12.0) == pytest.approx(136.128)
    assert "at most 136.13 USD for 2 nodes in 12 h" in price_line(price, 2, 12.0)
    unknown = Price(usd_per_hour=None, note="no permission")
    assert price_line(unknown, 2, 12.0) == "not found: no permission"


@pytest.mark.parametrize(
    ("name", "spot", "family"),
    [
        ("g5.12xlarge", False, "g"),
        ("gr6.4xlarge", False, "g"),
        ("vt1.3xlarge", True, "g"),
        ("p4d.24xlarge", True, "p"),
        ("p5en.48xlarge", False, "p"),
        ("p5.48xlarge", True, "p5"),
        ("p6-b200.48xlarge", True, None),
        ("m5.large", False, "standard"),
        ("im4gn.large", False, "standard"),
        ("inf2.xlarge", True, "inf"),
        ("trn1.32xlarge", False, "trn"),
        ("dl1.24xlarge", False, "dl"),
        ("x2gd.large", False, "x"),
        ("u-6tb1.metal", False, None),
        ("hpc7a.96xlarge", False, None),
        ("mac2.metal", False, None),
    ],
)
def test_families_that_aws_counts_together(name: str, spot: bool, family: str | None) -> None:
    assert quota_family(name, spot=spot) == family


def test_a_quota_counts_what_is_in_use() -> None:
    assert Quota(what="x", wanted=96, used=96, limit=192).fits
    assert not Quota(what="x", wanted=97, used=96, limit=192).fits
    assert Quota(what="x", wanted=97, note="unknown").fits


def described(cards: int, adapters: int | None) -> Answer:
    network: dict[str, object] = {
        "EfaSupported": adapters is not None,
        "NetworkCards": [{"NetworkCardIndex": index} for index in range(cards)],
    }
    if adapters is not None:
        network["EfaInfo"] = {"MaximumEfaInterfaces": adapters}
    return Answer({"InstanceType": "x", "NetworkInfo": network})


@pytest.mark.parametrize(
    ("cards", "adapters", "used"),
    [(1, None, ()), (1, 1, (0,)), (4, 4, (0, 1, 2, 3)), (5, 4, (1, 2, 3, 4))],
)
def test_which_cards_get_a_fabric_adapter(
    cards: int, adapters: int | None, used: tuple[int, ...]
) -> None:
    assert read_type(described(cards, adapters)).fabric_cards == used


def test_a_type_without_gpus_has_one_worker() -> None:
    assert read_type(Answer({"InstanceType": "m5.large"})).slots == 1
    gpus = {"Gpus": [{"Count": 4}]}
    assert read_type(Answer({"InstanceType": "g5.12xlarge", "GpuInfo": gpus})).slots == 4


def test_life_times_are_rounded_up() -> None:
    assert [stop_after_minutes(hours) for hours in (12.0, 0.25, 0.26)] == [720, 15, 16]


NOW = datetime(2026, 11, 21, 15, 0, tzinfo=UTC)


def node(name: str, state: str, *, stopped: datetime | None = None) -> Instance:
    return Instance(
        id=f"i-{name}",
        name=name,
        state=state,
        instance_type="g5.12xlarge",
        zone="us-east-1a",
        launched=NOW - timedelta(hours=3),
        stopped=stopped,
    )


def test_the_cost_so_far_ends_with_the_node() -> None:
    nodes = [
        node("Node0", "running"),
        node("Node1", "terminated", stopped=NOW - timedelta(hours=2)),
    ]
    lines = status_lines(nodes, Price(usd_per_hour=2.0, note=""), 720, NOW)
    assert "stops 2026-11-22 00:00 UTC (in 9:00 h)" in lines[0]
    assert "stops" not in lines[1]
    assert lines[2].startswith("so far   4.0 node hours, about 8.00 USD")
    unknown = status_lines(nodes, Price(usd_per_hour=None, note="denied"), 720, NOW)
    assert "unknown price (denied)" in unknown[2]


def test_the_end_of_a_node_is_read_from_the_reason() -> None:
    reason = "User initiated (2026-11-21 13:00:00 GMT)"
    found = read_node(Answer({"InstanceId": "i-1", "StateTransitionReason": reason}))
    assert found.stopped == NOW - timedelta(hours=2)
    assert read_node(Answer({"InstanceId": "i-1"})).stopped is None
