"""Reads fields of untrusted JSON objects, with a check of their types."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from paceline.files import JSON_MAX_BYTES, parse_json, read_plain, why_unreadable

JsonObject = Mapping[str, object]
"""A JSON object as read: values of any JSON type."""


def number(source: JsonObject, name: str) -> float | None:
    """Read a finite number, or None where there is none."""
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(source: JsonObject, name: str) -> int | None:
    """Read a number as an integer, or None where there is none."""
    value = number(source, name)
    return None if value is None else int(value)


def text(source: JsonObject, name: str) -> str:
    """Read a value as text; empty where there is none."""
    value = source.get(name)
    return "" if value is None else str(value)


def texts(source: JsonObject, name: str) -> tuple[str, ...]:
    """Read a list, each item as text; empty where there is none."""
    value = source.get(name)
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def section(source: JsonObject, name: str) -> JsonObject:
    """Read a nested object; empty where there is none."""
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def entries(source: JsonObject, name: str) -> list[JsonObject]:
    """Read a list of objects, leaving out what isn't one."""
    value = source.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_read_back(content: JsonObject) -> JsonObject:
    """Give an object as a file of JSON gives it back: tuples are lists, paths and others texts."""
    plain: JsonObject = json.loads(json.dumps(content, default=str))
    return plain


def read_object(path: Path, problems: list[str], *, expected: bool = False) -> JsonObject:
    """Read a file that should hold a JSON object; empty where it doesn't, or isn't there.

    Args:
        problems: Gets a sentence where the file can't be read.
        expected: Whether its absence is a problem.
    """
    before = len(problems)
    content = read_text(path, problems)
    if not content:
        if expected and len(problems) == before:
            problems.append(f"{path.name} is missing or empty")
        return {}
    try:
        parsed = parse_json(content)
    except ValueError as error:
        problems.append(f"{path.name} isn't valid JSON: {error}")
        return {}
    if not isinstance(parsed, dict):
        problems.append(f"{path.name} should hold a JSON object")
        return {}
    return parsed


def read_text(path: Path, problems: list[str], most_bytes: int = JSON_MAX_BYTES) -> str:
    """Read a text file; empty where it can't be read, or isn't there.

    Args:
        problems: Gets a sentence where the file can't be read.
        most_bytes: A larger file is a problem.
    """
    try:
        return read_plain(path, most_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} can't be read: {why_unreadable(error)}")
        return ""
