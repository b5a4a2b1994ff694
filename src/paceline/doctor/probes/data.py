"""The data sets of a recipe on this host, each as one line that is compared between hosts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.options.fields import OptionValue


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A recipe whose data is to be looked at."""

    reference: str = ""
    """See `load_recipe`; empty: none."""
    arguments: Mapping[str, OptionValue] = field(default_factory=dict)
    seed: int = 0


def data_facts(asked: DataRequest) -> dict[str, str]:
    """Build a recipe's job, and say what its data sets are: by `training`, `validation`, `test`.

    Raises:
        PacelineError: The recipe isn't there, fails, or its data isn't there.
    """
    from paceline.data.fingerprint import data_fingerprint
    from paceline.training.recipe import load_recipe
    from paceline.training.rng import seed_everything

    seed_everything(asked.seed)
    job = load_recipe(asked.reference)(**asked.arguments)
    sets = {"training": job.train, "validation": job.validation, "test": job.test}
    return {name: data_fingerprint(data) for name, data in sets.items() if data is not None}
