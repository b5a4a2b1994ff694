"""Tunes the size of chunks that gradients are sent in: tries several, keeps the fastest.

Small pieces keep a slow link busy, since one piece's second stage hides behind the next one's
first; each costs processors some time, which counts where links are fast. What is best shows only
in running. The sum has the same bits however it is cut.
"""

import statistics
from time import perf_counter
from typing import NamedTuple, final

from torch import Tensor


class Cut(NamedTuple):
    """How a bucket is cut: into pieces for stage 2, and these into parts for stage 1."""

    pieces: int
    """Into how many a full bucket is cut; each goes through the second stage by itself."""
    parts: int
    """Into how many each piece is cut for the first stage. There everyone sends to everyone, which
    small messages make more even; in the ring of the second stage they would only wait."""


CUTS = (Cut(1, 1), Cut(3, 2), Cut(6, 2))
"""Chosen over Gloo with 11 MB of gradients on 2, 4 and 8 workers (`benchmarks/ordered.py`)."""
_ORDER = (*(0,) * 5, *(1,) * 4, *(2,) * 7, *(1,) * 3, *(0,) * 3)
"""Several steps in a row each, as it will be; the first time of each isn't counted: there its views
are made."""

_GAIN = 0.03
"""What a finer cut must save. Less may be chance, and small pieces take processor time."""


@final
class ChunkTuner:
    """Finds the fastest cut; the same one on every worker, since all add up what all measured."""

    def __init__(self) -> None:
        self.cut = CUTS[_ORDER[0]]
        """For the buffers of the present step."""
        self.is_settled = False
        """Whether it is the fastest one."""
        self._tried = 0
        self._times: list[list[float]] = [[] for _ in CUTS]
        self._since: float | None = None

    def begin(self) -> None:
        """Note that buffers leave: the step's first ones, or more of them."""
        if self._since is None:
            self._since = perf_counter()

    def report(self) -> list[int]:
        """Say how long each cut took here, in microseconds; zeros before all have been tried."""
        if self._tried < len(_ORDER):
            return [0] * len(CUTS)
        # Medians: a single slow step says nothing about the cut.
        return [round(1e6 * statistics.median(times[1:])) for times in self._times]

    def end(self, received: Tensor) -> bool:
        """Heed that a step's sums are complete.

        Args:
            received: (workers, cuts) int64: what each of them told in this step.

        Returns:
            Whether the fastest cut has been found just now.
        """
        if self.is_settled:
            return False
        # All workers have reported: the same totals lead all of them to the same choice.
        if self._tried == len(_ORDER):
            totals = received.sum(0).tolist()
            enough = min(totals) * (1 + _GAIN)
            self.cut = next(cut for cut, total in zip(CUTS, totals, strict=True) if total <= enough)
            self.is_settled = True
        elif self._since is not None:
            # Note the time of the cut that was just used, and turn to the next one.
            self._times[_ORDER[self._tried]].append(perf_counter() - self._since)
            self._tried += 1
            self.cut = CUTS[_ORDER[self._tried % len(_ORDER)]]
        self._since = None
        return self.is_settled
