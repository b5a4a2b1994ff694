"""Puts what `paceline verify` has found into one self-contained HTML page, from its JSON alone."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from markupsafe import Markup, escape

from paceline.options import figures
from paceline.options.figures import listed, plural
from paceline.options.text import printable
from paceline.report.charts import MAX_POINTS, spans_decades, thin
from paceline.report.scaling.charts import COLOURS_THERE, Event, Line, Picture
from paceline.report.scaling.lines import draw_lines
from paceline.report.sections import Setting, Table, facts
from paceline.report.templating import fill_template, read_script, refuse_other, write_page
from paceline.results.json_object import JsonObject, entries, number, section, text, texts, whole

_GENERATOR = "Paceline verify"
_BY = "`paceline verify`"
_MEANINGS = {
    0: "Exit code 0: no fault was found.",
    65: "Exit code 65: something differs, is wrong or could not be compared.",
}
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
_SHOWN_FILES = 3
_DISTANCES = {
    "loss": "Difference of the loss",
    "gradients": "Difference of the gradients",
    "weights": "Difference of the weights",
}
"""What is drawn of the differences, by its name in the steps."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """A cause as it stands on the page."""

    cause: str
    is_fault: bool
    where: str
    what: str
    lines: tuple[tuple[str, str], ...]
    """Place and code."""
    advice: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A launch compared with the first one, the reference."""

    name: str
    colour: int
    from_step: int
    steps: Sequence[JsonObject]


def render_verification(found: JsonObject) -> str:
    """Render a verification as HTML that needs no network; the same JSON, the same text.

    Args:
        found: What `paceline verify --json` writes, with `--resume` or without.
    """
    ran, code = section(found, "ran"), whole(found, "exit_code")
    is_resume = "killed_after" in found
    compared = [each for each in _compared(found) if each.steps]
    return fill_template(
        "verify.html",
        title=text(ran, "target"),
        generator=_GENERATOR,
        kind="Paceline verify --resume" if is_resume else "Paceline verify",
        verdict=text(found, "verdict"),
        state="finished" if found.get("is_good") is True else "failed",
        meaning=_MEANINGS.get(-1 if code is None else code, ""),
        conclusion=text(found, "conclusion"),
        about=[*_facts(ran), *_interruption(found)],
        table=_table(found),
        sizes=_with_flags(text(section(found, "limits"), "meaning")),
        is_same=bool(compared) and not _differences(found),
        has_faults=any(each.get("is_fault") is True for each in entries(found, "findings")),
        first_differences=[_describe_difference(each) for each in _differences(found)],
        pictures=[(p, p.caption, Markup(draw_lines(p))) for p in verification_pictures(found)],
        colours=COLOURS_THERE,
        findings=[_finding(each, text(ran, "directory")) for each in entries(found, "findings")],
        unseen=[_with_flags(sentence) for sentence in texts(found, "not_seen")],
        script=read_script("chart.js"),
        directory=text(ran, "directory"),
        paceline=text(ran, "paceline"),
    )


def check_page_place(path: Path) -> None:
    """Refuse to write a page where something else stands.

    Raises:
        UsageError: There is something that isn't such a page.
    """
    refuse_other(path, _GENERATOR, _BY)


def write_verification(found: JsonObject, path: Path) -> Path:
    """Write a verification as a page, over an older one.

    Raises:
        UsageError: There is something that isn't such a page, or it can't be written.
        StorageError: The disk is full.
    """
    return write_page(path, render_verification(found), _GENERATOR, _BY)


def verification_pictures(found: JsonObject) -> list[Picture]:
    """Choose the pictures: all launches' losses, and how far they are from the first one."""
    events = tuple(_events(found))
    losses, distances = _losses_picture(found, events), _distance_pictures(found, events)
    return [picture for picture in (losses, *distances) if picture.lines]


def _losses_picture(found: JsonObject, events: tuple[Event, ...]) -> Picture:
    lines = []
    for colour, launch in enumerate(entries(found, "losses")):
        values = launch.get("values")
        points = _points(values if isinstance(values, list) else [], whole(launch, "from_step"))
        if points:
            line = Line(
                label=text(launch, "launch"),
                value=figures.show_loss(points[-1][1]),
                colour=colour,
                points=points,
                see_through=colour > 0,
            )
            lines.append(line)
    return Picture(
        slug="losses",
        title="Loss by step",
        caption="Of all ranks together. Dashes let lines that lie over each other be seen.",
        across="step",
        lines=tuple(lines),
        log_up=spans_decades([y for line in lines for _, y in line.points]),
        events=events,
    )


def _distance_pictures(found: JsonObject, events: tuple[Event, ...]) -> Iterator[Picture]:
    compared = _compared(found)
    last = max((each.from_step + len(each.steps) - 1 for each in compared), default=0)
    for name, title in _DISTANCES.items():
        lines = [line for each in compared if (line := _distance_line(each, name)).points]
        limit = _limit_line(section(found, "limits"), name, compared, last)
        if lines:
            yield Picture(
                slug=name,
                title=f"{title} by step",
                caption="Relative. No point where it is the same, bit for bit.",
                across="step",
                lines=(*lines, *limit),
                log_up=True,
                events=events,
            )


def _distance_line(launch: _Compared, name: str) -> Line:
    sizes = [number(step, name) for step in launch.steps]
    points = _points([size if size and size > 0 else None for size in sizes], launch.from_step)
    worst = max((size for _, size in points), default=0.0)
    return Line(
        label=launch.name,
        value=f"at most {worst:.1e}",
        colour=launch.colour,
        points=points,
    )


def _limit_line(
    limits: JsonObject, name: str, compared: Sequence[_Compared], last: int
) -> list[Line]:
    """Draw what counts as rounding; the last limit is that of all further steps."""
    sizes = limits.get(name)
    known = _points(sizes if isinstance(sizes, list) else [], 1)
    if not known or known[-1][1] <= 0 or not compared:
        return []
    begins_at = min(each.from_step for each in compared)
    if len(known) == 1:
        known = ((float(begins_at), known[0][1]),)
    points = (*(p for p in known if p[0] < last), (float(last), known[-1][1]))
    return [Line(label="limit of rounding", value="", colour=0, points=points, style="ideal")]


def _compared(found: JsonObject) -> list[_Compared]:
    """List the launches that are held against the first one, in the losses' colours."""
    return [
        _Compared(
            name=text(part, "launch"),
            colour=colour,
            from_step=whole(part, "from_step") or 1,
            steps=entries(part, "steps"),
        )
        for colour, part in enumerate(entries(found, "compared"))
        if colour
    ]


def _points(values: Iterable[object], first: int | None) -> Points:
    points = [
        (float(place), float(value))
        for place, value in enumerate(values, 1 if first is None else first)
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return tuple(points[i] for i in thin(len(points), MAX_POINTS))


def _differences(found: JsonObject) -> list[JsonObject]:
    return entries(found, "first_differences")


def _events(found: JsonObject) -> Iterator[Event]:
    """Mark where launches begin to differ, where one was killed, and where it went on."""
    for name, label in (("killed_after", "killed"), ("resumed_after", "resumed")):
        for place in _places(found, name):
            yield Event(place=place, label=f"{label} after {plural(place, 'step')}")
    by_step: dict[int, list[str]] = {}
    for difference in _differences(found):
        step = whole(difference, "step")
        if step is not None:
            by_step.setdefault(step, []).append(text(difference, "launch"))
    for step, launches in by_step.items():
        others = f" ({listed(launches)})" if len(by_step) > 1 else ""
        label = f"first step that differs: {step}{others}"
        yield Event(place=step, label=label, is_fault=True)


def _describe_difference(difference: JsonObject) -> str:
    """Say where a launch begins to differ, and in what."""
    launch, step = text(difference, "launch"), whole(difference, "step")
    where = f"On {launch}" if launch[:1].isdigit() else f"When it is {launch},"
    return f"{where} step {step} is the first that differs: in {listed(texts(difference, 'in'))}."


def _facts(ran: JsonObject) -> Iterator[Setting]:
    """Say what was run."""
    yield from facts(started_at=text(ran, "started_at"), hosts=(), command=texts(ran, "command"))
    versions = [f"{name} {text(ran, key)}" for key, name in _VERSIONS.items() if text(ran, key)]
    steps, epochs = whole(ran, "steps"), whole(ran, "epochs")
    cut = f"{plural(epochs or 0, 'epoch')}, each of {plural(steps or 0, 'step')} at most (--steps)"
    rows = (
        ("Workers", listed(texts(ran, "workers"))),
        ("Trained", cut if steps and epochs else ""),
        ("Versions", ", ".join(versions)),
    )
    yield from (Setting(name=name, value=value) for name, value in rows if value)


_VERSIONS = {"paceline": "Paceline", "torch": "PyTorch"}


def _interruption(found: JsonObject) -> Iterator[Setting]:
    """Say where the training was killed, and where it went on."""
    killed, resumed = _places(found, "killed_after"), _places(found, "resumed_after")
    if not killed:
        return
    repeat = f"to repeat it: --kill-at-step {killed[0]}"
    how = f"after {_in_steps(killed)}, by SIGKILL on all its workers ({repeat})"
    yield Setting(name="Killed", value=how)
    if resumed:
        yield Setting(name="Resumed", value=f"after {_in_steps(resumed)}")
    saved = texts(found, "saved")
    more = len(saved) - _SHOWN_FILES
    files = [*saved[:_SHOWN_FILES], *([f"{more} more"] if more > 0 else [])]
    yield Setting(name="Saved", value=listed(files) if files else "nothing by then")


def _places(found: JsonObject, name: str) -> list[int]:
    """Return steps, in order."""
    places = found.get(name)
    return [p for p in places if isinstance(p, int)] if isinstance(places, list) else []


def _in_steps(places: Sequence[int]) -> str:
    return plural(places[0], "step") if len(places) == 1 else f"{listed([*map(str, places)])} steps"


def _table(found: JsonObject) -> Table | None:
    table = found.get("table")
    listed_rows = table if isinstance(table, list) else []
    rows = [tuple(map(str, row)) for row in listed_rows if isinstance(row, list)]
    return Table(header=rows[0], rows=tuple(rows[1:])) if rows else None


def _finding(finding: JsonObject, directory: str) -> _Finding:
    step, rank = whole(finding, "step"), whole(finding, "rank")
    tensor = text(finding, "tensor")
    where = [
        plural(whole(finding, "workers") or 0, "worker"),
        *([] if step is None else [f"from step {step} on"]),
        *([] if rank is None else [f"rank {rank}"]),
        *([f"first in {tensor}"] if tensor else []),
    ]
    remedies = section(finding, "remedies")
    advice = (("Why", text(finding, "why")), *((n, text(remedies, n)) for n in remedies))
    return _Finding(
        cause=text(finding, "cause"),
        is_fault=finding.get("is_fault") is not False,
        where=", ".join(where),
        what=text(finding, "what"),
        lines=tuple(
            (f"{_relative(text(line, 'file'), directory)}:{text(line, 'line')}", text(line, "code"))
            for line in entries(finding, "lines")
        ),
        advice=tuple(Setting(name=name, value=value) for name, value in advice if value),
    )


def _relative(name: str, directory: str) -> str:
    path = PurePath(name)
    is_below = bool(directory) and path.is_relative_to(directory)
    return str(path.relative_to(directory)) if is_below else name


def _with_flags(sentence: str) -> Markup:
    """Set the options in a sentence as code; all else is escaped."""
    parts = _FLAG.split(printable(sentence))
    marked = [
        Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)
    ]
    return Markup().join(marked)
