"""Quotes commands for a shell."""

import shlex
from pathlib import Path


def command_line(*words: str | Path) -> str:
    """Write a `paceline` command, with quotes around what a shell would take apart."""
    return shlex.join(["paceline", *map(str, words)])
