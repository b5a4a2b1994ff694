"""Protocols of map-style data sets, required and optional. Read this first to add a format."""

from typing import Protocol, runtime_checkable


class MapDataset(Protocol):
    """A map-style data set; its items are (input, target) pairs."""

    def __getitem__(self, index: int, /) -> object:
        """Read and transform one sample."""

    def __len__(self) -> int:
        """Count the samples."""


@runtime_checkable
class Labelled(Protocol):
    """A data set that knows its classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by class number."""
