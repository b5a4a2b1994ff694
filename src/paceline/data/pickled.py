"""Reads arrays out of pickle files without unpickling them: nothing in a file is ever called.

CIFAR's "python version" comes as pickles of Python 2. The instructions in a file are listed with
the standard library's `pickletools` (which executes none) and carried out on plain values here;
the three names that stand in such files are understood as data, any other is an error.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

_MARK: Final = object()
_ARRAY = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_ARRAY_TYPE = "numpy ndarray"
_DTYPE = "numpy dtype"
_ENCODE = "_codecs encode"
_NAMES = frozenset({*_ARRAY, _ARRAY_TYPE, _DTYPE, _ENCODE})


@dataclass(frozen=True)
class _Name:
    """Name of a global in a pickle file; it is never imported."""

    text: str


@dataclass
class _Array:
    """A NumPy array that is being read."""

    values: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class _ByteType:
    """NumPy's uint8, the only type that is understood."""


def read_pickled(path: Path, advice: str = "") -> Mapping[str, object]:
    """Read a pickled dictionary of plain values and arrays of unsigned bytes.

    Args:
        advice: Where to get a good copy; added to every error message.

    Returns:
        The dictionary; arrays are uint8 and read-only, text of Python 2 is read as Latin-1.

    Raises:
        DataError: The file is missing, damaged, or holds anything else than such values.
    """
    try:
        content = _Machine().run(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
        return {_text(key): _finished(value) for key, value in content.items()}
    except FileNotFoundError:
        reason = "the file is missing"
    except OSError as error:
        reason = f"the file can't be read: {error.strerror}"
    except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
        reason = f"this is no data file of the expected kind: {error}"
    raise DataError(" ".join(f"{path}: {reason}. {advice}".split()))


def _shown(value: object) -> str:
    """Show a value in a message; what it holds may be without end."""
    plain = isinstance(value, str | bytes | int)
    return f"{value!r:.20}" if plain else type(value).__name__


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if not isinstance(key, str):
        raise ValueError(f"a key is {_shown(key)}, not a text")
    return key


def _finished(value: object) -> object:
    if not isinstance(value, _Array):
        return value
    if value.values is None:
        raise ValueError("it holds an array without content")
    return value.values


class _Machine:
    """An interpreter of pickle instructions that knows only plain values."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self, content: bytes) -> object:
        """Carry all instructions out; gives the value that is left at the end."""
        for opcode, argument, position in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._stack.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise ValueError(
                    f"the instruction {opcode.name} at byte {position} has no place in it"
                )
            action(self, argument)
        raise ValueError("it ends too early")

    def push(self, value: object) -> None:
        """Put a value on top."""
        self._stack.append(value)

    def since_mark(self) -> list[object]:
        """Take off what was pushed since the last mark."""
        marks = (i for i in reversed(range(len(self._stack))) if self._stack[i] is _MARK)
        start = next(marks, None)
        if start is None:
            raise ValueError("an instruction lacks its mark")
        popped = self._stack[start + 1 :]
        del self._stack[start:]
        return popped

    def take(self, count: int) -> tuple[object, ...]:
        """Take the last `count` values off."""
        if len(self._stack) < count:
            raise ValueError("an instruction lacks its values")
        popped = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return popped

    def extend(self, values: list[object]) -> None:
        """Add to the list on top."""
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError("values are added to something that is no list")
        target.extend(values)

    def fill(self, flat: list[object]) -> None:
        """Add keys and values to the dictionary on top."""
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise ValueError("keys are added to something that is no dictionary")
        target.update(zip(flat[::2], flat[1::2], strict=True))

    def memoize(self, key: object) -> None:
        """Remember the value on top, under the next number where none is given."""
        number = key if isinstance(key, int) else len(self._memo)
        self._memo[number] = self._stack[-1]

    def recall(self, key: object) -> None:
        """Put what was remembered under a number on top."""
        self.push(self._memo[int(str(key))])

    def name(self, text: object) -> None:
        """Put a name on top, where it is one of those that arrays need; nothing is imported."""
        if text is None:  # module and name lie on the stack
            text = " ".join(map(str, self.take(2)))
        if text not in _NAMES:
            raise ValueError(f"it asks for {str(text).replace(' ', '.')}")
        self.push(_Name(str(text)))

    def call(self, argument: object) -> None:
        """Understand a call: an empty array, a type, or bytes written as text."""
        called, given = self.take(2)
        if not isinstance(called, _Name) or not isinstance(given, tuple):
            raise ValueError("it calls something that is no name")
        if called.text in _ARRAY:
            self.push(_Array())
        elif called.text == _DTYPE and given[0] in ("u1", b"u1", "uint8"):
            self.push(_ByteType())
        elif called.text == _ENCODE and given[1] == "latin1" and isinstance(given[0], str):
            self.push(given[0].encode("latin-1"))
        else:
            values = ", ".join(map(_shown, given[:4]))
            raise ValueError(f"it calls {called.text.replace(' ', '.')} with ({values})")

    def build(self, argument: object) -> None:
        """Give the array on top its content; a type's details add nothing."""
        target, state = self.take(2)
        if isinstance(target, _Array):
            target.values = _array_of(state)
        elif not isinstance(target, _ByteType):
            raise ValueError("it sets up something that is no array")
        self.push(target)


def _array_of(state: object) -> NDArray[np.uint8]:
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("an array's content is not understood")
    # What NumPy's ndarray.__reduce__ saves: version, shape, dtype, whether in Fortran order, bytes.
    _, shape, kind, by_columns, content = state
    if not isinstance(kind, _ByteType) or not isinstance(shape, tuple):
        raise ValueError("an array is not one of unsigned bytes")
    # Python 2 wrote bytes as text.
    raw = content.encode("latin-1") if isinstance(content, str) else content
    if not isinstance(raw, bytes):
        raise ValueError("an array's content is not bytes")
    sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0)
    flat = np.frombuffer(raw, dtype=np.uint8)
    if len(sizes) != len(shape):
        raise ValueError(f"an array has the shape {shape}")
    return flat.reshape(sizes, order="F" if by_columns else "C")


_Action = Callable[[_Machine, object], None]


def _pushing(make: Callable[[_Machine], object]) -> _Action:
    return lambda machine, argument: machine.push(make(machine))


def _push_argument(machine: _Machine, argument: object) -> None:
    machine.push(argument)


def _nothing(machine: _Machine, argument: object) -> None:
    """Protocol numbers and frames say nothing about the values."""


def _dictionary(machine: _Machine) -> dict[object, object]:
    flat = machine.since_mark()
    return dict(zip(flat[::2], flat[1::2], strict=True))


_PLAIN = (
    "INT BININT BININT1 BININT2 LONG LONG1 STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
).split()
_ACTIONS: Mapping[str, _Action] = {
    **dict.fromkeys(_PLAIN, _push_argument),
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.name),
    "MARK": _pushing(lambda machine: _MARK),
    "NONE": _pushing(lambda machine: None),
    "NEWTRUE": _pushing(lambda machine: True),
    "NEWFALSE": _pushing(lambda machine: False),
    "EMPTY_LIST": _pushing(lambda machine: []),
    "EMPTY_DICT": _pushing(lambda machine: {}),
    "EMPTY_TUPLE": _pushing(lambda machine: ()),
    "LIST": _pushing(lambda machine: machine.since_mark()),
    "DICT": _pushing(_dictionary),
    "TUPLE": _pushing(lambda machine: tuple(machine.since_mark())),
    "TUPLE1": _pushing(lambda machine: machine.take(1)),
    "TUPLE2": _pushing(lambda machine: machine.take(2)),
    "TUPLE3": _pushing(lambda machine: machine.take(3)),
    "APPEND": lambda machine, argument: machine.extend(list(machine.take(1))),
    "APPENDS": lambda machine, argument: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, argument: machine.fill(list(machine.take(2))),
    "SETITEMS": lambda machine, argument: machine.fill(machine.since_mark()),
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
