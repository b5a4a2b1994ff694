"""What a rig needs of the machine that tests run on."""

import os
import shutil
import sys

import pytest

_TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "ping": "iputils-ping",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
}


def need(*tools: str) -> None:
    """Skip the test where a rig can't be built or a tool is missing; in CI that is a failure.

    Args:
        tools: Commands that the test needs besides those of the rig.
    """
    missing = _missing(tools)
    if not missing:
        return
    text = f"the rig of hosts needs {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _missing(tools: tuple[str, ...]) -> list[str]:
    if sys.platform != "linux":
        return ["Linux"]
    root = [] if os.geteuid() == 0 else ["root"]
    lacking = [tool for tool in (*_TOOLS, *tools) if shutil.which(tool) is None]
    return root + [f"{tool} (Debian: {_TOOLS.get(tool, tool)})" for tool in lacking]
