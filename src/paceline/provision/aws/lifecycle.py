"""Makes the nodes, all of them or nothing, and deletes them; looks whether anything is left."""

import secrets
from collections.abc import Callable, Sequence

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.aws_client import Aws
from paceline.launch.local.launcher import quietly
from paceline.launch.signals import Interrupts
from paceline.options.text import clause
from paceline.provision.aws.files import keep, kept
from paceline.provision.aws.hostkeys import fetch_host_keys, wait_for_ssh
from paceline.provision.aws.nodes import Instance, find_nodes
from paceline.provision.aws.orphaned_resources import find_orphaned
from paceline.provision.aws.plan import ClusterPlan
from paceline.provision.aws.stack import (
    Stack,
    create_stack,
    delete_stack,
    find_stack,
    wait_until_made,
)
from paceline.provision.aws.template import address_output
from paceline.provision.aws.waiter import Waiter, never

_SSH_TIMEOUT_S = 10 * 60.0
_KEYS_TIMEOUT_S = 3 * 60.0
GONE_TIMEOUT_S = 2 * 60.0

Say = Callable[[str], None]


def make_nodes(aws: Aws, plan: ClusterPlan, *, wait: bool, say: Say) -> list[Instance]:
    """Make the nodes, and wait until they can be used; blocks for minutes.

    Phases: ask for the stack; wait for it; give each node its elastic address; wait for ssh; read
    the host keys; write the files for other commands. A signal or an error in any of them deletes
    the stack and waits until it is gone.

    Args:
        wait: Whether to wait for ssh and the host keys.

    Raises:
        PacelineError: They couldn't be made; nothing is left, or the message names what is.
        KeyboardInterrupt: A signal asked to stop; nothing is left.
    """
    token = secrets.token_hex(16)
    say = quietly(say)  # a closed terminal must not keep anything from being deleted
    with Interrupts().caught() as interrupts:
        waiter = Waiter(lambda: interrupts.received)
        # Ask for the stack, and wait for it.
        try:
            create_stack(aws, plan, token)
            say(f"making the stack {plan.name}; Ctrl-C deletes all of it again")
            stack = wait_until_made(aws, plan, waiter)
            # Make the nodes reachable, and wait for ssh.
            nodes = _address_nodes(aws, plan, stack)
            keys = _wait_for_nodes(aws, nodes, waiter, say) if wait else {}
            # The last moment for a signal: from here on the files lead other commands to the nodes.
            waiter.check()
            keep(kept(plan.name), stack, nodes, keys, plan.key.private_file)
            return nodes
        except BaseException as error:
            _roll_back(aws, plan, token, error, say)
            raise


def _address_nodes(aws: Aws, plan: ClusterPlan, stack: Stack) -> list[Instance]:
    """Give nodes with several interfaces their elastic addresses; AWS does it for all others."""
    nodes = [node for node in find_nodes(aws, plan.name) if node.running]
    if len(nodes) != plan.options.nodes:
        raise InfrastructureError(
            f"{len(nodes)} of {plan.options.nodes} nodes run: AWS has ended the others already"
        )
    if not plan.shape.elastic_addresses:
        return nodes
    for node in nodes:
        aws.call(
            "ec2",
            "associate_address",
            AllocationId=stack.outputs[address_output(node.name)],
            NetworkInterfaceId=node.interface,
        )
    return [node for node in find_nodes(aws, plan.name) if node.running]


def _wait_for_nodes(
    aws: Aws, nodes: Sequence[Instance], waiter: Waiter, say: Say
) -> dict[str, tuple[str, ...]]:
    say(f"waiting for ssh at {', '.join(node.address for node in nodes)}")
    wait_for_ssh([node.address for node in nodes], waiter, _SSH_TIMEOUT_S)
    say("reading the nodes' host keys from their consoles")
    keys = fetch_host_keys(aws, nodes, waiter, _KEYS_TIMEOUT_S)
    unknown = [node.name for node in nodes if node.address not in keys]
    if unknown:
        say(
            f"no host key of {', '.join(unknown)} was seen: ssh will ask for it once, or accept it "
            "with --host-keys accept-new"
        )
    return keys


def _roll_back(aws: Aws, plan: ClusterPlan, token: str, error: BaseException, say: Say) -> None:
    """Delete what this attempt has made, and nothing else.

    Raises:
        InfrastructureError: Something is left; the message names it.
    """
    why = clause(str(error) or "interrupted")
    try:
        stack = find_stack(aws, plan.name)
        if stack is not None:
            # Somebody else's stack of the same name.
            if stack.token != token:
                return
            say(f"deleting the stack {plan.name} again, which takes minutes")
            delete_stack(aws, stack, Waiter(never))
        left = wait_until_deleted(aws, plan.name, Waiter(never), GONE_TIMEOUT_S if stack else 0.0)
    except (PacelineError, KeyboardInterrupt) as failure:
        raise InfrastructureError(
            f"{why}. Then the stack {plan.name} couldn't be deleted: {clause(failure)}. Its nodes "
            f"stop themselves after {plan.options.max_hours:g} h; paceline aws down --name "
            f"{plan.name} tries again"
        ) from error
    if left:
        raise InfrastructureError(f"{why}. This is left of {plan.name}: {', '.join(left)}")
    say("nothing is left")


def wait_until_deleted(
    aws: Aws, name: str, waiter: Waiter, timeout_s: float = GONE_TIMEOUT_S
) -> list[str]:
    """Wait until nothing carries the cluster's tag any more; AWS is slow to forget.

    Returns:
        What is still there when the time is up.
    """
    left: list[str] = []

    def poll() -> bool | None:
        """Note what is left; None while there is something."""
        nonlocal left
        left = find_orphaned(aws, name)
        return None if left else True

    # `left` keeps the last result, whether the time was enough or not.
    waiter.until(poll, timeout_s)
    return left


def delete_nodes(aws: Aws, name: str, say: Say) -> None:
    """Delete a cluster's stack, wait for the end and look what is left; blocks for minutes.

    Harmless where there is nothing, and after an attempt that failed.

    Raises:
        UsageError: The stack of this name isn't Paceline's.
        InfrastructureError: Something is left; the message names it.
        KeyboardInterrupt: A signal asked to stop; AWS goes on deleting.
    """
    with Interrupts().caught() as interrupts:
        waiter = Waiter(lambda: interrupts.received)
        stack = find_stack(aws, name)
        if stack is not None and stack.cluster != name:
            raise UsageError(
                f"the stack {name} in {aws.region} wasn't made by paceline aws: it is left alone"
            )
        failure: InfrastructureError | None = None
        try:
            if stack is not None:
                say(f"deleting the stack {name}, which takes minutes")
                try:
                    delete_stack(aws, stack, waiter)
                except InfrastructureError as error:
                    # The stack is stuck; what carries the tag tells more than its message.
                    failure = error
            left = wait_until_deleted(aws, name, waiter, GONE_TIMEOUT_S if stack else 0.0)
        except KeyboardInterrupt:
            say(f"AWS goes on deleting; paceline aws down --name {name} looks at what is left")
            raise
    if failure is not None or left:
        listed = ", ".join(left) or "nothing with its tag"
        reason = f" ({failure})" if failure else ""
        raise InfrastructureError(f"this is left of {name} in {aws.region}: {listed}{reason}")
    # Only now: as long as something is left, the files lead to it.
    kept(name).forget()
    what = "nothing is left of" if stack else "there is nothing named"
    say(f"{what} {name} in {aws.region}")
