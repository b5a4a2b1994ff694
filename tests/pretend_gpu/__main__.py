"""Runs a command where there are pretend devices.

python -m tests.pretend_gpu 2 paceline train digits
"""

import os
import sys

from tests.pretend_gpu.build import build, environment, why_no_pretend_gpu

_LEAST = 3


def main() -> int:
    """Become the command."""
    if len(sys.argv) < _LEAST or not sys.argv[1].isdecimal():
        print("usage: python -m tests.pretend_gpu DEVICES COMMAND ...", file=sys.stderr)
        return 2
    reason = why_no_pretend_gpu()
    if reason is not None:
        print(f"no pretend device: {reason}", file=sys.stderr)
        return 2
    command = sys.argv[2:]
    os.execvpe(command[0], command, environment(build(), devices=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
