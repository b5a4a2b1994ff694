"""The digits' recipe with gates: rank 0 stops in the middle of an epoch until it is let on.

Every attempt has gates of its own, numbered from 1: one every few steps. They are files in a
directory that the test and all hosts share: `reached-<attempt>-<gate>` says that rank 0 stands
there, `open-<attempt>-<gate>` lets it on, `open` opens all, and `boom` has rank 1 raise at its next
batch.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.data.augment import RandomShift
from paceline.data.digits import load_digits
from paceline.models.digits_net import DigitsNet

_GATE_EVERY = 9  # passes: the middle of a step, where rank 0 has two shards


class _Gates:
    """Called before every forward pass."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self._rank = _first("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        self._attempt = _first("PACELINE_ATTEMPT", "SLURM_RESTART_COUNT")
        self._passes = 0

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._passes += module.training
        if self._rank == "0" and module.training and self._passes % _GATE_EVERY == 0:
            self._wait(self._passes // _GATE_EVERY)
        if self._rank == "1" and (self._room / "boom").exists():
            raise ValueError("boom")

    def _wait(self, gate: int) -> None:
        (self._room / f"reached-{self._attempt}-{gate}").touch()
        opens = [self._room / "open", self._room / f"open-{self._attempt}-{gate}"]
        while not any(path.exists() for path in opens):
            time.sleep(0.02)


def _first(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


@paceline.recipe(epochs=2, global_batch=64)
def build(*, room: str = ".") -> paceline.Job:
    """Train on digits with dropout, BatchNorm and shifts: all that a resume has to bring back.

    Args:
        room: Directory for the gates' files.
    """
    train, test = load_digits()
    model = DigitsNet(0.2)
    model.register_forward_pre_hook(_Gates(Path(room)))
    return paceline.Job(model=model, train=train, validation=test, augment=(RandomShift(1),))
