"""Writes plain values as YAML that people like to read; any YAML reader reads the same back."""

import re

import yaml

from paceline.launch.cluster import Plain

_SAFE = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.()+=-]*( [A-Za-z0-9/_.()+=-]+)*")
_WORDS_WITH_A_MEANING = frozenset("y n yes no on off true false null".split())


def to_yaml(*documents: Plain) -> str:
    """Write documents, with `---` between them."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> object:
    """Write a script line by line, and quote what only some versions of YAML take for a text.

    PyYAML's own rules are those of YAML 1.1: it leaves `1e-3` bare, a number to other readers.
    """
    is_plain = _SAFE.fullmatch(text) and text.lower() not in _WORDS_WITH_A_MEANING
    is_script = text.endswith("\n") and not text.startswith((" ", "\n"))
    style = None if is_plain else "|" if is_script else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
