"""Hooks around torch's DataLoader: which samples a script takes, in which order, drawn how.

What is known of a loader, a sampler and a pass is kept as an attribute of theirs.
"""

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any, final
from zlib import crc32

from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler

from paceline.verify.events import Drawn, Drew, PassBegun, PassEnded, Placed
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.rng_tracking import drawn_from, rng_states
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller
from paceline.verify.tensor_sketch import all_finite, content_hashes, hash_text, identity
from paceline.verify.trial import PassCutError

_DEPTH = 16
"""Calls that tell two loaders of a library apart, which it makes in one place."""
_SITE, _MADE_AT, _PASS, _ASKED, _TOLD = (
    f"_paceline_{name}" for name in ("site", "at", "pass", "asked", "told")
)


@final
@dataclass
class LoaderWatch:
    """Reports every pass over a DataLoader to an observer, and cuts long ones off."""

    observer: Observer
    _unused: Counter[int] = field(default_factory=Counter)
    """How many loaders a place has made since one of them was used."""

    def install(self, patches: Patches) -> None:
        """Hook torch's DataLoader."""
        patches.after(DataLoader, "__init__", self._made)
        patches.hook(DataLoader, "__iter__", self._iterate)
        patches.hook(_BaseDataLoaderIter, "__next__", self._next)
        patches.after(
            DistributedSampler,
            "__init__",
            lambda _, sampler, *__, **___: setattr(sampler, _MADE_AT, caller()),
        )
        patches.before(
            DistributedSampler,
            "set_epoch",
            lambda sampler, *_, **__: setattr(sampler, _TOLD, True),
        )
        # Persistent readers are reset: what was asked for won't come any more.
        patches.before(_BaseDataLoaderIter, "_reset", lambda it, *_, **__: _asked(it).clear())
        patches.after(
            _BaseDataLoaderIter, "_next_index", lambda index, it: _asked(it).append(index)
        )
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            patches.hook(fetcher, "fetch", self._fetch)

    def _made(self, _: None, loader: DataLoader[object], *__: object, **___: object) -> None:
        # Loaders are told apart that one place makes before any of them is used: a library's, say.
        base = _site_of(sys._getframe(3))
        self._unused[base] += 1
        count = self._unused[base]
        site = base if count == 1 else crc32(f"{base} {count}".encode())
        setattr(loader, _SITE, (site, base))
        self.observer.place(f"loader {site}")
        if made_at := getattr(loader.sampler, _MADE_AT, ""):
            self.observer.record(Placed(f"sampler {site}", made_at))

    def _iterate(self, original: Callable[..., object], loader: DataLoader[object]) -> object:
        iterator = original(loader)
        if self.observer.in_session:
            return iterator
        if before := getattr(iterator, _PASS, None):  # of persistent readers
            before.is_over = True
        site, base = getattr(loader, _SITE, (0, 0))
        self._unused[base] = 0
        own, self.observer.kept = self.observer.passes.begin(site), self.observer.writer.size
        own.iterator = weakref.ref(iterator)
        setattr(iterator, _PASS, own)
        self.observer.place(f"pass {site}")
        self.observer.record(_describe(loader, site, own.number))
        return iterator

    def _next(self, original: Callable[..., object], iterator: Any) -> object:
        own = getattr(iterator, _PASS, None)
        if own is None or self.observer.in_session:
            return original(iterator)
        # Enough of this pass has been seen: the script's loop ends as at the end of an epoch.
        is_cut = self.observer.passes.is_long(own)
        try:
            if is_cut:
                raise PassCutError
            content = original(iterator)
        except StopIteration:
            self.observer.passes.end(own)
            self.observer.record(PassEnded(own.loader, own.number, is_cut))
            raise
        # The batch that was asked for first has come.
        index = _asked(iterator).popleft() if _asked(iterator) else None
        indices = index if isinstance(index, list | tuple) else [index]
        known = [i for i in indices if isinstance(i, int)]
        contents = content_hashes(content, len(known))
        samples = tuple(str(_innermost(iterator._dataset, i)) for i in known)
        samples = samples or tuple(map(identity, contents))
        finite = all_finite(content)
        self.observer.passes.draw(own)
        self.observer.record(Drawn(own.loader, own.number, samples, contents, finite=finite))
        self.observer.batch_came()
        return content

    def _fetch(self, original: Callable[..., object], fetcher: object, index: object) -> object:
        if self.observer.in_session:
            return original(fetcher, index)
        # Runs in a loader's process: whether the data set has drawn from the global generators.
        before = rng_states()
        content = original(fetcher, index)
        if drawn := drawn_from(before, rng_states()):
            worker = get_worker_info()
            self.observer.record(Drew(f"data {worker.id if worker else 0}", drawn))
        return content


def _asked(iterator: object) -> deque[object]:
    """Return the indices of batches that were asked for and haven't come yet."""
    asked: deque[object] = vars(iterator).setdefault(_ASKED, deque())
    return asked


def _site_of(frame: FrameType | None) -> int:
    """Number a place in the script by the lines that lead to it."""
    lines: list[str] = []
    while frame is not None and len(lines) < _DEPTH:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return crc32(" ".join(lines).encode())


def _innermost(dataset: object, index: int) -> int:
    while isinstance(dataset, Subset):
        index, dataset = int(dataset.indices[index]), dataset.dataset
    return index


def _describe(loader: DataLoader[object], number: int, pass_number: int) -> PassBegun:
    sampler: Any = loader.sampler
    data = loader.dataset
    if not isinstance(sampler, DistributedSampler):
        shuffle = isinstance(sampler, RandomSampler)
        sampler = SimpleNamespace(num_replicas=1, shuffle=shuffle, drop_last=False, epoch=0, seed=0)
    indices = data.indices if isinstance(data, Subset) else ()
    return PassBegun(
        loader=number,
        number=pass_number,
        sampler=type(loader.sampler).__name__,
        replicas=sampler.num_replicas,
        shuffles=sampler.shuffle,
        sampler_drops=sampler.drop_last,
        loader_drops=loader.drop_last,
        epoch=sampler.epoch,
        samples=_length(data),
        batches=0 if isinstance(data, IterableDataset) else _length(loader),
        seed=sampler.seed,
        has_epoch=getattr(sampler, _TOLD, False),
        persists=loader.persistent_workers and loader.num_workers > 0,
        settings=repr(
            {n: v for n, v in sorted(getattr(data, "__dict__", {}).items()) if isinstance(v, int)}
        ),
        subset=hash_text(",".join(map(str, map(int, indices)))) if len(indices) else "",
    )


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return 0
