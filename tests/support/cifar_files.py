"""Small files in CIFAR's real format (pickles as Python 2 wrote them), of digits in colour."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.digits import load_digits

CIFAR_10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_TINTS = np.array([[1.0, 0.6, 0.3], [0.3, 1.0, 0.6], [0.6, 0.3, 1.0]])

Value = str | int | Sequence[str] | Sequence[int] | NDArray[np.uint8]


def write_cifar10(root: Path, train: int = 50, test: int = 20, classes: int = 10) -> Path:
    """Write `cifar-10-batches-py` below a directory; returns that folder.

    Args:
        root: Made if need be.
        train: Training images, at most 1,442; spread over the five files.
        test: Test images, at most 355.
        classes: How many of the ten classes have images, which makes them fewer.
    """
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = coloured_digits(train, 0, side=32, classes=classes)
    for number, part in enumerate(np.array_split(np.arange(train), 5), start=1):
        content: dict[str, Value] = {
            "batch_label": f"training batch {number} of 5",
            "labels": labels[part].tolist(),
            "data": images[part].reshape(len(part), -1),
            "filenames": [f"digit_s_{index:06}.png" for index in part],
        }
        (folder / f"data_batch_{number}").write_bytes(python2_pickle(content))
    images, labels = coloured_digits(test, 1, side=32, classes=classes)
    content = {"labels": labels.tolist(), "data": images.reshape(test, -1)}
    (folder / "test_batch").write_bytes(python2_pickle(content))
    names: dict[str, Value] = {
        "num_cases_per_batch": 10000,
        "label_names": CIFAR_10_NAMES,
        "num_vis": 3072,
    }
    (folder / "batches.meta").write_bytes(python2_pickle(names))
    return folder


def coloured_digits(
    count: int, part: int, side: int, classes: int = 10
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blow the first digits up and give them one of three tints.

    Args:
        count: How many.
        part: 0 for the training digits, 1 for the test digits.
        side: A multiple of 8.
        classes: Takes the digits below this alone.

    Returns:
        Images, uint8 (count, 3, side, side), and labels, uint8 (count,).
    """
    data = load_digits()[part]
    chosen = (data.labels < classes).nonzero()[:count, 0]
    if count > len(chosen):
        raise ValueError(f"the digits have only {len(chosen)} images of this kind")
    grey = data.images[chosen, 0].numpy() * np.uint8(255 // 16)
    large = grey.repeat(side // 8, axis=1).repeat(side // 8, axis=2)
    tints = _TINTS[np.arange(count) % 3][:, :, None, None]
    return (large[:, None] * tints).astype(np.uint8), data.labels[chosen].numpy().astype(np.uint8)


def python2_pickle(content: Mapping[str, Value]) -> bytes:
    """Write a dictionary as Python 2's `cPickle.dump(..., protocol=2)` writes it."""
    items = b"".join(_string(key) + _value(value) for key, value in content.items())
    return b"\x80\x02}q\x01(" + items + b"u."


def _value(value: Value) -> bytes:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return _integer(value)
    items = b"".join(_value(item) for item in value)
    return b"](" + items + b"e"


def _string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode("latin-1")


def _integer(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)


def _array(values: NDArray[np.uint8]) -> bytes:
    minus_one = b"J\xff\xff\xff\xff"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    kind += b"(K\x03U\x01|NNN" + 2 * minus_one + b"K\x00tb"
    shape = b"".join(map(_integer, values.shape))
    raw = np.ascontiguousarray(values).tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    text = b"T" + struct.pack("<i", len(raw)) + raw
    return empty + b"(K\x01(" + shape + b"t" + kind + b"\x89" + text + b"tb"
