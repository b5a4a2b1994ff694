"""How measurements are summarised and shown: medians, spreads, gates, the machine they are from."""

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured quantity."""

    what: str
    value: float
    """The median, or an exact count."""
    unit: str
    low: float | None = None
    """Lower quartile."""
    high: float | None = None
    """Upper quartile."""
    sure: tuple[float, float] | None = None
    """Bounds of the median with 95% confidence (bootstrap)."""
    count: int = 1
    """Pairs or runs."""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is within its gate; None where it has none."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    def cells(self) -> tuple[str, ...]:
        """Give the cells of its row."""
        spread = "" if self.low is None or self.high is None else f"{self.low:.4g}-{self.high:.4g}"
        sure = "" if self.sure is None else f"{self.sure[0]:.4g}-{self.sure[1]:.4g}"
        gate = "" if self.at_least is None else f">= {self.at_least:g}"
        gate = gate if self.at_most is None else f"<= {self.at_most:g}"
        met = {True: "yes", False: "no", None: ""}[self.met]
        value = f"{self.value:.4g} {self.unit}".rstrip()
        return (self.what, value, spread, sure, str(self.count), gate, met, self.note)


_HEADER = ("measured", "median", "quartiles", "95% bounds", "n", "gate", "met", "note")


@dataclass(kw_only=True)
class Report:
    """What one script measured."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    raw: dict[str, object] = field(default_factory=dict)
    """Every single measurement, for the JSON file."""

    def finish(self, arguments: argparse.Namespace) -> int:
        """Print the figures as a Markdown table, write the JSON, and give the exit code."""
        print("\n" + self.as_markdown())
        if arguments.json:
            Path(arguments.json).write_text(self.as_json())
        missed = [figure.what for figure in self.figures if figure.met is False]
        if missed:
            print(f"\nGates missed: {', '.join(missed)}")
        return 1 if missed and arguments.check else 0

    def as_markdown(self) -> str:
        """Write the machine, the remarks and a table of the figures."""
        lines = "\n".join(f"- {line}" for line in (*machine_lines(), *self.remarks))
        table = markdown(_HEADER, [figure.cells() for figure in self.figures])
        return f"### {self.name}\n\n{lines}\n\n{table}"

    def as_json(self) -> str:
        """Write everything, every single measurement included."""
        content = {
            "name": self.name,
            "command": sys.argv,
            "machine": machine_lines(),
            "remarks": self.remarks,
            "figures": [{**asdict(f), "met": f.met} for f in self.figures],
            "raw": self.raw,
        }
        return json.dumps(content, indent=1) + "\n"


def parser(about: str) -> argparse.ArgumentParser:
    """Make a script's parser, with the options that all of them have."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--quick", action="store_true", help="a small version, under 40 seconds")
    made.add_argument("--json", metavar="FILE", help="also write everything measured as JSON")
    made.add_argument("--check", action="store_true", help="exit 1 if a gate is missed")
    return made


def median_figure(
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Figure:
    """Summarise measurements by their median, quartiles and the bounds of the median."""
    low, high = quartiles(values)
    return Figure(
        what=what,
        value=statistics.median(values),
        unit=unit,
        low=low,
        high=high,
        sure=median_bounds(values),
        count=len(values),
        at_least=at_least,
        at_most=at_most,
        note=note,
    )


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide the measurements of each pair."""
    return [a / b for a, b in zip(over, under, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Give the lower and upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Give the 95% bounds of a median by resampling; the same for the same values."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = (
        (cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in (header, rule, *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_lines() -> list[str]:
    """Say on what and with what was measured."""
    import torch

    from paceline._version import __version__
    from paceline.distributed.device import cpu_name
    from paceline.launch.worker_count import usable_cores

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    capability = torch.backends.cpu.get_cpu_capability()
    return [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load average {load}",
        *gpu_lines(),
        f"{cpu_name()}, {usable_cores()} cores, {capability}, {bf16_hardware()}",
        f"Python {platform.python_version()}, torch {torch.__version__}, Paceline {__version__}",
    ]


def gpu_lines() -> list[str]:
    """Name the GPUs, and what drives them; nothing where there are none."""
    import torch

    from paceline.distributed.system_gpus import driver_version

    count = torch.cuda.device_count()
    if not count:
        return []
    names = Counter(torch.cuda.get_device_properties(i).name for i in range(count))
    gpus = ", ".join(f"{number} x {name}" for name, number in names.items())
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    driver = driver_version() or "unknown"
    return [f"{gpus}, {cuda}, cuDNN {torch.backends.cudnn.version()}, driver {driver}"]


def bf16_hardware() -> str:
    """Name what the processor has for bf16."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16, no AMX" if torch.cpu._is_avx512_bf16_supported() else "no bf16 hardware"
