"""One line that tells two data sets apart."""

import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from paceline.data.fingerprint import data_fingerprint, describe_state, picked_samples
from paceline.data.memory import TensorData, synthetic_images


class Squares(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        raise AssertionError("nothing is read")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("nothing is read")


def images(samples: int, seed: int = 0) -> TensorData:
    return synthetic_images(samples, 1, 4, 4, classes=3, seed=seed)


def changed(data: TensorData, image: int | None, label: int | None) -> TensorData:
    pixels, labels = data.images.clone(), data.labels.clone()
    if image is not None:
        pixels[image] = 255 - pixels[image]
    if label is not None:
        labels[label] = (labels[label] + 1) % 3
    return TensorData(
        name=data.name,
        images=pixels,
        labels=labels,
        class_names=data.class_names,
        mean=data.mean,
        std=data.std,
    )


@pytest.mark.parametrize("samples", [1, 63, 64, 65, 500])
def test_images_in_memory(samples: int) -> None:
    data = images(samples)
    own = data_fingerprint(data)
    assert own == data_fingerprint(images(samples))
    assert f"of {samples} samples" in own
    last = samples - 1
    others = [changed(data, 0, None), changed(data, last, None), changed(data, None, samples // 2)]
    assert own not in [data_fingerprint(other) for other in (*others, images(samples + 1))]


def test_whole_numbers_of_a_tensor_data_set_count_but_no_floats() -> None:
    floats, labels = torch.randn(9, 2), torch.arange(9)
    own = data_fingerprint(TensorDataset(floats, labels))
    assert own == data_fingerprint(TensorDataset(floats + 1e-7, labels))
    assert own != data_fingerprint(TensorDataset(floats, labels.flip(0)))
    assert own != data_fingerprint(TensorDataset(floats[:, :1], labels))
    assert own != data_fingerprint(TensorDataset(floats.double(), labels))


def test_others_by_type_and_size_alone() -> None:
    assert data_fingerprint(Squares(1234)) == "Squares of 1,234 samples"
    assert data_fingerprint(Stream()) == "Stream"


class Wrapped(Squares):
    def __init__(self, inner: Dataset[int]) -> None:
        super().__init__(3)
        self.inner, self.transform = inner, None


def test_which_samples_subsets_pick() -> None:
    data = Squares(100)
    own = picked_samples(Subset(data, [1, 5, 7]))
    assert own.startswith("3 samples, ")
    assert own == picked_samples(Subset(Squares(50), torch.tensor([1, 5, 7])))  # type: ignore[arg-type]
    assert own == picked_samples(Subset(data, np.array([1, 5, 7], dtype=np.int32)))  # type: ignore[arg-type]
    assert own == picked_samples(ConcatDataset([data, Subset(data, [1, 5, 7])]))
    assert own == picked_samples(Wrapped(Subset(data, [1, 5, 7])))
    nested = [Subset(Subset(data, outer), [0, 1]) for outer in ([1, 5, 7], [1, 6, 7])]
    others = [Subset(data, order) for order in ([1, 7, 5], [1, 5, 8], range(3), ["a", "b", "c"])]  # type: ignore[arg-type]
    assert len({own, *map(picked_samples, [*nested, *others])}) == 7
    assert picked_samples(data) == picked_samples(Wrapped(data)) == picked_samples(3) == ""


class Joined:
    def __init__(self, text: str) -> None:
        self.text = text

    def join(self) -> str:
        return self.text


held_by = cache(Joined)


class Lazy(Mapping[str, int]):
    """A file's groups, say: whose length isn't known once it is closed."""

    def __len__(self) -> int:
        raise ValueError("closed")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("nothing is read")

    def __getitem__(self, key: str) -> int:
        raise AssertionError("nothing is read")


def curriculum() -> SimpleNamespace:
    """Stand for a data set with what one may have in its attributes."""
    held = SimpleNamespace(
        level=0.5,
        names=[str(number) for number in range(5000)],
        weights=torch.ones(3),
        order=np.arange(10),
        shared=multiprocessing.Value("i", 0),
        transform=SimpleNamespace(steps=[SimpleNamespace(p=0.1)]),
        collate=partial(max, default=1),
        resize=np.sqrt,
        decode=held_by("a").join,
        open=lambda: None,
        boxes=[[0] * 500 for _ in range(3000)],  # more than is looked at
    )
    held.itself = held
    return held


@pytest.mark.parametrize(
    "change",
    [
        lambda held: setattr(held, "level", 0.6),
        lambda held: held.names.pop(),
        lambda held: held.weights.mul_(2),
        lambda held: setattr(held, "weights", torch.ones(3)),
        lambda held: held.order.__setitem__(3, 0),
        lambda held: setattr(held.shared, "value", 1),
        lambda held: setattr(held.transform.steps[0], "p", 0.2),
        lambda held: held.transform.steps.append(SimpleNamespace(p=0.1)),
        lambda held: setattr(held, "further", None),
        lambda held: setattr(held, "collate", partial(max, default=2)),
        lambda held: setattr(held, "decode", held_by("b").join),
        lambda held: setattr(held, "open", lambda: 1),
    ],
)
def test_a_change_of_an_attribute_shows(change: Callable[[SimpleNamespace], object]) -> None:
    held = curriculum()
    data = SimpleNamespace(dataset=held)
    before = describe_state(data)
    assert describe_state(data) == before
    change(held)
    assert describe_state(data) != before


def test_what_is_everybodys_or_a_file_isnt_looked_into() -> None:
    data = SimpleNamespace(file=Lazy(), log=logging.getLogger("data"), module=logging)
    before = describe_state(data)
    logging.getLogger("another").isEnabledFor(logging.INFO)
    assert describe_state(data) == before
