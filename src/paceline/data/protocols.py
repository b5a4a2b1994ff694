"""Protocols of map-style data sets, required and optional. Read this first to add a format."""

from typing import Protocol, runtime_checkable


class MapDataset(Protocol):
    """A map-style data set; its items are (input, target) pairs."""

    def __getitem__(self, index: int, /) -> object:
        """Read and transform one sample."""

    def __len__(self) -> int:
        """Count the samples."""


@runtime_checkable
class RawImages(Protocol):
    """How a data set's raw images are normalised; its items are (uint8 (C, H, W), label)."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, on the scale 0 … 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, on the scale 0 … 1."""

    @property
    def scale(self) -> float:
        """The raw value that stands for 1."""


@runtime_checkable
class Labelled(Protocol):
    """A data set that knows its classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by class number."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that can tell cheaply whether another one holds the same."""

    def fingerprint(self) -> str:
        """Hash what it holds, or the names and sizes of what it would read."""
