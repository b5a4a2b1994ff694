"""What a project's CI is given: annotations, the action, hooks of pre-commit and their examples."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from paceline.verify.annotations import github_annotations
from tests.docs.pages import ROOT, blocks
from tests.launch.waiting import patient
from tests.support.needs import GIT, need
from tests.verify.faults.scripts import FAULTS

ACTION = ROOT / ".github" / "actions" / "verify" / "action.yml"
EXAMPLES = [block.text for block in blocks(ROOT / "docs" / "how-to" / "verify.md", "yaml")]


def finding(*lines: str, is_fault: bool = True) -> dict[str, object]:
    """Make a finding as `--json` writes it."""
    places = [line.rsplit(":", 1) for line in lines]
    return {
        "cause": "set-epoch",
        "is_fault": is_fault,
        "what": "100 % of the order\nis the same",
        "why": "no shuffling",
        "lines": [{"file": file, "line": int(line), "code": ""} for file, line in places],
    }


def annotated(directory: Path, *findings: object, is_good: bool = False) -> list[str]:
    found = {"findings": findings, "is_good": is_good, "verdict": "nothing to compare"}
    return github_annotations(found, directory).splitlines()


MESSAGE = (
    "title=paceline verify%3A set-epoch::100 %25 of the order%0Ais the same%0Awhy: no shuffling"
)


def test_findings_are_annotations_at_their_lines(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    work = tmp_path / "examples"
    first, outside = f"{work}/a,b:c.py:7", "/usr/lib/python3/site-packages/loader.py:3"
    found = finding(outside, first), finding(is_fault=False)
    assert annotated(work, *found) == [
        f"::error file=examples/a%2Cb%3Ac.py,line=7,{MESSAGE}",
        f"::notice {MESSAGE}",
    ]
    assert annotated(tmp_path.parent / "none", finding(first)) == [f"::error {MESSAGE}"]


def test_a_verdict_without_a_fault_is_an_annotation(tmp_path: Path) -> None:
    assert annotated(tmp_path, is_good=True) == []
    verdict = "::error title=paceline verify::nothing to compare"
    assert annotated(tmp_path) == [verdict]
    assert annotated(tmp_path, finding(is_fault=False))[1:] == [verdict]


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(300),
    )


def python(module: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    if find_spec(module) is None:
        pytest.skip(f"needs {module}: make install")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = (sys.executable, "-m", module, *arguments)
    return run(*command, cwd=cwd, PATH=programs, PRE_COMMIT_HOME=str(cwd / "cache"))


def test_the_action_and_the_workflows_are_as_github_wants_them(tmp_path: Path) -> None:
    (tmp_path / "0.yml").write_text(ACTION.read_text())
    workflows = [text for text in EXAMPLES if "jobs:" in text]
    assert len(workflows) == 1
    (tmp_path / "1.yml").write_text(workflows[0])
    for number, schema in enumerate(("vendor.github-actions", "vendor.github-workflows")):
        checked = ("--builtin-schema", schema, f"{number}.yml")
        done = python("check_jsonschema", *checked, cwd=tmp_path)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("inputs", "script", "more"),
    [
        ({"SCRIPT": "a b.py"}, ["a b.py"], ["--"]),
        (
            {"ARGS": "torchrun -m a 'x y' $(false)", "RESUME": "true"},
            [],
            ["--resume", "--", "torchrun", "-m", "a", "x y", "$(false)"],
        ),
    ],
)
def test_the_action_passes_its_inputs_on(
    inputs: dict[str, str], script: Sequence[str], more: Sequence[str], tmp_path: Path
) -> None:
    content = yaml.safe_load(ACTION.read_text())
    step = content["runs"]["steps"][-1]
    given = {name.upper(): name for name in content["inputs"] if name != "package"}
    assert step["env"] == {n: f"${{{{ inputs.{name} }}}}" for n, name in given.items()}
    (tmp_path / "paceline").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    variables = {"SCRIPT": "", "ARGS": "", "STEPS": "5", "RESUME": "false", "TIMEOUT": "60"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("bash", "-ec", step["run"], cwd=tmp_path, **variables | inputs, PATH=path)
    options = "--format github --steps 5 --timeout-s 60".split()
    assert done.stdout.splitlines() == ["verify", *script, *options, *more]


def test_the_hooks_of_pre_commit_are_as_it_wants_them(tmp_path: Path) -> None:
    done = python(
        "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_pre_commit_runs_the_hook_of_the_docs(tmp_path: Path) -> None:
    need(GIT)
    FAULTS["a sum as loss"].write(tmp_path)
    (hooks,) = (text for text in EXAMPLES if "hooks:" in text)
    (tmp_path / ".pre-commit-config.yaml").write_text(hooks)
    assert run("git", "init", "-q", cwd=tmp_path).returncode == 0
    assert run("git", "add", ".", cwd=tmp_path).returncode == 0
    done = python("pre_commit", "run", "--hook-stage", "pre-push", "--all-files", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert FAULTS["a sum as loss"].cause in done.stdout
