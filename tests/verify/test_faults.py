"""Faults planted in real scripts are found by the real command, and faultless ones not accused."""

from html import unescape
from pathlib import Path

import pytest
import torch

from paceline.results.json_object import entries, section, text
from tests.support.tiers import slow
from tests.verify.conftest import Verify
from tests.verify.faults.scripts import BY_HAND, FAULTLESS, FAULTS

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("verify")]
MEANT = {"chance"}
"""Notes that a faultless script may get."""


@pytest.mark.parametrize("name", FAULTLESS)
@pytest.mark.core_cases(1)
def test_faultless_scripts_are_not_accused(name: str, verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTLESS[name])
    done = verify("train.py")
    assert done.code == 0, done.out + done.err
    assert set(done.causes) <= MEANT
    expected = "same but for chance" if name == "augmented" else "same to rounding"
    assert done.verdicts == {1: "-", 2: expected}
    assert "the end of an epoch wasn't reached" not in done.words
    launches = done.content["launches"]
    assert isinstance(launches, list)
    named = ["1 worker", "2 workers", "1 worker disturbed"]
    assert [launch["launch"] for launch in launches] == named
    assert all(0 < launch["starting_s"] < launch["took_s"] for launch in launches)
    assert "Took " in done.words
    same = "draws other random numbers than" if name == "augmented" else "is the same as"
    assert f"Conclusion: on 2 workers the training {same} on 1 worker" in done.words


LONG = ("padded training", "mean of unequal metrics")


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in FAULTS])
@pytest.mark.core_cases(1)
def test_faults_are_found(name: str, verify: Verify, tmp_path: Path) -> None:
    fault = FAULTS[name]
    fault.write(tmp_path)
    done = verify("train.py", "--tolerance", "1e-4")
    assert done.code == fault.code, done.out + done.err
    assert fault.told in done.words
    own = [cause for cause in done.causes if cause not in (*MEANT, "failed")]
    assert own == [fault.cause]


@pytest.mark.slow
def test_faults_show_on_other_numbers_and_every_count_has_its_verdict(
    verify: Verify, tmp_path: Path
) -> None:
    FAULTS["mean of unequal means"].write(tmp_path)
    done = verify("train.py", "--workers", "1,3", "--tolerance", "1e-4")
    # 51 samples on 3 workers: shares of 17, batches of 5, 5, 5 and 2 each: all equal.
    assert (done.code, done.causes) == (65, ["other-samples"]), done.out


@pytest.mark.slow
def test_a_page_of_what_was_found(verify: Verify, tmp_path: Path) -> None:
    FAULTS["a sum as loss"].write(tmp_path)
    path = tmp_path / "page.html"
    done = verify("train.py", "--tolerance", "1e-4", "--steps", "2", "--html", str(path))
    page = path.read_text()
    ran, (finding,) = section(done.content, "ran"), entries(done.content, "findings")
    assert f'<h1 class="verdict">{done.content["verdict"]}</h1>' in page
    assert "is the first that differs" in page
    assert page.count("<svg") == 4
    assert all(text(line, "code") in unescape(page) for line in entries(finding, "lines"))
    assert (ran["workers"], ran["torch"]) == ([1, 2], torch.__version__)


DRAWN_ORDER = (
    BY_HAND.replace(
        "sampler = DistributedSampler(train_set)\n",
        """
class Drawn(Sampler):
    def __len__(self):
        return len(train_set) // world

    def __iter__(self):
        return iter(torch.randperm(len(train_set){generator}).tolist()[rank::world])


sampler = Drawn()
""",
    )
    .replace("    sampler.set_epoch(epoch)\n", "")
    .replace("nn.Linear(6, 2)", "nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 2))")
)
"""All ranks draw the same order of samples, and each takes its part of it."""


@pytest.mark.slow
def test_advice_on_seeds_keeps_the_ranks_together(verify: Verify, tmp_path: Path) -> None:
    """Where they draw an order in common, a seed for each rank alone would set them apart."""
    (tmp_path / "train.py").write_text(DRAWN_ORDER.replace("{generator}", ""))
    done = verify("train.py", "--tolerance", "1e-4")
    assert "same-dropout" in done.causes, done.out
    for word in ("after the model is built", "randperm", "generator=torch.Generator()"):
        assert word in done.words
    own = "orders = torch.Generator().manual_seed(0)\nsampler = Drawn()\n"
    advised = DRAWN_ORDER.replace("{generator}", ", generator=orders")
    advised = advised.replace("sampler = Drawn()\n", own)
    advised = advised.replace("for epoch", "torch.manual_seed(100 + rank)\nfor epoch", 1)
    (tmp_path / "train.py").write_text(advised)
    done = verify("train.py", "--tolerance", "1e-4")
    assert (done.code, done.causes) == (0, []), done.out
