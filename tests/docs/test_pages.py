"""What the pages say is so: links, options, commands, code, contracts."""

import contextlib
import difflib
import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.cli.app import COMMANDS, main
from paceline.cli.commands import (
    aws,
    doctor,
    resume,
    scale,
    train,
    verify,
)
from paceline.errors import ExitCode
from paceline.recipes.registry import BUILT_IN
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Place
from paceline.training.recipe import load_recipe
from tests.docs.pages import (
    COMING_FROM,
    PAGES,
    ROOT,
    anchors,
    blocks,
    commands,
    flags,
    links,
    source_files,
)
from tests.docs.running import train_here
from tests.support.image_files import write_image_folder

README, DOCS = ROOT / "README.md", ROOT / "docs"
TUTORIAL = DOCS / "tutorial" / "first-training.md"
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.xdist_group("pages")

USERS = [page for page in PAGES if page.parent.name not in ("benchmarks", "internals")]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes of the pages, and `runs/first`: the tutorial's own, as it stands there."""
    place = tmp_path_factory.mktemp("pages")
    (place / "bars.py").write_text(blocks(TUTORIAL, "python")[0].text)
    (place / "clouds.py").write_text(
        blocks(DOCS / "how-to" / "write-a-recipe.md", "python")[0].text
    )
    (place / "train.py").touch()
    shutil.copy(DOCS / "how-to" / "vgg19-t4.json", place)
    write_image_folder(place / "photos")
    train_here(place, "bars.py:build", "--width", "16", "--run-dir", "runs/first")
    shutil.copytree(place / "runs" / "first", place / "runs" / "other")
    return place


@pytest.fixture
def inside(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in it; what importing recipes changes is put back."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield workplace
    for name in ("bars", "clouds"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {path.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_source_files_that_a_page_names_are_there(page: Path) -> None:
    places = (ROOT, Path(paceline.__file__).parent)
    missing = [n for n in source_files(page) if not any((p / n).is_file() for p in places)]
    assert missing == []


def test_every_page_is_listed_in_the_index() -> None:
    indexes = (DOCS / "index.md", COMING_FROM / "index.md")
    listed = {path.resolve() for index in indexes for path, _ in links(index)}
    assert listed >= set(PAGES) - {DOCS / "index.md"}


def test_the_option_table_is_up_to_date() -> None:
    path = DOCS / "generate_options.py"
    spec = importlib.util.spec_from_file_location("generate_options", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.render(), "run python docs/generate_options.py"
    assert generator.SETTINGS.read_text() == generator.render_settings()


FOREIGN = set(
    """all check cli-input-json container-image cpu cpus-per-task gpus-per-task ipc master-
    master-addr master-port mpi mpirun multi nnodes no- no-deps node-rank nproc-per-node
    ntasks-per-node num protect-args rdzv- requeue server signal standalone start-epoch tpu use
    with""".split()
)
"""Those of Slurm, AWS, torchrun, MPI, accelerate (up to their first `_`), uv, and of several."""
OWN = {"width", "hidden", "num-workers", "completion", "help-all", "setup"}
"""Those of the pages' recipes, scripts and examples, and of `paceline` without a command."""


@pytest.fixture(scope="module")
def helped() -> set[str]:
    """Every flag of every command and recipe."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for command in COMMANDS:
            main([command, "--help-all"])
        for action in aws._OPTIONS:
            main(["aws", action, "--help"])
    recipes = [argument for name in BUILT_IN.values() for argument in load_recipe(name).arguments()]
    names = {each.name.replace("_", "-") for each in recipes}
    return names | set(re.findall(r"--([a-z][a-z0-9-]+)", text.getvalue()))


@pytest.mark.parametrize("page", USERS, ids=name_of)
def test_flags_exist(page: Path, helped: set[str]) -> None:
    named = {flag.removeprefix("no-") for flag in flags(page) - FOREIGN}
    assert named <= helped | OWN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.core_cases(4)
def test_commands_work(
    page: Path, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings are only prepared here: flags, recipe, settings. The other commands run."""
    for module in (train, resume):
        monkeypatch.setattr(module, "choose_place", lambda *_, **__: Place(here=False, workers=2))
    monkeypatch.setattr("paceline.runtime.start.start", lambda launch: ExitCode.DONE)
    monkeypatch.setattr(resume, "_newest_unfinished", lambda _: "runs/first")  # it has finished
    fetched = RunDirectory.named("runs/first")
    monkeypatch.setattr(resume, "_fetch", lambda url, _: (url, fetched))  # nor are the stores
    monkeypatch.setattr("paceline.cli.cluster_submit.read_patch", lambda _: {})
    for kind in ("kubernetes", "sagemaker", "skypilot", "slurm"):
        launcher = f"paceline.launch.{kind}.{kind.title()}Launcher"
        monkeypatch.setattr(f"{launcher}.submit", lambda *_: None)
    monkeypatch.setattr(verify, "_verify", lambda *_: ExitCode.DONE)
    monkeypatch.setattr(scale, "_in_its_directory", lambda *_: ExitCode.DONE)
    monkeypatch.setattr(aws, "_act", lambda *_: ExitCode.DONE)
    monkeypatch.setattr(doctor, "_examine", lambda *_: ExitCode.DONE)  # the hosts aren't there
    for words in commands(page):
        for exported in inside.glob("*.safetensors"):
            exported.unlink()
        capsys.readouterr()
        place = words.index(">") if ">" in words else len(words)
        _check(words[:place])
        for file in words[place + 1 :]:
            Path(file).write_text(capsys.readouterr().out)
    capsys.readouterr()


def _check(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "tail":
        assert rest[-1].endswith("/steps.csv"), words
    elif rest[:1] == ["-m"] and rest[1].startswith("benchmarks."):
        assert (ROOT / f"{rest[1].replace('.', '/')}.py").is_file(), words
    elif program in ("torchrun", "srun", "mpirun", "uv"):
        if "paceline" not in rest:
            assert Path(rest[-1]).is_file(), words
            return
        assert main(rest[rest.index("paceline") + 1 :]) == ExitCode.DONE, words
    else:
        assert program == "paceline", words
        assert main(rest) == ExitCode.DONE, words


def test_the_exit_codes_are_the_pages() -> None:
    codes = re.findall(
        r"^\| (\d+) \|", (DOCS / "reference" / "failures.md").read_text(), re.MULTILINE
    )
    assert [int(code) for code in codes] == [int(code) for code in ExitCode]


def test_the_readme_shows_the_tree() -> None:
    (tree,) = (b.text for b in blocks(README, "text") if b.text.startswith("src/paceline/"))
    shown = dict(line.split(maxsplit=1) for line in tree.splitlines()[1:])
    package = Path(paceline.__file__).parent
    packages = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert shown.keys() == packages | {"errors.py", "files.py"}
    assert all(len(words.split()) <= 5 for words in shown.values())


def test_the_readmes_diff_is_that_of_the_example() -> None:
    (shown,) = blocks(README, "diff")
    before, after = (
        (EXAMPLES / f"mnist_cnn_{name}.py").read_text().splitlines() for name in ("before", "after")
    )
    whole = list(difflib.unified_diff(before, after, n=len(before)))
    position = 0
    for line in (line for line in shown.text.splitlines() if line != " ..."):
        position = whole.index(line, position) + 1
    assert {line[0] for line in shown.text.splitlines()} == {" ", "+", "-"}
