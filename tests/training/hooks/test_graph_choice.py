"""`--cuda-graphs auto` says what it has chosen, and what has become of it since."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.training.context import TrainingContext
from paceline.training.cuda_graphs import GraphSwitch
from paceline.training.hooks import graph_choice
from paceline.training.hooks.graph_choice import GraphChoice
from paceline.training.sync.base import GradientSync


class Times:
    """Steps take 2 ms without graphs and 1 ms with them."""

    def __init__(self, device: object, warm_up: int) -> None:
        self.left_out, self.median_s, self._steps = 0, 2e-3, 0

    def take(self, *, is_warm: bool) -> None:
        self._steps += 1

    def restart(self) -> None:
        self.median_s, self._steps = 1e-3, 0

    def __len__(self) -> int:
        return self._steps


def chosen(monkeypatch: pytest.MonkeyPatch) -> tuple[GraphSwitch, GraphChoice, list[str]]:
    """Let `auto` measure until it has kept graphs; gives what it has said as well."""
    said: list[str] = []

    def announce(text: str, **derived: str) -> None:
        assert text == f"--cuda-graphs {derived['cuda_graphs']}"
        said.append(text)

    monkeypatch.setattr(graph_choice, "StepTimes", Times)
    context: Any = SimpleNamespace(group=SimpleNamespace(device=None), announce=announce)
    sync = cast(GradientSync, SimpleNamespace(is_measuring=False))
    switch = GraphSwitch("auto", None)
    choice = GraphChoice(cast(TrainingContext, context), sync, switch)
    for step in range(1, 40):
        choice.after_step(step)
    return switch, choice, said


def test_what_is_faster_is_kept_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    switch, _, said = chosen(monkeypatch)
    assert switch.is_on
    assert said == ["--cuda-graphs auto: on, since a step takes 1 ms with graphs, 2 ms without"]


def test_graphs_that_are_lost_later_are_said_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    switch, choice, said = chosen(monkeypatch)
    switch.give_up("CUDA out of memory")
    for step in range(40, 43):
        choice.after_step(step)
    assert not switch.is_on
    assert said[1:] == ["--cuda-graphs auto: off, since CUDA out of memory"]
