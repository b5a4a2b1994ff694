"""Draws the README's figure by Paceline's own commands: python docs/generate_figure.py.

A training is stopped within an epoch on 2 workers and resumed on 3; `paceline resume` writes the
report, whose first picture is taken.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.errors import ExitCode

PICTURE = Path(__file__).parent / "images" / "resumed.svg"
_PACELINE = (sys.executable, "-m", "paceline")
_TRAIN = "train digits --shards 8 --epochs 8 --target-accuracy none"
_ROWS_BEFORE_STOP = 3
_STYLE = """<style>
  svg { --paper: #fff; --line: #d8dcdb; --muted: #5b646d; --accent: #0b5cad; --train: #b4580c; }
  @media (prefers-color-scheme: dark) { svg {
    --paper: #0d1117; --line: #3a4148; --muted: #9ba5ae; --accent: #74b4ff; --train: #f0a35e; } }
  text { font: 11px system-ui, sans-serif; }
</style>"""


def main() -> None:
    """Train twice, with a stop and without: the same weights, and the figure of the first."""
    with TemporaryDirectory() as directory:
        stopped, whole = Path(directory, "stopped"), Path(directory, "whole")
        _stop_within_an_epoch(stopped)
        _run("resume", str(stopped), "--workers", "3")
        _run(*_TRAIN.split(), "--workers", "1", "--run-dir", str(whole))
        hashes = {_weights(stopped), _weights(whole)}
        if len(hashes) > 1:
            raise RuntimeError(f"a stopped and a whole training ended with other weights: {hashes}")
        (picture, *_) = re.findall(r"<svg.*?</svg>", (stopped / "report.html").read_text(), re.S)
        PICTURE.write_text(_standing_alone(picture))
        print(f"{PICTURE}: the weights of both are {hashes.pop()}")


def _stop_within_an_epoch(run_dir: Path) -> None:
    words = [*_PACELINE, *_TRAIN.split(), "--workers", "2", "--run-dir", str(run_dir)]
    training = subprocess.Popen(words)
    metrics = run_dir / "metrics.csv"
    while training.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > _ROWS_BEFORE_STOP:
            break
        time.sleep(0.01)
    training.send_signal(signal.SIGINT)
    code = training.wait()
    if code != ExitCode.RESUMABLE:
        raise RuntimeError(f"the training ended with {code} before it could be stopped")


def _run(*words: str) -> None:
    subprocess.run([*_PACELINE, *words], check=True)


def _weights(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


def _standing_alone(picture: str) -> str:
    """Give a page's SVG what the page gave it: a name space, colours, a font."""
    head, _, rest = picture.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n{_STYLE}\n{rest}\n'


if __name__ == "__main__":
    main()
