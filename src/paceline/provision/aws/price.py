"""What nodes cost: from AWS's price list, or from the latest spot prices."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.launch.aws_client import Aws
from paceline.launch.json_fields import Answer

_PRICES_AT = "us-east-1"
"""The price list is answered in a few regions alone, for all of them."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one node costs; None where it couldn't be found."""

    usd_per_hour: float | None
    note: str
    """Where it comes from, or why it isn't known."""

    def total_usd(self, nodes: int, hours: float) -> float | None:
        """Give what some nodes cost in some hours."""
        return None if self.usd_per_hour is None else self.usd_per_hour * nodes * hours


def find_price(aws: Aws, instance_type: str, *, spot: bool, zone: str) -> Price:
    """Look up a node's price; never fails, since it is for information only."""
    try:
        found = _spot_price(aws, instance_type, zone) if spot else _list_price(aws, instance_type)
    except (PacelineError, ValueError) as error:
        return Price(usd_per_hour=None, note=str(error))
    if found is None:
        return Price(usd_per_hour=None, note=f"AWS lists none for {instance_type}")
    where = f"spot price now in {zone}; it moves" if spot else f"on demand in {aws.region}"
    return Price(usd_per_hour=found, note=where)


def read_price_list(products: Sequence[str]) -> float | None:
    """Find the on-demand price in products of the price list.

    Args:
        products: JSON each, as get_products answers.

    Returns:
        USD an hour; None where there is none. The highest, should AWS list several.

    Raises:
        ValueError: One isn't JSON.
    """
    found = []
    for product in products:
        for term in Answer(json.loads(product))["terms"]["OnDemand"].members().values():
            for dimension in term["priceDimensions"].members().values():
                if dimension.text("unit") in ("Hrs", "Hours"):
                    found.append(dimension["pricePerUnit"].number("USD"))
    return max((price for price in found if price > 0.0), default=None)


def _list_price(aws: Aws, instance_type: str) -> float | None:
    wanted = {
        "instanceType": instance_type,
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": f, "Value": v} for f, v in wanted.items()]
    answer = aws.at(_PRICES_AT).call(
        "pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters
    )
    return read_price_list(answer["PriceList"].texts())


def _spot_price(aws: Aws, instance_type: str, zone: str) -> float | None:
    answer = aws.call(
        "ec2",
        "describe_spot_price_history",
        InstanceTypes=[instance_type],
        ProductDescriptions=["Linux/UNIX"],
        AvailabilityZone=zone,
        MaxResults=1,  # the latest comes first
    )
    for entry in answer["SpotPriceHistory"]:
        return entry.number("SpotPrice")
    return None
