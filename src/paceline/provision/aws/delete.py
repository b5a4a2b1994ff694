"""Takes the nodes down, and looks whether anything is left of them."""

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.aws_client import Aws
from paceline.launch.signals import Interrupts
from paceline.provision.aws.create import GONE_TIMEOUT_S, Say, wait_for_nothing
from paceline.provision.aws.files import kept
from paceline.provision.aws.stack import delete_stack, find_stack
from paceline.provision.aws.waiter import Waiter


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
                    failure = error
            left = wait_for_nothing(aws, name, waiter, GONE_TIMEOUT_S if stack else 0.0)
        except KeyboardInterrupt:
            say(f"AWS goes on deleting; paceline aws down --name {name} looks at what is left")
            raise
    if failure is not None or left:
        listed = ", ".join(left) or "nothing with its tag"
        reason = f" ({failure})" if failure else ""
        raise InfrastructureError(f"this is left of {name} in {aws.region}: {listed}{reason}")
    kept(name).forget()
    say(f"nothing is left of {name} in {aws.region}" if stack else _nothing(name, aws.region))


def _nothing(name: str, region: str) -> str:
    return f"there is nothing named {name} in {region}"
