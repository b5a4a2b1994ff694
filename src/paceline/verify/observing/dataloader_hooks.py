"""Hooks around torch's DataLoader: which samples a script takes, in which order, drawn how."""

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import cast, final
from weakref import WeakKeyDictionary
from zlib import crc32

from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler

from paceline.data.batch import Batch
from paceline.training.batches.loader import Loader
from paceline.verify.events import Drawn, Drew, PassBegun, PassEnded, Placed
from paceline.verify.observing.observer import SESSION_LOADER, Observer
from paceline.verify.observing.passes import Pass
from paceline.verify.observing.rng_tracking import drawn_from, rng_states
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller
from paceline.verify.tensor_sketch import all_finite, content_hashes, hash_text, identity

_DEPTH = 16
"""Calls that tell two loaders of a library apart, which it makes in one place."""


@final
@dataclass
class _Loop:
    """A pass as the hooks see it."""

    loader: DataLoader[object]
    own: Pass
    waiting: deque[object] = field(default_factory=deque)
    """Indices of batches that were asked for and haven't come yet."""


@final
@dataclass
class LoaderWatch:
    """Tells an observer of every pass over a DataLoader, and cuts long ones off."""

    observer: Observer
    _sites: "WeakKeyDictionary[object, int]" = field(default_factory=WeakKeyDictionary)
    """Where each loader was made."""
    _samplers: "WeakKeyDictionary[object, str]" = field(default_factory=WeakKeyDictionary)
    """The line in which each DistributedSampler was made."""
    _unused: Counter[int] = field(default_factory=Counter)
    """How many loaders a place has made since one of them was used."""
    _places: dict[int, int] = field(default_factory=dict)
    """The place of each loader that isn't its first."""
    _open: "WeakKeyDictionary[object, _Loop]" = field(default_factory=WeakKeyDictionary)
    _early: list[object] = field(default_factory=list)
    """Indices that an iterator has asked for while it was made."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap torch's DataLoader while the block runs."""
        with Patches() as patches:
            patches.hook(DataLoader, "__init__", self._make_loader)
            patches.hook(DistributedSampler, "__init__", self._make_sampler)
            patches.hook(DataLoader, "__iter__", self._iterate)
            patches.hook(_BaseDataLoaderIter, "_next_index", self._next_index)
            patches.before(_BaseDataLoaderIter, "_reset", self._forget_asked)
            patches.hook(_BaseDataLoaderIter, "__next__", self._next)
            patches.hook(Loader, "read", self._read)
            for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
                patches.hook(fetcher, "fetch", self._fetch)
            yield

    def _make_loader(
        self,
        original: Callable[..., object],
        loader: DataLoader[object],
        *arguments: object,
        **named: object,
    ) -> None:
        original(loader, *arguments, **named)
        self._sites[loader] = site = self._number(_site(sys._getframe(2)))
        self.observer.place(f"loader {site}")
        if isinstance(loader.sampler, DistributedSampler) and loader.sampler in self._samplers:
            made = self._samplers[loader.sampler]
            self.observer.record(Placed(f"sampler {site}", made))

    def _number(self, site: int) -> int:
        """Tell loaders apart that one place makes before any of them is used: a library's, say."""
        self._unused[site] += 1
        number = self._unused[site]
        if number == 1:
            return site
        other = crc32(f"{site} {number}".encode())
        self._places[other] = site
        return other

    def _make_sampler(
        self, original: Callable[..., object], sampler: object, *arguments: object, **named: object
    ) -> None:
        original(sampler, *arguments, **named)
        self._samplers[sampler] = caller()

    def _iterate(self, original: Callable[..., object], loader: DataLoader[object]) -> object:
        if self.observer.in_session:
            return original(loader)
        begun = self._begin(loader)
        iterator = original(loader)
        if iterator in self._open:  # persistent workers: the last pass's, which has prefetched
            before = self._open[iterator]
            begun.waiting, before.own.is_over = before.waiting, True
        elif self._early:
            begun.waiting.extend(self._early)
        self._early.clear()
        self._open[iterator], begun.own.iterator = begun, weakref.ref(iterator)
        return iterator

    def _next_index(self, original: Callable[..., object], iterator: object) -> object:
        index = original(iterator)
        found = self._open.get(iterator)
        (self._early if found is None else found.waiting).append(index)
        return index

    def _forget_asked(self, iterator: object, *_: object, **__: object) -> None:
        if iterator in self._open:  # persistent workers: what was asked for won't come any more
            self._open[iterator].waiting.clear()

    def _next(self, original: Callable[..., object], iterator: object) -> object:
        found = self._open.get(iterator)
        if found is None or self.observer.in_session:
            return original(iterator)
        passes, own = self.observer.passes, found.own
        # Enough of this pass has been seen: the script's loop ends as at the end of an epoch.
        is_cut = passes.is_long(own)
        try:
            if is_cut:
                raise StopIteration
            content = original(iterator)
        except StopIteration:
            passes.end(own)
            self.observer.record(PassEnded(own.loader, own.number, is_cut))
            raise
        passes.draw(own)
        self._record_batch(found, content)
        return content

    def _read(
        self, original: Callable[..., object], loader: Loader, epoch: int, *more: object
    ) -> Iterator[Batch]:
        batches = cast(Iterator[Batch], original(loader, epoch, *more))
        writer, steps = self.observer.writer, 0
        for batch in batches:
            yield batch
            # A step has one batch for each shard: the last one ends it.
            steps += batch.last
            if steps == self.observer.trial.steps:
                writer.write(PassEnded(SESSION_LOADER, epoch, True))
                return
        writer.write(PassEnded(SESSION_LOADER, epoch, False))

    def _fetch(self, original: Callable[..., object], fetcher: object, index: object) -> object:
        if self.observer.in_session:
            return original(fetcher, index)
        # Runs in a loader's process: whether the data set has drawn from the global generators.
        before = rng_states()
        content = original(fetcher, index)
        drawn = drawn_from(before, rng_states())
        if drawn:
            worker = get_worker_info()
            by = f"data {worker.id if worker else 0}"
            self.observer.writer.write(Drew(by, drawn, self.observer.steps))
        return content

    def _begin(self, loader: DataLoader[object]) -> _Loop:
        site = self._sites.get(loader, 0)
        own = self.observer.passes.begin(site)
        self._unused[self._places.get(site, site)] = 0
        self.observer.place(f"pass {site}")
        self.observer.record(_describe(loader, site, own.number))
        return _Loop(loader, own)

    def _record_batch(self, found: _Loop, content: object) -> None:
        index = found.waiting.popleft() if found.waiting else None
        indices = index if isinstance(index, list | tuple) else [index]
        known = [i for i in indices if isinstance(i, int)]
        contents = content_hashes(content, len(known))
        samples = tuple(str(_innermost(found.loader.dataset, i)) for i in known)
        samples = samples or tuple(map(identity, contents))
        own, finite = found.own, all_finite(content)
        self.observer.record(Drawn(own.loader, own.number, samples, contents, finite=finite))
        self.observer.after_batch()


def _site(frame: FrameType | None) -> int:
    """Number a place in the script by the lines that lead to it."""
    lines: list[str] = []
    while frame is not None and len(lines) < _DEPTH:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return crc32(" ".join(lines).encode())


def _innermost(dataset: object, index: int) -> int:
    inner: object = dataset
    while isinstance(inner, Subset):
        index = int(inner.indices[index])
        inner = inner.dataset
    return index


def _describe(loader: DataLoader[object], number: int, pass_number: int) -> PassBegun:
    sampler = loader.sampler
    shared = isinstance(sampler, DistributedSampler)
    return PassBegun(
        loader=number,
        number=pass_number,
        sampler=type(sampler).__name__,
        replicas=sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1,
        shuffles=sampler.shuffle
        if isinstance(sampler, DistributedSampler)
        else isinstance(sampler, RandomSampler),
        sampler_drops=shared and bool(getattr(sampler, "drop_last", False)),
        loader_drops=bool(loader.drop_last),
        epoch=sampler.epoch if isinstance(sampler, DistributedSampler) else 0,
        samples=_length(loader.dataset),
        batches=0 if isinstance(loader.dataset, IterableDataset) else _length(loader),
        seed=sampler.seed if isinstance(sampler, DistributedSampler) else 0,
        subset=hash_text(",".join(str(int(i)) for i in loader.dataset.indices))
        if isinstance(loader.dataset, Subset)
        else "",
    )


def _length(dataset: object) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return 0
