"""What is shown before nodes are made, and of those that are there. Pure text."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from paceline.provision.aws.nodes import Instance
from paceline.provision.aws.plan import ClusterPlan
from paceline.provision.aws.price import Price
from paceline.provision.aws.quota import Quota


def plan_lines(plan: ClusterPlan) -> list[str]:
    """Say what is going to be made, and what it costs."""
    options, kind = plan.options, plan.type
    capacity = "spot" if options.spot else "on demand"
    adapters = len(plan.shape.fabric_cards)
    login = plan.key.key_name or "your public key"
    return [
        f"{plan.name}: {options.nodes} x {kind.name} ({capacity}, {kind.slots} workers, "
        f"{kind.vcpus} vCPUs, {options.disk_gb} GB each) in {plan.site.zone}",
        f"  image    {plan.image.id} {plan.image.name}".rstrip(),
        f"  network  {plan.site.subnet or 'its own'}"
        + (", nodes close together" if plan.clustered else "")
        + (f", fabric adapters: {adapters} each" if adapters else ""),
        f"  access   ssh from {plan.ssh_from} with {login}; ports {plan.ports[0]}-{plan.ports[1]} "
        "between the nodes",
        f"  rights   {'S3 ' + options.bucket if options.bucket else 'none in your account'}",
        f"  life     {options.max_hours:g} h from each node's start, then it is gone"
        + ("; its elastic address costs on until `down`" if plan.shape.elastic_addresses else ""),
        *(f"  quota    {_quota_line(quota)}" for quota in plan.quotas),
        f"  price    {price_line(plan.price, options.nodes, options.max_hours)}",
    ]


def price_line(price: Price, nodes: int, hours: float) -> str:
    """Say what some nodes cost in some hours, at most."""
    total = price.total_usd(nodes, hours)
    if price.usd_per_hour is None or total is None:
        return f"not found: {price.note}"
    return (
        f"{price.usd_per_hour:.4g} USD an hour and node ({price.note}); at most {total:,.2f} USD "
        f"for {nodes} nodes in {hours:g} h. Disks, addresses and traffic come on top"
    )


def status_lines(
    nodes: Sequence[Instance], price: Price, stop_after_minutes: float, now: datetime
) -> list[str]:
    """Say of each node how it is, where, and when it stops itself; then what all have cost."""
    lines = []
    spent = 0.0
    for node in nodes:
        ends = node.launched + timedelta(minutes=stop_after_minutes)
        left = ends - now
        lines.append(
            f"{node.name:<8} {node.state:<13} {node.public_address or '-':<15} "
            f"{node.private_address or '-':<15} {node.instance_type} {node.id}"
            + (f"  stops {ends:%Y-%m-%d %H:%M UTC} (in {_hours(left)})" if node.running else "")
        )
        # A node costs from its launch to its end, or until now.
        until = now if node.running else min(node.stopped or ends, now)
        spent += max(0.0, (until - node.launched).total_seconds()) / 3600
    cost = price.total_usd(1, spent)
    spending = f"about {cost:,.2f} USD" if cost is not None else f"unknown price ({price.note})"
    return [*lines, f"so far   {spent:.1f} node hours, {spending}; disks and addresses come on top"]


def _quota_line(quota: Quota) -> str:
    if quota.limit is None:
        return f"{quota.what}: not found ({quota.note}); {quota.wanted} are needed"
    return f"{quota.what}: {quota.wanted} of {quota.limit} needed, {quota.used} in use"


def _hours(span: timedelta) -> str:
    minutes = max(0, round(span.total_seconds() / 60))
    return f"{minutes // 60}:{minutes % 60:02} h"
