"""Training scripts for tests, as a user would write them to a file."""

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.waiting import patient
from tests.support.warm import run_warm

POINTS = '''
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import paceline


def points(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 5, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def main(s, epochs=3):
    model = s.model(nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)))
    optimizer = s.optimizer(torch.optim.Adam(model.parameters(), 0.01))
    scheduler = s.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    seen = s.keep(Seen(), name="seen")
    batches = s.loader(points(54, 1), global_batch=8)
    test = s.eval_loader(points(13, 2))
    for epoch in s.epochs(epochs):
        for number, (inputs, targets) in enumerate(batches):
            hook(s)
            s.step(F.cross_entropy(model(inputs), targets))
            seen.steps += 1
        scheduler.step()
        figures = s.evaluate(
            lambda b: {"loss": F.cross_entropy(model(b[0]), b[1]),
                       "accuracy": model(b[0]).argmax(1) == b[1]}, test)
        s.log(rate=optimizer.param_groups[0]["lr"], seen=seen.steps, noise=torch.rand(()))
        s.print("epoch", epoch, "accuracy", round(figures["accuracy"], 3))


class Seen:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]


def hook(s):
    """Do nothing; a test's faults go here."""
'''
"""54 samples in batches of 8: 7 steps an epoch. `hook` is called before every step."""

RUN = """
if __name__ == "__main__":
    with paceline.session(device="cpu", loader_workers=0) as s:
        main(s)
"""


def write_script(directory: Path, *more: str, run: str = RUN, name: str = "own.py") -> Path:
    """Write the script; `more` comes before its last lines."""
    path = directory / name
    path.write_text(POINTS + "\n".join(more) + run)
    return path


def at_step(step: int, rank: int, what: str) -> str:
    """Make the hook that does something once, at a step (from 0) of a rank's first start."""
    return f"""
import os, signal
from paceline.training import status_exchange
status_exchange._EVERY_S = 0.0  # the workers exchange their status after every step
def hook(s):
    engine = s.engine
    first = not engine.context.group.placement.attempt and not os.path.exists("happened")
    if first and engine.context.progress.state.step == {step} and s.rank == {rank}:
        open("happened", "w").close()
        {what}
"""


def plain(script: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as one plain process, a warm one."""
    return run_warm([sys.executable, str(script), *arguments], script.parent, **environment)


def torchrun(script: Path, workers: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script under torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(workers), str(script), *arguments]
    return command(words, script.parent)


def command(words: list[str], directory: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        words,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )


def summary(run: Path) -> dict[str, object]:
    """Read a run's summary."""
    content: dict[str, object] = json.loads((run / "summary.json").read_text())
    return content
