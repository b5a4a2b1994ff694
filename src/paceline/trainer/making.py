"""Begins local steps in a training, at its start or later."""

from paceline.errors import UsageError
from paceline.sync.locallayout import has_gaps
from paceline.sync.localplan import LocalTerms
from paceline.trainer.engine import Engine
from paceline.trainer.localsync import LocalSync
from paceline.trainer.methods import may_be_local


def make_local(engine: Engine, terms: LocalTerms) -> LocalSync | None:
    """Have the workers train on their own; None where a single one has nothing to average.

    Collective.

    Raises:
        UsageError: The backend can't carry what is asked for, or somebody compares the workers'
            steps.
    """
    if engine.watcher is not None:
        raise UsageError(
            "with --sync local or diloco each worker has weights of its own for some steps, so "
            "that there is nothing to verify: leave --sync out to verify all the rest"
        )
    engine.stepper.counts_batches = True
    if engine.group.world_size == 1 and terms.is_plain:
        return None
    made = LocalSync(engine, terms)
    engine.profiler.averaging_s = lambda: made.waited_s
    engine.profiler.averaging_bytes = lambda: made.sent_bytes
    return made


def can_be_local(engine: Engine) -> bool:
    """Tell whether `make_local` would do, for one who may choose it. Local to the worker."""
    parameters = engine.parts.named_parameters().values()
    return (
        may_be_local(engine.config)
        and engine.watcher is None
        and not engine.stepper.has_stepped_alone
        and not any(has_gaps(parameter) for parameter in parameters)
    )
