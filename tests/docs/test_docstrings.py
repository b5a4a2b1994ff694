"""Docstrings are what documentation tools can read: a summary, then sections that they parse."""

import logging
import re
from collections.abc import Iterator

import griffe
import pytest

from tests.docs.pages import ROOT

_HEADING = re.compile(r"^\s*(Args|Returns|Raises|Yields|Attributes|Examples?):\s*$", re.MULTILINE)


def documented(owner: griffe.Module | griffe.Class) -> Iterator[griffe.Function | griffe.Class]:
    for member in owner.members.values():
        if isinstance(member, griffe.Function | griffe.Class) and member.docstring:
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from documented(member)


def faults(member: griffe.Function | griffe.Class) -> Iterator[str]:
    assert member.docstring is not None
    first, *others = member.docstring.parse("google")
    if first.kind != "text" or _HEADING.match(first.value.partition("\n")[0]):
        yield f"{member.path} begins without a summary"
    for section in (first, *others):
        if section.kind == "text" and _HEADING.search(section.value):
            yield f"{member.path} has a section that isn't parsed"
        if section.kind == "parameters":
            names = {parameter.name.lstrip("*") for parameter in section.value}
            known = {parameter.name for parameter in member.parameters}
            if unknown := names - known:
                yield f"{member.path} describes {unknown}, which it doesn't take"


def test_every_docstring_is_parsed(caplog: pytest.LogCaptureFixture) -> None:
    package = griffe.load("paceline", search_paths=[ROOT / "src"], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    with caplog.at_level(logging.WARNING, "griffe"):
        found = [fault for member in documented(package) for fault in faults(member)]
    assert found == []
    assert caplog.messages == []
