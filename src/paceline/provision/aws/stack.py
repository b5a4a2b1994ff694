"""The nodes' CloudFormation stack: made, watched, deleted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.aws_client import Aws, AwsError, permission_named
from paceline.launch.json_fields import Answer
from paceline.provision.aws.plan import ClusterPlan
from paceline.provision.aws.template import CLUSTER_TAG, as_parameters
from paceline.provision.aws.waiter import Waiter

TOKEN_TAG = "paceline:token"
_CREATE_TIMEOUT_S = 30 * 60.0
_DELETE_TIMEOUT_S = 30 * 60.0
_NO_CAPACITY = re.compile(
    r"InsufficientInstanceCapacity|InsufficientCapacity|do not have sufficient|not have enough "
    r"available|SpotMaxPriceTooLow|UnfulfillableCapacity"
)
_NO_QUOTA = re.compile(
    r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|LimitExceeded|vCPU capacity"
)
_CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack."""

    id: str
    name: str
    status: str
    token: str
    """Of the `up` that made it; empty for one that isn't ours."""
    cluster: str
    outputs: dict[str, str]


def find_stack(aws: Aws, name: str) -> Stack | None:
    """Look a stack up, by its name or (deleted ones too) its id."""
    try:
        answer = aws.call("cloudformation", "describe_stacks", StackName=name)
    except AwsError as error:
        if error.code == "ValidationError" and "does not exist" in str(error):
            return None
        raise
    for found in answer["Stacks"]:
        return _read(found)
    return None


def create_stack(aws: Aws, plan: ClusterPlan, token: str) -> None:
    """Ask for the stack. AWS deletes it by itself should it fail.

    Args:
        token: Letters and digits of this attempt, by which it knows its own stack again.

    Raises:
        UsageError: There is a stack of this name, or a permission is missing.
        InfrastructureError: AWS refused, or can't be reached.
    """
    try:
        # The token makes a repeated request the same one (ClientRequestToken), and tags the stack.
        aws.call(
            "cloudformation",
            "create_stack",
            StackName=plan.name,
            TemplateBody=plan.template(),
            Parameters=as_parameters(plan.parameters()),
            Tags=[{"Key": CLUSTER_TAG, "Value": plan.name}, {"Key": TOKEN_TAG, "Value": token}],
            OnFailure="DELETE",
            TimeoutInMinutes=int(_CREATE_TIMEOUT_S / 60),
            Capabilities=["CAPABILITY_IAM"] if plan.options.bucket else [],
            ClientRequestToken=token,
        )
    except AwsError as error:
        if error.code == "AlreadyExistsException":
            raise UsageError(exists_already(plan.name, plan.region)) from error
        raise


def exists_already(name: str, region: str) -> str:
    """Say that a stack is there already, and what can be done."""
    return (
        f"there is a stack {name} in {region} already: paceline aws status --name {name} shows it, "
        f"down --name {name} deletes it, or give another --name"
    )


def wait_until_made(aws: Aws, plan: ClusterPlan, waiter: Waiter) -> Stack:
    """Wait until the stack is there; blocks.

    Raises:
        PacelineError: It failed; the message has the first reason.
        KeyboardInterrupt: A signal asked to stop.
    """
    stack_id = plan.name

    def made() -> Stack | None:
        """Give the stack once it is complete, None until then; raises where it failed."""
        nonlocal stack_id
        stack = find_stack(aws, stack_id)
        if stack is not None:
            stack_id = stack.id  # a deleted stack is found by its id alone
            if stack.status == "CREATE_COMPLETE":
                return stack
        if stack is None or stack.status != "CREATE_IN_PROGRESS":
            raise explain(failures(aws, stack_id), plan)
        return None

    # Three ends: it is complete, it failed (which raises), or time is up.
    stack = waiter.until(made, _CREATE_TIMEOUT_S)
    if stack is None:
        raise InfrastructureError(f"the stack {plan.name} wasn't ready within 30 minutes")
    return stack


def delete_stack(aws: Aws, stack: Stack, waiter: Waiter) -> None:
    """Delete a stack and wait for the end; blocks.

    Raises:
        InfrastructureError: AWS couldn't delete all of it; the message has the reasons.
        KeyboardInterrupt: A signal asked to stop; AWS goes on.
    """
    if stack.status != "DELETE_COMPLETE":
        aws.call("cloudformation", "delete_stack", StackName=stack.id)
    gone = waiter.until(lambda: _deleted(aws, stack.id), _DELETE_TIMEOUT_S)
    if gone is None:
        raise InfrastructureError(f"the stack {stack.name} isn't deleted after 30 minutes")


def failures(aws: Aws, stack_id: str) -> list[str]:
    """List why resources of a stack couldn't be made or deleted, as AWS says, in order."""
    try:
        events = list(
            aws.pages("cloudformation", "describe_stack_events", "StackEvents", StackName=stack_id)
        )
    except PacelineError as error:
        return [str(error)]
    return read_failures(events)


def read_failures(events: Sequence[Answer]) -> list[str]:
    """Find the reasons in a stack's events (AWS lists the newest first)."""
    return [
        f"{event.text('LogicalResourceId')}: {event.text('ResourceStatusReason')}"
        for event in reversed(events)
        if event.text("ResourceStatus").endswith("_FAILED")
        and _CANCELLED not in event.text("ResourceStatusReason")
    ]


def explain(reasons: Sequence[str], plan: ClusterPlan) -> PacelineError:
    """Say why a stack couldn't be made, and what to do."""
    first = reasons[0] if reasons else "AWS gave no reason"
    permission = permission_named(first)
    what = f"{plan.options.nodes} x {plan.type.name}"
    if _NO_CAPACITY.search(first):
        return InfrastructureError(
            f"AWS has no {what} free in {plan.site.zone} now: try later, another --zone or "
            f"--region, or another --instance-type ({first})"
        )
    if permission is not None:
        return UsageError(
            f"your AWS credentials lack the permission {permission}, needed for the stack ({first})"
        )
    if _NO_QUOTA.search(first):
        return UsageError(f"your quota is too small for {what} in {plan.region} ({first})")
    return InfrastructureError(f"the stack {plan.name} couldn't be made: {first}")


def _deleted(aws: Aws, stack_id: str) -> bool | None:
    stack = find_stack(aws, stack_id)
    if stack is None or stack.status == "DELETE_COMPLETE":
        return True
    if stack.status == "DELETE_FAILED":
        reasons = "; ".join(failures(aws, stack_id)) or "AWS gave no reason"
        raise InfrastructureError(f"AWS couldn't delete all of the stack {stack.name}: {reasons}")
    return None


def _read(answer: Answer) -> Stack:
    tags = answer.tags()
    outputs = {o.text("OutputKey"): o.text("OutputValue") for o in answer["Outputs"]}
    return Stack(
        id=answer.text("StackId"),
        name=answer.text("StackName"),
        status=answer.text("StackStatus"),
        token=tags.get(TOKEN_TAG, ""),
        cluster=tags.get(CLUSTER_TAG, ""),
        outputs=outputs,
    )
