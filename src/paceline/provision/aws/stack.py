"""The CloudFormation stack: planned, created as a whole or not at all, listed, deleted."""

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.aws_client import NO_CREDENTIALS
from paceline.launch.local.launcher import quietly
from paceline.launch.signals import STOP_SIGNALS, signals_raised
from paceline.options.text import clause
from paceline.provision.aws.options import NetworkOptions, NodeOptions
from paceline.provision.aws.template import CLUSTER_TAG, NODE_TAG, InstanceType, Plan, Site

_TOKEN_TAG = "paceline:token"  # names the `up` that created the stack
_POLL_S = 5
_STACK_TIMEOUT_S = 30 * 60
_GONE_TIMEOUT_S = 2 * 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Aws:
    """Clients of boto3 for the account and region that the user's AWS configuration names."""

    region: str
    ec2: Any
    cloudformation: Any


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack."""

    id: str
    status: str
    tags: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One instance of a cluster."""

    id: str
    name: str
    """`Node0`, `Node1` and so on."""
    state: str
    instance_type: str
    launched: datetime
    private_address: str
    public_address: str
    interface: str
    """Its primary network interface's id; empty once it is terminated."""

    @property
    def address(self) -> str:
        """Where ssh reaches it: its public address, or the private one of a private subnet."""
        return self.public_address or self.private_address


def connect(region: str | None) -> Aws:
    """Read the user's AWS configuration. Nothing is called yet.

    Args:
        region: Instead of the configuration's.

    Raises:
        UsageError: boto3 isn't installed, or there is no region, profile or credentials.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise UsageError(
            "paceline aws needs boto3, which isn't installed: pip install 'paceline[aws]'"
        ) from error
    config = Config(connect_timeout=10, retries={"total_max_attempts": 5, "mode": "standard"})
    with aws_errors():
        session = boto3.Session(region_name=region)
        client: Callable[..., Any] = session.client
        return Aws(
            region=session.region_name or "",
            ec2=client("ec2", config=config),
            cloudformation=client("cloudformation", config=config),
        )


@contextmanager
def aws_errors() -> Iterator[None]:
    """Raise what boto3 raises in the block as errors that are shown to the user.

    Raises:
        UsageError: AWS refused a call, or the configuration can't be used.
        InfrastructureError: AWS can't be reached, or failed.
    """
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        yield
    except exceptions.ClientError as error:
        failed = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400) >= 500
        raise (InfrastructureError if failed else UsageError)(str(error)) from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError, ResponseParserError) as error:
        raise InfrastructureError(f"AWS can't be reached: {error}") from error
    except exceptions.NoRegionError as error:
        raise UsageError("no AWS region is set: give --region, or set AWS_REGION") from error
    except exceptions.NoCredentialsError as error:
        raise UsageError(NO_CREDENTIALS) from error
    except exceptions.BotoCoreError as error:
        raise UsageError(f"your AWS configuration can't be used: {error}") from error


def make_plan(
    aws: Aws,
    name: str,
    options: NodeOptions,
    network: NetworkOptions,
    *,
    public_key: str,
    ssh_from: str,
) -> Plan:
    """Look up the instance type and where it can be placed; creates nothing.

    Raises:
        UsageError: What was asked for isn't there, or doesn't fit together.
    """
    kind = _find_type(aws, options.instance_type)
    if network.efa and not kind.fabric_cards:
        raise UsageError(f"{options.instance_type} has no Elastic Fabric Adapter: remove --efa")
    efa = options.nodes > 1 if network.efa is None else network.efa
    return Plan(
        name=name,
        options=options,
        type=kind,
        site=_find_site(aws, options.instance_type, network),
        fabric_cards=kind.fabric_cards if efa else (),
        public_key=public_key,
        ssh_from=ssh_from,
    )


def _find_type(aws: Aws, name: str) -> InstanceType:
    with aws_errors():
        found = aws.ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"][0]
    network = found["NetworkInfo"]
    cards: tuple[int, ...] = ()
    if network.get("EfaSupported"):
        # One adapter a card. Where there are more cards than adapters, the first has none: "Network
        # cards", EC2 User Guide.
        listed = network.get("NetworkCards", [{"NetworkCardIndex": 0}])
        adapters = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)
        cards = tuple(sorted(card["NetworkCardIndex"] for card in listed)[-adapters:])
    architectures = found["ProcessorInfo"]["SupportedArchitectures"]
    return InstanceType(
        architecture="arm64" if "arm64" in architectures else "x86_64",
        gpus=sum(gpu["Count"] for gpu in found.get("GpuInfo", {}).get("Gpus", [])),
        fabric_cards=cards,
        cluster_placement="cluster" in found["PlacementGroupInfo"]["SupportedStrategies"],
    )


def _find_site(aws: Aws, instance_type: str, network: NetworkOptions) -> Site:
    with aws_errors():
        if network.subnet is not None:
            found = aws.ec2.describe_subnets(SubnetIds=[network.subnet])["Subnets"][0]
            return Site(
                zone=found["AvailabilityZone"],
                subnet=network.subnet,
                vpc=found["VpcId"],
                public=found["MapPublicIpOnLaunch"],
            )
        if network.zone is not None:
            return Site(zone=network.zone)
        offers = aws.ec2.describe_instance_type_offerings(
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [instance_type]}],
        )["InstanceTypeOfferings"]
    if not offers:
        raise UsageError(f"no zone of {aws.region} offers {instance_type}")
    return Site(zone=min(offer["Location"] for offer in offers))


def find_stack(aws: Aws, name: str) -> Stack | None:
    """Return a stack by its name or id; None if there is none."""
    from botocore.exceptions import ClientError

    with aws_errors():
        try:
            found = aws.cloudformation.describe_stacks(StackName=name)["Stacks"][0]
        except ClientError as error:
            if "does not exist" in str(error):
                return None
            raise
    return Stack(
        id=found["StackId"],
        status=found["StackStatus"],
        tags={tag["Key"]: tag["Value"] for tag in found["Tags"]},
        outputs={each["OutputKey"]: each["OutputValue"] for each in found.get("Outputs", [])},
    )


def find_nodes(aws: Aws, cluster: str) -> list[Node]:
    """List a cluster's nodes in their order; those that are gone too as long as AWS lists them."""
    filters = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]},
        {"Name": "tag-key", "Values": [NODE_TAG]},
    ]
    with aws_errors():
        pages = list(aws.ec2.get_paginator("describe_instances").paginate(Filters=filters))
    found = [node for page in pages for each in page["Reservations"] for node in each["Instances"]]
    return sorted(map(_read_node, found), key=lambda node: (len(node.name), node.name, node.id))


def _read_node(found: Mapping[str, Any]) -> Node:
    primary = [i for i in found["NetworkInterfaces"] if i["Attachment"]["DeviceIndex"] == 0]
    return Node(
        id=found["InstanceId"],
        name={tag["Key"]: tag["Value"] for tag in found["Tags"]}[NODE_TAG],
        state=found["State"]["Name"],
        instance_type=found["InstanceType"],
        launched=found["LaunchTime"],
        private_address=found.get("PrivateIpAddress", ""),
        public_address=found.get("PublicIpAddress", ""),
        interface=primary[0]["NetworkInterfaceId"] if primary else "",
    )


def find_leftovers(aws: Aws, cluster: str) -> list[str]:
    """List what carries the cluster's tag, as `kind id`, whatever its stack says."""
    filters = [{"Name": "key", "Values": [CLUSTER_TAG]}, {"Name": "value", "Values": [cluster]}]
    gone = {node.id for node in find_nodes(aws, cluster) if node.state == "terminated"}
    with aws_errors():
        tags = aws.ec2.describe_tags(Filters=filters)["Tags"]
    found = (f"{t['ResourceType']} {t['ResourceId']}" for t in tags if t["ResourceId"] not in gone)
    return sorted(found)


def create_nodes(aws: Aws, plan: Plan, say: Say, use: Callable[[Stack, list[Node]], None]) -> None:
    """Create the stack and wait until the nodes can be used; blocks for minutes.

    Phases: ask for the stack; wait for it; give the nodes their elastic addresses; call `use`. A
    signal or an error in any of them deletes the stack and waits until it is gone.

    Args:
        use: Called with the stack and its nodes; may wait for them.

    Raises:
        PacelineError: They couldn't be created; nothing is left, or the message names what is.
        KeyboardInterrupt: A signal asked to stop; nothing is left.
    """
    token = secrets.token_hex(16)
    say = quietly(say)  # a closed terminal must not keep anything from being deleted
    with signals_raised():
        try:
            stack_id = _create_stack(aws, plan, token)
            say(f"creating the stack {plan.name}; Ctrl-C deletes all of it again")
            _wait(aws, "stack_create_complete", stack_id)
            stack = find_stack(aws, stack_id)
            assert stack is not None
            use(stack, _with_addresses(aws, plan, stack))
        except BaseException as error:
            _roll_back(aws, plan, token, error, say)
            raise


def _create_stack(aws: Aws, plan: Plan, token: str) -> str:
    # A signal waits for AWS's answer: a request that is on its way couldn't be taken back.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with aws_errors():
            created: dict[str, str] = aws.cloudformation.create_stack(
                StackName=plan.name,
                TemplateBody=plan.template(),
                Parameters=[
                    {"ParameterKey": key, "ParameterValue": value}
                    for key, value in plan.parameters().items()
                ],
                Tags=[
                    {"Key": CLUSTER_TAG, "Value": plan.name},
                    {"Key": _TOKEN_TAG, "Value": token},
                ],
                OnFailure="DELETE",
                TimeoutInMinutes=_STACK_TIMEOUT_S // 60,
                Capabilities=["CAPABILITY_IAM"] if plan.options.bucket else [],
                ClientRequestToken=token,
            )
            return created["StackId"]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _wait(aws: Aws, event: str, stack_id: str) -> None:
    """Wait by boto3's waiter.

    Raises:
        InfrastructureError: It failed; the message has AWS's first reason.
    """
    from botocore.exceptions import ClientError, WaiterError

    config = {"Delay": _POLL_S, "MaxAttempts": _STACK_TIMEOUT_S // _POLL_S}
    with aws_errors():
        try:
            aws.cloudformation.get_waiter(event).wait(StackName=stack_id, WaiterConfig=config)
        except WaiterError as error:
            events: list[Any] = []
            with suppress(ClientError):
                pages = aws.cloudformation.get_paginator("describe_stack_events")
                events = [e for p in pages.paginate(StackName=stack_id) for e in p["StackEvents"]]
            reasons = [
                f"{e['LogicalResourceId']}: {e.get('ResourceStatusReason', 'no reason given')}"
                for e in reversed(events)  # AWS lists the newest first
                if e["ResourceStatus"].endswith("_FAILED")
                and "cancelled" not in e.get("ResourceStatusReason", "")
            ]
            reason = reasons[0] if reasons else str(error)
            raise InfrastructureError(f"the stack failed: {reason}") from error


def _with_addresses(aws: Aws, plan: Plan, stack: Stack) -> list[Node]:
    """Associate the elastic addresses, if there are any, and return the running nodes."""
    nodes = [node for node in find_nodes(aws, plan.name) if node.state == "running"]
    if len(nodes) != plan.options.nodes:
        raise InfrastructureError(
            f"{len(nodes)} of {plan.options.nodes} nodes run: AWS has ended the others already"
        )
    if not plan.elastic_addresses:
        return nodes
    with aws_errors():
        for node in nodes:
            aws.ec2.associate_address(
                AllocationId=stack.outputs[f"{node.name}Address"],
                NetworkInterfaceId=node.interface,
            )
    return [node for node in find_nodes(aws, plan.name) if node.state == "running"]


def _roll_back(aws: Aws, plan: Plan, token: str, error: BaseException, say: Say) -> None:
    """Delete what this attempt has created, and nothing else.

    Raises:
        InfrastructureError: Something is left; the message names it.
    """
    try:
        stack = find_stack(aws, plan.name)
        if stack is None or stack.tags.get(_TOKEN_TAG) == token:  # else another one's
            delete_nodes(aws, plan.name, say)
    except (PacelineError, KeyboardInterrupt) as failure:
        raise InfrastructureError(
            f"{clause(error)}. Then {plan.name} couldn't be deleted: {clause(failure)}. Its nodes "
            f"stop themselves after {plan.options.max_hours:g} h; paceline aws down --name "
            f"{plan.name} tries again"
        ) from error


def delete_nodes(aws: Aws, name: str, say: Say) -> None:
    """Delete a cluster's stack, wait for the end and check what is left; blocks for minutes.

    Harmless where there is nothing, and after an attempt that failed.

    Raises:
        UsageError: The stack of this name isn't Paceline's.
        InfrastructureError: Something is left; the message names it.
        KeyboardInterrupt: A signal asked to stop; AWS goes on deleting.
    """
    stack = find_stack(aws, name)
    failure = ""
    if stack is not None:
        if stack.tags.get(CLUSTER_TAG) != name:
            raise UsageError(f"the stack {name} in {aws.region} wasn't created by paceline aws")
        say(f"deleting the stack {name}, which takes minutes")
        with aws_errors():
            aws.cloudformation.delete_stack(StackName=stack.id)
        try:
            _wait(aws, "stack_delete_complete", stack.id)
        except InfrastructureError as error:
            failure = f" ({error})"
    # AWS lists what is deleted for a while.
    end_s = time.monotonic() + (_GONE_TIMEOUT_S if stack and not failure else 0.0)
    while (left := find_leftovers(aws, name)) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    if left or failure:
        listed = ", ".join(left) or "nothing with its tag"
        raise InfrastructureError(f"this is left of {name} in {aws.region}: {listed}{failure}")
    say(f"nothing is left of {name} in {aws.region}")
