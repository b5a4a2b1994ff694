"""What a verification prints besides its findings: what it took."""

from dataclasses import replace

from paceline.verify.text_report import Times
from tests.verify.made import trace_of


def test_what_took_the_time() -> None:
    both = trace_of([[], []])
    one = replace(trace_of([[]]), took_s=12.0, starting_s=12.0)  # ended before a batch
    times = Times(
        took_s=41.0,
        launches=(
            ("1 worker", one),
            ("2 workers", replace(both, took_s=28.0, starting_s=7.0)),
        ),
    )
    assert times.as_text() == (
        "Took 41 s: starting 19 s, 1 worker 0.0 s, 2 workers 21 s, comparing 1.00 s."
    )
    assert times.as_json() == {
        "took_s": 41.0,
        "launches": [
            {"launch": "1 worker", "workers": 1, "took_s": 12.0, "starting_s": 12.0},
            {"launch": "2 workers", "workers": 2, "took_s": 28.0, "starting_s": 7.0},
        ],
    }
