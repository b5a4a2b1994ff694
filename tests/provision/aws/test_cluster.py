"""Making nodes and taking them down, against moto's server: all of them or nothing."""

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.aws_client import Aws
from paceline.launch.ssh.hostfile import parse_hostfile
from paceline.provision.aws.files import kept
from paceline.provision.aws.lifecycle import delete_nodes, make_nodes
from paceline.provision.aws.nodes import find_nodes
from paceline.provision.aws.options import NetworkOptions, NodeOptions
from paceline.provision.aws.orphaned_resources import find_orphaned
from paceline.provision.aws.plan import ClusterPlan, check_quotas, make_plan
from paceline.provision.aws.stack import explain, find_stack
from paceline.provision.aws.template import CLUSTER_TAG
from tests.provision.aws.account import Account
from tests.provision.aws.server import IMAGE, PRICE_USD

pytestmark = pytest.mark.xdist_group("aws")

NAME = "paceline"


def planned(aws: Aws, *, efa: bool | None = False, **options: object) -> ClusterPlan:
    network = NetworkOptions(allow_ssh_from="192.0.2.7", efa=efa)
    return make_plan(aws, NAME, NodeOptions(**options), network)  # type: ignore[arg-type]


def make(aws: Aws, plan: ClusterPlan, said: list[str] | None = None) -> list[str]:
    nodes = make_nodes(aws, plan, wait=False, say=(said if said is not None else []).append)
    return [node.id for node in nodes]


@pytest.mark.slow
def test_nodes_come_and_go(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws, bucket="data/stl10")
    assert (plan.image.id, plan.price.usd_per_hour, plan.type.slots) == (IMAGE, PRICE_USD, 4)
    assert [quota.used for quota in plan.quotas] == [0]
    made = make(aws, plan)
    nodes = find_nodes(aws, NAME)
    assert [node.id for node in nodes] == made
    assert [node.name for node in nodes] == ["Node0", "Node1"]
    stack = find_stack(aws, NAME)
    assert stack is not None
    assert stack.outputs["StopAfterMinutes"] == "720"
    hosts = parse_hostfile(kept(NAME).hostfile.read_text())
    assert [(host.name, host.slots) for host in hosts] == [(node.address, 4) for node in nodes]
    kinds = {text.rpartition(" ")[0] for text in find_orphaned(aws, NAME)}
    assert {"node", "security group", "launch template", "placement group", "key pair"} <= kinds
    assert {"subnet", "route table", "internet gateway", "network"} <= kinds
    said: list[str] = []
    delete_nodes(aws, NAME, said.append)
    assert said[-1] == "nothing is left of paceline in us-east-1"
    assert find_orphaned(aws, NAME) == []
    assert not kept(NAME).directory.exists()
    delete_nodes(aws, NAME, said.append)
    assert said[-1] == "there is nothing named paceline in us-east-1"


def test_who_is_let_in(account: Account) -> None:
    aws = account.aws()
    make(aws, planned(aws, nodes=1))
    filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [NAME]}]
    (group,) = aws.call("ec2", "describe_security_groups", Filters=filters)["SecurityGroups"]
    rules = {
        (rule.text("IpProtocol"), rule.count("FromPort"), rule.count("ToPort")): (
            [each.text("CidrIp") for each in rule["IpRanges"]],
            [each.text("GroupId") for each in rule["UserIdGroupPairs"]],
        )
        for rule in group["IpPermissions"]
    }
    own = group.text("GroupId")
    assert rules == {
        ("tcp", 22, 22): (["192.0.2.7/32"], []),
        ("tcp", 20000, 29999): ([], [own]),
    }


@pytest.mark.slow
def test_nodes_with_fabric_adapters_get_elastic_addresses(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws, efa=None)
    assert plan.shape.fabric_cards == (0,)
    make(aws, plan)
    addresses = aws.call("ec2", "describe_addresses")["Addresses"]
    given = {each.text("NetworkInterfaceId"): each.text("PublicIp") for each in addresses}
    assert given == {node.interface: node.public_address for node in find_nodes(aws, NAME)}


@pytest.mark.slow
def test_a_stack_of_that_name_is_left_alone(account: Account) -> None:
    aws = account.aws()
    made = make(aws, planned(aws))
    with pytest.raises(UsageError, match="already: paceline aws status"):
        make(aws, planned(aws, nodes=1))
    assert [node.id for node in find_nodes(aws, NAME) if node.running] == made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_takes_everything_back(account: Account, number: signal.Signals) -> None:
    """While AWS is still at it, and by the signal itself."""
    aws = account.aws()
    plan = planned(aws)
    account.faults(hold=True)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("making"):
            assert len(find_orphaned(aws, NAME)) > 8
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt):
        make_nodes(aws, plan, wait=False, say=say)
    assert said[-1] == "nothing is left"
    assert find_orphaned(aws, NAME) == []
    assert not kept(NAME).directory.exists()


def test_a_closed_terminal_keeps_nothing_from_being_deleted(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws)
    account.faults(hold=True)

    def closed(line: str) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise BrokenPipeError

    with pytest.raises(KeyboardInterrupt):
        make_nodes(aws, plan, wait=False, say=closed)
    assert find_orphaned(aws, NAME) == []


@pytest.mark.slow
def test_a_stack_that_fails_leaves_nothing(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws)
    account.faults(fail="We currently do not have sufficient g5.12xlarge capacity in us-east-1a")
    with pytest.raises(InfrastructureError, match=r"no 2 x g5\.12xlarge free in us-east-1a"):
        make(aws, plan)
    account.faults()
    assert find_orphaned(aws, NAME) == []


@pytest.mark.parametrize(
    ("reason", "kind", "what"),
    [
        ("You have requested more vCPU capacity than (VcpuLimitExceeded)", UsageError, "quota"),
        ("x is not authorized to perform: ec2:CreateVpc on y", UsageError, "ec2:CreateVpc"),
        ("Something else", InfrastructureError, "Node0: Something else"),
    ],
)
@pytest.mark.core_cases(2)
def test_reasons_are_explained(
    account: Account, reason: str, kind: type[PacelineError], what: str
) -> None:
    error = explain([f"Node0: {reason}"], planned(account.aws()))
    assert type(error) is kind
    assert what in str(error)


def test_a_missing_permission_is_named(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws)
    account.faults(deny=["cloudformation:CreateStack"])
    with pytest.raises(UsageError, match="permission cloudformation:CreateStack"):
        make(aws, plan)
    account.faults(deny=["ec2:DescribeInstanceTypes"])
    with pytest.raises(UsageError, match="permission ec2:DescribeInstanceTypes"):
        planned(aws)


def test_what_cannot_be_taken_back_is_said(account: Account) -> None:
    aws = account.aws()
    plan = planned(aws)
    account.faults(fail="Something", deny=["cloudformation:DeleteStack"])
    with pytest.raises(InfrastructureError) as caught:
        make(aws, plan)
    message = str(caught.value)
    assert "couldn't be deleted: your AWS credentials lack the permission" in message
    assert "stop themselves after 12 h; paceline aws down --name paceline" in message


def test_what_is_left_is_named(account: Account) -> None:
    aws = account.aws()
    tags = [{"Key": CLUSTER_TAG, "Value": NAME}]
    specification = [{"ResourceType": "security-group", "Tags": tags}]
    group = aws.call(
        "ec2",
        "create_security_group",
        GroupName="orphan",
        Description="orphan",
        TagSpecifications=specification,
    ).text("GroupId")
    with pytest.raises(InfrastructureError, match=f"left of paceline .*security group {group}"):
        delete_nodes(aws, NAME, lambda _: None)


def test_somebody_elses_stack_is_left_alone(account: Account) -> None:
    aws = account.aws()
    template = '{"Resources": {"Q": {"Type": "AWS::SQS::Queue"}}}'
    aws.call("cloudformation", "create_stack", StackName=NAME, TemplateBody=template)
    with pytest.raises(UsageError, match="wasn't made by paceline"):
        delete_nodes(aws, NAME, lambda _: None)
    stack = find_stack(aws, NAME)
    assert stack is not None
    assert stack.status == "CREATE_COMPLETE"


def test_a_small_quota_is_refused_beforehand(account: Account) -> None:
    account.faults(quota=95)
    with pytest.raises(UsageError, match=r"is 95, 0 are in use, and 96 more .*L-DB2E81BA"):
        check_quotas(planned(account.aws()))


def test_what_runs_already_counts(account: Account) -> None:
    aws = account.aws()
    make(aws, planned(aws))
    spot, normal = planned(aws, spot=True), planned(aws)
    assert (spot.quotas[0].used, spot.quotas[0].code) == (0, "L-3819A6DF")
    assert normal.quotas[0].code == "L-DB2E81BA"


def test_a_price_that_is_not_found_stops_nothing(account: Account) -> None:
    account.faults(deny=["pricing:GetProducts"])
    price = planned(account.aws()).price
    assert price.usd_per_hour is None
    assert "pricing:GetProducts" in price.note


Ask = Callable[[Aws], object]


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda aws: planned(aws, instance_type="g5.huge"), "no instance type g5.huge"),
        (lambda aws: planned(aws, instance_type="g5g.xlarge"), "SSM parameter .*arm64"),
        (lambda aws: planned(aws, image="ami-0000"), "no image ami-0000"),
        (lambda aws: planned(aws, image="/own/image"), "SSM parameter /own/image"),
        (lambda aws: planned(aws, disk_gb=8), "less than the image's 15 GB"),
        (lambda aws: planned(aws, instance_type="m5.large", efa=True), "no Elastic Fabric"),
        (lambda aws: network(aws, zone="us-east-1z"), "these do: us-east-1a"),
        (lambda aws: network(aws, subnet="subnet-1"), "no subnet subnet-1"),
        (lambda aws: network(aws, ssh_key="mine"), "no key pair 'mine'"),
        (lambda aws: network(aws, public_key="/nowhere.pub"), "can't be read"),
    ],
)
@pytest.mark.core_cases(3)
def test_what_is_not_there(account: Account, ask: Ask, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        ask(account.aws())


def network(aws: Aws, **options: str) -> ClusterPlan:
    asked = NetworkOptions(allow_ssh_from="192.0.2.7", **options)  # type: ignore[arg-type]
    return make_plan(aws, NAME, NodeOptions(), asked)


def test_nodes_in_a_subnet_of_ones_own(account: Account) -> None:
    aws = account.aws()
    subnet = next(iter(aws.call("ec2", "describe_subnets")["Subnets"]))
    plan = network(aws, subnet=subnet.text("SubnetId"))
    parameters = plan.parameters()
    assert parameters["VpcId"] == subnet.text("VpcId")
    assert plan.site.zone == subnet.text("AvailabilityZone")
    assert "Zone" not in parameters
    private = replace(plan, site=replace(plan.site, public=False))
    assert private.parameters()["PublicAddress"] == "no"
    make(aws, plan)
    delete_nodes(aws, NAME, lambda _: None)
    left = {each.text("SubnetId") for each in aws.call("ec2", "describe_subnets")["Subnets"]}
    assert subnet.text("SubnetId") in left
