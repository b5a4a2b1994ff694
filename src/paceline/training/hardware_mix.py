"""Whether all of a training's steps were computed with the same hardware and settings."""

import json
from collections.abc import Mapping, Sequence

from paceline.results.run_directory import RunDirectory
from paceline.training.engine import Engine
from paceline.training.numerics import describe


def numerics_of_all(engine: Engine) -> list[object]:
    """List what bits depend on, once for each kind of worker. Collective.

    Returns:
        Mostly a single entry; more where `--allow-different-hardware` lets workers differ.
    """
    context = engine.context
    most = context.config.data.max_batch_per_worker
    own = describe(context.group.device) | {"max_batch_per_worker": most or "none"}
    texts = context.group.gather_texts(json.dumps(own, sort_keys=True))
    return [json.loads(text) for text in dict.fromkeys(texts)]


def is_mixed(history: Sequence[Mapping[str, object]], step: int) -> bool:
    """Tell whether steps that count were computed with different numerics. Pure.

    A start whose steps were all lost, because a later one began no further on, doesn't count.

    Args:
        history: The starts, as `run.json` has them.
        step: Where the training stands now.
    """
    kinds, end = set(), step
    for start in reversed(history):
        begin = start.get("from_step")
        if not isinstance(begin, int) or begin >= end:
            continue
        end = begin
        numerics = start.get("numerics")
        for kind in numerics if isinstance(numerics, list) else []:
            kinds.add(json.dumps(kind, sort_keys=True))
    return len(kinds) > 1


def has_mixed(run: RunDirectory, step: int) -> bool:
    """Read from `run.json` whether a training is mixed; see `is_mixed`."""
    history = run.read_run().get("history")
    return is_mixed(history, step) if isinstance(history, list) else False
