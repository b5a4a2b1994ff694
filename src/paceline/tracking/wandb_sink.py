"""Weights & Biases. Its own variables hold as ever: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY .."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import wandb

from paceline.distributed.environment import read_environment
from paceline.errors import ExitCode
from paceline.tracking.base import Ending, Opened, Row, RunInfo, Sink

if TYPE_CHECKING:
    from wandb import Run

_LONGEST_TAG = 64
_EXIT_CODES: Mapping[Ending, ExitCode] = {
    "finished": ExitCode.DONE,
    "stopped": ExitCode.RESUMABLE,
    "failed": ExitCode.JOB,
}


@final
class WandbSink(Sink):
    """A run of W&B; its step is the optimizer step."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._ended = False

    def open(self, run: RunInfo, previous: str | None) -> Opened:
        """Begin or resume the run; without a network this raises after some time."""
        variables = read_environment()
        project = run.project
        if not run.is_project_given:
            project = variables.get("WANDB_PROJECT", project)
        self._run = opened = wandb.init(
            project=project,
            id=previous,
            name=variables.get("WANDB_NAME", run.name),
            notes=run.note or None,
            tags=[tag[:_LONGEST_TAG] for tag in run.tags] or None,
            config=dict(run.config),
            resume="allow" if previous else None,
            dir=variables.get("WANDB_DIR", str(run.path)),
            # The figures are all there is to record: no output of this process, no code of it.
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True
            ),
        )
        if opened.offline:
            # What an offline run has isn't known to the next one of the same id: ours is.
            sync = shlex.join(("wandb", "sync", opened.dir.removesuffix("/files")))
            return Opened(id=opened.id, where=f"offline; later: {sync}")
        newest = opened.step - 1 if previous else None  # its step is the one to come
        return Opened(id=opened.id, where=opened.url or opened.id, last_step=newest)

    def log(self, rows: Sequence[Row]) -> None:
        """Hand rows to W&B's own process, which keeps them on disk until they are sent."""
        assert self._run is not None
        for row in rows:
            # W&B takes no step that is less than the last one, and adds figures to that.
            self._run.log(dict(row.figures), step=max(row.step, self._run.step))

    def finish(self, ending: Ending, summary: Mapping[str, float]) -> None:
        """Wait until everything is sent."""
        assert self._run is not None
        self._run.summary.update(dict(summary))
        self._ended = True
        self._run.finish(exit_code=int(_EXIT_CODES[ending]))

    def close(self) -> None:
        """End W&B's process where an error has come before `finish`."""
        if self._run is not None and not self._ended:
            wandb.teardown(exit_code=int(ExitCode.INFRASTRUCTURE))
