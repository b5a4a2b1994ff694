"""`paceline predict`, in this process: it starts nothing."""

import json
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.scaling.result import summarise
from tests.docs.pages import ROOT, blocks, commands
from tests.scaling.studies import ASKED, measured, size
from tests.scaling.studies import profile as made_profile
from tests.scaling.vgg import profile_of

PAGES = ROOT / "docs" / "how-to"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(profile_of().to_json())
    return tmp_path


def test_the_table_and_what_to_do(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--link", "6.4gbit", "--rtt", "50us", "--price", "0.75"]
    assert main(["predict", str(run_dir), *words]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"from      {run_dir}: 1 worker, cuda, steps of 809 ms"
    assert "allreduce         0.81   0.59   0.52" in lines
    heads = [line.split() for line in lines if line.startswith("nodes  ")]
    assert [head[-1] for head in heads] == ["8", "cost", "cost"]
    rows = [line for line in lines if line.startswith("    8    256  0.52 (")]
    assert len(rows) == 1
    assert "With all-reduce, 2 nodes pay (0.81), 4 don't (0.59)." in lines
    assert all(len(line) <= 110 for line in lines[3:])


def test_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--link", "6.4gbit", "--nodes", "2..1024", "--gpus-per-node", "8", "--json"]
    assert (
        main(["predict", str(run_dir), *words, "--methods", "allreduce,powersgd"]) == ExitCode.DONE
    )
    told = json.loads(capsys.readouterr().out)
    assert [method["method"] for method in told["methods"]] == ["allreduce", "powersgd"]
    sizes = told["methods"][0]["sizes"]
    assert [size["nodes"] for size in sizes] == [2**power for power in range(1, 11)]
    assert sizes[0]["workers"] == 16
    assert sizes[0]["low"] <= sizes[0]["efficiency"] <= sizes[0]["high"]
    assert sizes[0]["step_s"] == pytest.approx(
        sum(sizes[0][part] for part in ("compute_s", "exposed_s", "codec_s", "waiting_s"))
    )


@pytest.mark.parametrize("two_s", [0.99, 0.05])
def test_what_a_study_warned_of_is_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_s: float
) -> None:
    found = {size(1): [measured(1, 0.8, steps_seen=3)], size(2): [measured(2, two_s)]}
    study = summarise(ASKED, list(found), found, {}, {})
    (tmp_path / "study.json").write_text(json.dumps(study.to_json()))
    (tmp_path / "runs" / "1-allreduce-1").mkdir(parents=True)
    profile = tmp_path / "runs" / "1-allreduce-1" / "profile.json"
    profile.write_text(made_profile(1, 0.8, steps_seen=3).to_json())
    words = ["predict", str(tmp_path), "--link", "6.4gbit"]

    assert main(words) == ExitCode.DONE
    text = capsys.readouterr().out
    assert f"Of the measurements in {tmp_path}:\n- Fewer than 5 steps could be looked at" in text
    assert main([*words, "--json"]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["warnings"] == list(study.notes)
    assert told["not_reliable"] == study.not_reliable
    if two_s < 0.8:
        assert "\nNot reliable: each of 2 workers" in text
        assert told["recommended"] is None
        assert told["text"] == [study.not_reliable]
    else:
        assert "Not reliable" not in text
        assert told["recommended"]


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--help"]) == ExitCode.DONE
    assert "--gpus-per-node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "is missing"),
        (["RUN"], "say --link 25gbit"),
        (["RUN", "--link", "fast"], "not a network's speed: 'fast'"),
        (["RUN", "--link", "1gbit", "--rtt", "50"], "not a time: '50'"),
        (["RUN", "--link", "1gbit", "--nodes", "few"], "not numbers of nodes: 'few'"),
        (["RUN", "--link", "1gbit", "--methods", "magic"], "'magic' can't be predicted"),
        (["RUN", "--link", "1gbit", "--doctor", "x.json"], "give one of them"),
        (["RUN", "--link", "1gbit", "--gpus-per-node", "0"], "--gpus-per-node must be above 0"),
        (["RUN", "--link", "1gbit", "--pays", "2"], "at most 1"),
        (["RUN", "--link", "1gbit", "--mtbf", "often"], "--mtbf is 'often', not a duration"),
        (["RUN", "--link", "1gbit", "--restart", "2m"], "--restart counts where nodes fail"),
        (["RUN", "--link", "1gbit", "--link-within", "64gbit"], "--gpus-per-node is 1: give more"),
        (
            ["RUN", "--link", "1gbit", "--powersgd-rank", "0"],
            "--powersgd-rank is 0: it must be at least 1",
        ),
        (["RUN", "--link", "1gbit", "--mode", "strong", "--nodes", "64"], "64 workers can't share"),
        (["RUN", "--link", "1gbit", "--snapshot-every", "5m"], "give --mtbf as well"),
        (
            ["RUN", "--link", "1gbit", "--methods", "ordered", "--powersgd-rank", "4"],
            "--powersgd-rank has no effect with --methods ordered",
        ),
        (["nowhere", "--link", "1gbit"], "holds no profile.json"),
    ],
)
def test_wrong_usage(
    run_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run_dir) if word == "RUN" else word for word in words]
    assert main(["predict", *given]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert message.lower() in said.lower()


def test_a_damaged_profile(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "profile.json").write_text("{}")
    assert main(["predict", str(run_dir), "--link", "1gbit"]) == ExitCode.USAGE
    assert "profile.json" in capsys.readouterr().err


def test_the_page_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES / "predict.md"
    (block,) = blocks(page, "text")
    monkeypatch.chdir(PAGES)
    assert main(list(commands(page))[-1][1:]) == ExitCode.DONE
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in block.text.splitlines() if line.strip() != "..."]
    assert [line for line in shown if line not in printed] == []
