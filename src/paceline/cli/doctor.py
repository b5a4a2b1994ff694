"""`paceline doctor --here`: what a worker would find in this environment; starts nothing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from paceline.cli.options import parse_options, show_help, wants_help
from paceline.config.fields import OptionField, option_fields
from paceline.dist.environment import surroundings
from paceline.dist.options import DistOptions
from paceline.errors import ExitCode, UsageError
from paceline.trainer.config import TrainConfig

if TYPE_CHECKING:
    from paceline.dist.here import Finding

_COMMAND = "paceline doctor"
_ABOUT = (
    "Show what a worker would find where this command is run: who it is among the workers, where "
    "they meet, its network interface, device and backend. Each line is ok, a warning or a fault "
    "with its remedy. Nothing is started. Exit code 65 where there is a fault."
)
_OPTIONS = (
    OptionField(
        name="here",
        annotation=bool,
        default=False,
        help="Examine this process's environment.",
        group="Doctor",
    ),
    OptionField(
        name="json",
        annotation=bool,
        default=False,
        help="Print JSON: a list of objects with what, state and text.",
        group="Doctor",
    ),
    *option_fields(DistOptions, "Workers"),
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        return show_help(_COMMAND, _ABOUT, _OPTIONS)
    given = parse_options(_COMMAND, _ABOUT, tokens, _OPTIONS)
    if not given.get("here"):
        raise UsageError("say what to examine: paceline doctor --here")
    names = {field.name for field in fields(DistOptions)}
    settings = {name: value for name, value in given.items() if name in names}
    options = TrainConfig.from_settings(settings).dist
    from paceline.dist.here import examine

    findings = examine(surroundings(), options)
    if given.get("json"):
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_lines(findings)))
    faulty = any(finding.state == "fault" for finding in findings)
    return ExitCode.JOB if faulty else ExitCode.DONE


def _lines(findings: Sequence["Finding"]) -> list[str]:
    return [f"{f.state:8}{f.what:11} {f.text}" for f in findings]
