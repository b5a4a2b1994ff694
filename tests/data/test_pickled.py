import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from paceline.data.pickled import read_pickled
from paceline.errors import DataError
from tests.support.cifar_files import Value, python2_pickle

CONTENT: dict[str, Value] = {
    "labels": [0, 255, 256, 70000],
    "names": ["a", "b\xff"],
    "data": np.arange(24, dtype=np.uint8).reshape(2, 12),
}


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


def assert_equal(found: object, wanted: Mapping[str, object]) -> None:
    assert isinstance(found, dict)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_equal(found[key], value)


def test_reads_what_python_2_wrote(tmp_path: Path) -> None:
    path = written(tmp_path, python2_pickle(CONTENT))
    assert_equal(pickle.loads(path.read_bytes(), encoding="latin1"), CONTENT)  # the real thing
    assert_equal(read_pickled(path), CONTENT)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reads_what_python_3_writes(tmp_path: Path, protocol: int) -> None:
    content: dict[str, object] = {
        **CONTENT,
        "nothing": None,
        "yes": True,
        "pair": (1, 2),
        "more": {"x": [b"y"]},
    }
    if protocol == 5:
        del content["data"]  # written by a reference to a function of NumPy's own
    found = read_pickled(written(tmp_path, pickle.dumps(content, protocol)))
    assert_equal(found, content)


def test_a_transposed_array(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(4, 6).T
    found = read_pickled(written(tmp_path, pickle.dumps({"data": values}, 2)))
    np.testing.assert_array_equal(found["data"], values)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_file_is_called(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    path = written(tmp_path, pickle.dumps({"data": Hostile(canary)}, protocol))
    with pytest.raises(DataError, match=r"batch: this is no data file .* it asks for .* Get it"):
        read_pickled(path, "Get it elsewhere")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"\x80\x02}q\x01(U\x04data", "exhausted|not enough|ends"),
        (b"no pickle at all", "this is no data file"),
        (pickle.dumps([1, 2], 2), "it holds a list, not a dictionary"),
        (pickle.dumps({1: 2}, 2), "a key is 1, not a text"),
        (pickle.dumps({"x": 1.5}, 2), "the instruction BINFLOAT at byte"),
        (pickle.dumps({"x": np.zeros(3)}, 2), r"it calls numpy.dtype with \('f8'"),
        (b"\x80\x02}(U\x04datau.", "shorter|longer|zip"),
        (b"\x80\x02K\x01K\x02a.", "no list"),
        (b"\x80\x02h\x05.", "no data file"),
        (b"\x80\x02R.", "lacks its values"),
        (b"\x80\x02u.", "no data file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"batch: .*({message})"):
        read_pickled(written(tmp_path, content))


def test_every_truncation_is_found(tmp_path: Path) -> None:
    content = python2_pickle(CONTENT)
    for length in range(len(content)):
        with pytest.raises(DataError):
            read_pickled(written(tmp_path, content[:length]))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: the file is missing\. Get it"):
        read_pickled(tmp_path / "nowhere", "Get it")
