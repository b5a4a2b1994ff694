"""A program that plays a script: it answers as told, and notes how it was called."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_PROGRAM = """#!{python} -SE
import fcntl, json, sys, time
from pathlib import Path

place = Path({place!r})
words = sys.argv[1:]
script = json.loads((place / "script.json").read_text())
key = next((k for k in script if all(part in " ".join(words) for part in k.split("|"))), None)
told = sys.stdin.read() if "-f" in words else ""
with (place / "calls.jsonl").open("a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    before = sum(json.loads(line)["key"] == key for line in file)
    file.write(json.dumps({{"key": key, "words": words, "stdin": told}}) + "\\n")
if key is None:
    sys.exit(f"nobody said what to answer to: {{words}}")
answers = script[key]
answer = answers[min(before, len(answers) - 1)]
deadline_s = time.monotonic() + 60
print(answer["out"], end="", flush=True)
while answer["until"] and not any(answer["until"] in line for line in open(place / "calls.jsonl")):
    if time.monotonic() > deadline_s:
        sys.exit("waited in vain for: " + answer["until"])
    time.sleep(0.01)
print(answer["then"], end="", flush=True)
print(answer["err"], end="", file=sys.stderr)
sys.exit(answer["code"])
"""


@dataclass(frozen=True)
class Answer:
    """What one call prints, and how it ends."""

    out: str = ""
    err: str = ""
    code: int = 0
    until: str = ""
    """Goes on only after a call in whose note this stands."""
    then: str = ""
    """Printed after that."""


@dataclass(frozen=True)
class Call:
    """How the program was called once."""

    words: Sequence[str]
    stdin: str


class Played:
    """The program in a directory of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        program = directory / name
        program.write_text(_PROGRAM.format(python=sys.executable, place=str(directory)))
        program.chmod(0o755)

    def play(self, script: Mapping[str, Answer | Sequence[Answer]]) -> None:
        """Say what is answered: by words that are in the call (`|` between them), the first match.

        Of several answers each is given once, the last one ever after.
        """
        written = {
            key: [asdict(a) for a in ([answers] if isinstance(answers, Answer) else answers)]
            for key, answers in script.items()
        }
        (self.directory / "script.json").write_text(json.dumps(written))

    def calls(self, *parts: str) -> list[Call]:
        """List the calls so far that have all of these words."""
        path = self.directory / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [
            Call(c["words"], c["stdin"])
            for c in found
            if all(part in " ".join(c["words"]) for part in parts)
        ]
