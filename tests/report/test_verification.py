"""The page of `paceline verify`: made from its JSON alone, whole by itself, and safe."""

import json
import re
from collections.abc import Mapping

import pytest

from paceline.report.scaling.charts import Line, Picture
from paceline.report.scaling.lines import draw_lines
from paceline.report.verification import render_verification, verification_pictures
from tests.report.test_page import NASTY, outline

STEPS: list[dict[str, object]] = [
    {"step": 0, "same_samples": True, "loss": 0.0, "gradients": 0.0, "weights": 1e-8},
    {"step": 1, "same_samples": True, "loss": 0.5, "gradients": 1.0, "weights": None},
    {"step": 2, "same_samples": True, "loss": 0.25, "gradients": 0.5, "weights": 0.1},
]
FINDING = {
    "cause": "gradient-factor",
    "is_fault": True,
    "workers": 2,
    "what": "the gradients of step 1 are 2 times too large",
    "step": 1,
    "rank": None,
    "tensor": "0.weight",
    "lines": [{"file": "/home/me/train.py", "line": 26, "code": "loss *= world"}],
    "why": "another learning rate",
    "remedies": {"PyTorch": "a mean loss", "Paceline": "s.step(loss)"},
}
RAN = {
    "target": "train.py",
    "command": ["paceline", "verify", "train.py"],
    "directory": "/home/me",
    "started_at": "2026-03-03T09:15:00+00:00",
    "workers": [1, 2],
    "steps": 50,
    "epochs": 2,
    "paceline": "0.1.0",
    "torch": "2.9.1",
}
FOUND: Mapping[str, object] = {
    "is_good": False,
    "exit_code": 65,
    "verdict": "different: 1 cause: gradient-factor",
    "conclusion": "on 2 workers this is another training than on 1 worker.",
    "ran": RAN,
    "table": [["workers", "steps", "verdict"], ["1", "3", "-"], ["2", "3", "different"]],
    "compared": [
        {"launch": "1 worker", "steps": []},
        {"launch": "2 workers", "from_step": 1, "steps": STEPS},
    ],
    "losses": [
        {"launch": "1 worker", "from_step": 1, "values": [2.0, 1.5, 1.0]},
        {"launch": "2 workers", "from_step": 1, "values": [2.0, None, 1.25]},
    ],
    "first_differences": [{"launch": "2 workers", "step": 2, "in": ["loss", "gradients"]}],
    "findings": [FINDING],
    "limits": {"gradients": [1e-6, 2e-6], "weights": [1e-6], "meaning": "Sizes are relative."},
    "not_seen": ["the end of an epoch wasn't reached in 50 steps (--steps)"],
}
RESUMED: Mapping[str, object] = {
    **{name: FOUND[name] for name in ("is_good", "exit_code", "ran", "findings", "not_seen")},
    "verdict": "different: 1 cause: optimizer-not-restored (killed after 3 steps, resumed after 2)",
    "killed_after": [3, 4],
    "resumed_after": [2, 3],
    "saved": ["a.pt", "b.pt", "c.pt", "d.pt", "e.pt"],
    "compared": [
        {"launch": "undisturbed", "steps": []},
        {"launch": "killed", "from_step": 1, "steps": []},
        {"launch": "resumed", "from_step": 3, "steps": STEPS},
    ],
    "losses": [
        {"launch": "undisturbed", "from_step": 1, "values": [5.0, 4.0, 3.0, 2.0, 1.0]},
        {"launch": "resumed", "from_step": 3, "values": [3.0, 2.5, 2.0]},
    ],
    "first_differences": [{"launch": "resumed", "step": 4, "in": ["gradients"]}],
    "limits": {"gradients": [1e-6], "weights": [1e-6]},
}


_WHOLE = re.compile(r'<span class="whole">(.*?)</span>')
"""What no line may end within, such as an option."""


@pytest.mark.parametrize("found", [FOUND, RESUMED])
def test_the_page_is_whole_by_itself(found: Mapping[str, object]) -> None:
    page = render_verification(found)
    parsed = outline(page)
    assert parsed.tags.count("svg") == 4
    assert parsed.tags.count("script") == 1
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith(("#", "data:")) for link in parsed.links)
    assert not re.search(r"@import|url\((?!#)", page)
    namespace = "http://www.w3.org/2000/svg"  # a name, nothing that is fetched
    assert "://" not in page.replace(namespace, "")
    assert page == render_verification(json.loads(json.dumps(found)))


def said(page: str) -> str:
    """Take away what only keeps options from being parted at a line's end."""
    return re.sub('<span class="whole">([^<]*)</span>', r"\1", page)


def test_the_verdict_comes_first_then_what_was_run_and_found() -> None:
    page = render_verification(FOUND)
    page = _WHOLE.sub(r"\1", page)
    words = " ".join(
        re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S).split()
    )
    places = [
        words.index(part)
        for part in (
            "different: 1 cause: gradient-factor",
            "Exit code 65",
            "On 2 workers this is another training",
            "paceline verify train.py",
            "2 epochs, each of 50 steps at most (--steps)",
            "Paceline 0.1.0, PyTorch 2.9.1",
            "The launches",
            "Sizes are relative.",
            "On 2 workers step 2 is the first that differs: in loss and gradients.",
            "1. gradient-factor fault",
            "2 workers, from step 1 on, first in 0.weight",
            "train.py:26 loss *= world",
            "Why another learning rate PyTorch a mean loss Paceline s.step(loss)",
            "What could not be seen",
        )
    ]
    assert places == sorted(places)
    assert "<code>--steps</code>" in page
    assert '<h1 class="verdict">different: 1 cause: gradient-factor</h1>' in page


def test_the_first_step_that_differs_is_marked_in_each_picture() -> None:
    losses, *distances = pictures = verification_pictures(FOUND)
    assert [picture.slug for picture in pictures] == ["losses", "loss", "gradients", "weights"]
    for picture in pictures:
        (event,) = picture.events
        assert (event.place, event.is_fault) == (2, True)
    assert [line.points for line in losses.lines] == [
        ((1.0, 2.0), (2.0, 1.5), (3.0, 1.0)),
        ((1.0, 2.0), (3.0, 1.25)),
    ]
    # Equal bits and what isn't a number have no place on a logarithmic axis.
    assert all(picture.log_up for picture in distances)
    loss, gradients, weights = (picture.lines for picture in distances)
    assert [line.points for line in loss] == [((2.0, 0.5), (3.0, 0.25))]
    assert [line.points for line in gradients] == [
        ((2.0, 1.0), (3.0, 0.5)),
        ((1.0, 1e-6), (2.0, 2e-6), (3.0, 2e-6)),  # the limit
    ]
    assert [line.points for line in weights] == [
        ((1.0, 1e-8), (3.0, 0.1)),
        ((1.0, 1e-6), (3.0, 1e-6)),
    ]


def test_a_picture_over_many_powers_of_ten_has_labels_and_the_mark() -> None:
    drawn = draw_lines(verification_pictures(FOUND)[-1])
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"1", "2", "3", "1e-08", "1e-06", "0.0001", "0.01"} <= {*labels}
    assert "0.5" not in labels  # there is no half step
    assert drawn.count("stroke:var(--bad)") == 1


@pytest.mark.parametrize(
    ("most", "labels"), [(1.5, ["1", "1.5"]), (20.0, ["1", "2", "5", "10", "20"])]
)
def test_a_picture_over_few_powers_of_ten_has_labels_between(
    most: float, labels: list[str]
) -> None:
    line = Line(label="a", value="", colour=0, points=((0.0, 1.0), (7.0, most)))
    picture = Picture(slug="a", title="a", caption="", across="step", lines=(line,), log_up=True)
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", draw_lines(picture))
    assert set(labels) <= {*drawn}


def test_a_fault_that_shows_in_no_step_is_said_to() -> None:
    page = render_verification({**FOUND, "first_differences": []})
    assert "differs by more than rounding. What was found shows elsewhere." in page


def test_where_it_was_killed_and_where_it_went_on() -> None:
    losses, loss, *_ = verification_pictures(RESUMED)
    assert [(event.place, event.label) for event in losses.events] == [
        (3, "killed after 3 steps"),
        (4, "killed after 4 steps"),
        (2, "resumed after 2 steps"),
        (3, "resumed after 3 steps"),
        (4, "first step that differs: 4"),
    ]
    assert losses.lines[1].points == ((3.0, 3.0), (4.0, 2.5), (5.0, 2.0))
    assert loss.lines[0].points == ((4.0, 0.5), (5.0, 0.25))
    page = _WHOLE.sub(r"\1", render_verification(RESUMED))
    assert "When it is resumed, step 4 is the first that differs: in gradients." in page
    assert "after 3 and 4 steps, by SIGKILL on all its workers" in page
    assert "--kill-at-step 3" in page
    assert "a.pt, b.pt, c.pt and 2 more" in page


def test_the_same_bits_and_what_has_failed_have_no_distances() -> None:
    same = [{**step, "loss": 0.0, "gradients": 0.0, "weights": 0.0} for step in STEPS]
    good = {"is_good": True, "exit_code": 0, "first_differences": [], "findings": []}
    compared = [{"launch": "1 worker", "steps": []}, {"launch": "2 workers", "steps": same}]
    page = render_verification({**FOUND, **good, "compared": compared})
    assert outline(page).tags.count("svg") == 1
    assert "No step that was compared differs by more than rounding.</p>" in page
    assert '<p class="ending finished">Exit code 0' in page
    page = render_verification({**FOUND, **good, "compared": [], "losses": []})
    assert "Step by step" not in page


def test_nobodys_text_becomes_markup() -> None:
    line = {"file": NASTY, "line": 1, "code": NASTY}
    finding = dict.fromkeys(FINDING, NASTY) | {"lines": [line], "step": 1}
    found = {
        **dict.fromkeys(("verdict", "conclusion"), NASTY),
        "ran": {name: [NASTY] if name == "command" else NASTY for name in RAN},
        "table": [[NASTY], [NASTY]],
        "losses": [{"launch": NASTY.replace("\x1b", ""), "values": [1.0, 2.0]}],
        "first_differences": [{"launch": NASTY, "step": 1, "in": [NASTY]}],
        "findings": [finding],
        "limits": {"meaning": f"--{NASTY} (--steps)"},
        "not_seen": [f"{NASTY} --steps"],
    }
    page = render_verification(found)
    assert page.count("<script") == 1  # ours
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "49" not in re.sub(r"<(svg|style).*?</\1>", "", page, flags=re.DOTALL)
