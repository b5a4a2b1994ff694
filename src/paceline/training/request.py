"""What a worker is asked to do, as the JSON that the launcher hands to it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Self

from paceline.options.fields import OptionValue

Kind = Literal["recipe", "script"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """One training; the same for all workers."""

    recipe: str
    """The recipe's name as the user gave it."""
    reference: str
    """Where the recipe is, see `load_recipe`."""
    arguments: Mapping[str, OptionValue]
    """The recipe's own arguments: what was given, and the defaults."""
    settings: Mapping[str, OptionValue]
    """Options of training, the recipe's and the user's; others keep their defaults."""
    given: tuple[str, ...]
    """Names of the options and arguments that the user gave."""
    run_dir: str
    command: tuple[str, ...]
    """The command line, for `run.json`."""
    started_at: str
    """ISO 8601, UTC."""
    kind: Kind = "recipe"
    """Whether `reference` is a recipe, or the path of a script."""
    script_args: tuple[str, ...] = ()
    """The script's own arguments."""
    allowed: tuple[str, ...] = ()
    """Options that may differ from those that the training began with."""

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        content = json.loads(text)
        given = {n: tuple(content[n]) for n in ("given", "command", "script_args", "allowed")}
        arguments = content["arguments"].items()
        own = {n: tuple(v) if isinstance(v, list) else v for n, v in arguments}
        return cls(**content | given | {"arguments": own})
