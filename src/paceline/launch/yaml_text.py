"""Writes plain values as YAML that people like to read; any YAML reader reads the same back."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

Plain = str | int | float | bool | None | Mapping[str, "Plain"] | Sequence["Plain"]
"""What a manifest consists of."""

_SAFE = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.()+=-]*( [A-Za-z0-9/_.()+=-]+)*")
"""Texts that YAML 1.1 and 1.2 both take for themselves, but for those below."""
_WORDS_WITH_A_MEANING = frozenset("y n yes no on off true false null".split())
_PRINTED = re.compile(r"[\n\x20-\x7e]*")


def to_yaml(*documents: Plain) -> str:
    """Write documents, with `---` between them."""
    return "---\n".join("\n".join(_lines(document, "")) + "\n" for document in documents)


def _lines(value: Plain, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", inner, indent)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            yield from _item(inner, indent)
    else:
        yield indent + _scalar(value)


def _entry(head: str, value: Plain, indent: str) -> Iterator[str]:
    if _is_block(value):
        yield f"{head} |"
        yield from (f"{indent}  {line}" if line else "" for line in str(value)[:-1].split("\n"))
    elif _is_leaf(value):
        yield f"{head} {_scalar(value)}"
    else:
        yield head
        yield from _lines(value, indent if _is_list(value) else f"{indent}  ")


def _item(value: Plain, indent: str) -> Iterator[str]:
    first, *rest = _lines(value, f"{indent}  ")
    yield f"{indent}- {first.removeprefix(indent + '  ')}"
    yield from rest


def _scalar(value: Plain) -> str:
    if isinstance(value, str):
        is_plain = _SAFE.fullmatch(value) and value.lower() not in _WORDS_WITH_A_MEANING
        return value if is_plain else _quoted(value)
    text = json.dumps(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 takes 1e+16 for a text
    return text


def _quoted(text: str) -> str:
    """Write a text as JSON does, but for signs that JSON writes as a pair and YAML as one."""
    signs = (f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(signs)}"'


def _is_leaf(value: Plain) -> bool:
    return isinstance(value, str) or not isinstance(value, Mapping | Sequence) or not value


def _is_list(value: Plain) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_block(value: Plain) -> bool:
    """Tell whether a text is written line by line: a script, not a line of its own."""
    if not isinstance(value, str) or not value.endswith("\n") or not _PRINTED.fullmatch(value):
        return False
    lines = value[:-1].split("\n")
    ends_well = bool(lines[-1]) and all(line == line.rstrip() for line in lines)
    return ends_well and bool(lines[0]) and not lines[0].startswith(" ")
