"""A sink for Paceline: a file of JSON lines in the run directory."""

import json
from collections.abc import Mapping, Sequence
from typing import TextIO, final

from paceline.tracking.base import Ending, Opened, Row, RunInfo, Sink
from paceline.tracking.registry import SinkEntry

ENTRY = SinkEntry(sink="paceline_jsonl:JsonLinesSink")


@final
class JsonLinesSink(Sink):
    """Appends a line for each row."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def open(self, run: RunInfo, previous: str | None) -> Opened:
        """Open the file, which a resumed run continues."""
        path = run.path / "jsonl" / "run.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a")
        self._write({"name": run.name, "config": dict(run.config)})
        return Opened(id=previous or run.name, where=str(path))

    def log(self, rows: Sequence[Row]) -> None:
        """Append lines; they are on disk once it returns."""
        for row in rows:
            self._write({"step": row.step, **row.figures})

    def finish(self, ending: Ending, summary: Mapping[str, float]) -> None:
        """Append how it ended."""
        self._write({"ending": ending, "summary": dict(summary)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, content: Mapping[str, object]) -> None:
        assert self._file is not None
        print(json.dumps(content), file=self._file, flush=True)
