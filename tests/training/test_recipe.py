import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.errors import JobError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.recipe import Recipe, load_recipe, recipe

SOURCE = '''
import paceline
from helper_of_mine import WIDTH

@paceline.recipe(epochs=5, lr=0.3)
def small(*, width: int = WIDTH, name: str | None = None) -> "paceline.Job":
    """A small one.

    Args:
        width: How wide it is.
        name: What it is called.
    """
    return paceline.Job(model=(width, name), train=None, validation=None)

def plain(*, width=8):
    return paceline.Job(model=width, train=None, validation=None)

def bare(width):
    return width

CONSTANT = 3
'''


@pytest.fixture(autouse=True)
def imports_brought_back() -> Iterator[None]:
    """A user's file is imported as a script is: its directory stays on the path."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_mine.py").write_text("WIDTH = 16\n")
    path = tmp_path / "my_job.py"
    path.write_text(SOURCE)
    return path


def built(found: Recipe, **arguments: OptionValue) -> object:
    """Give what stands for a model here: it shows which arguments arrived."""
    return found(**arguments).model


def test_a_recipes_arguments_are_options_with_help(file: Path) -> None:
    found = load_recipe(f"{file}:small")
    assert (found.name, found.summary) == ("small", "A small one.")
    assert found.settings == {"epochs": 5, "lr": 0.3}
    width, name = found.arguments()
    assert (width.name, width.annotation, width.default) == ("width", int, 16)
    assert (width.help, width.group) == ("How wide it is.", "Recipe small")
    assert (name.annotation, name.default) == (str | None, None)


def test_a_recipe_builds_with_its_arguments(file: Path) -> None:
    found = load_recipe(f"{file}:small")
    assert built(found) == (16, None)
    assert built(found, width=3, name="x") == (3, "x")
    with pytest.raises(UsageError, match=r"unknown argument of recipe 'small' 'widthh'.*'width'"):
        found(widthh=3)


def test_a_plain_function_is_a_recipe_too(file: Path) -> None:
    found = load_recipe(f"{file}:plain")
    assert (found.name, dict(found.settings)) == (f"{file}:plain", {})
    assert [argument.annotation for argument in found.arguments()] == [int]
    assert built(found, width=2) == 2


@pytest.mark.parametrize(("value", "returned"), [("None", "nothing"), ("3", "a value of type int")])
def test_what_builds_no_job(value: str, returned: str, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text(f"def build():\n    return {value}\n")
    found = load_recipe(f"{tmp_path / 'none.py'}:build")
    with pytest.raises(JobError, match=rf"must return a paceline\.Job; it returned {returned}$"):
        found()


def test_an_argument_without_default_cant_be_a_flag(file: Path) -> None:
    with pytest.raises(UsageError, match="the argument 'width' needs a default value"):
        load_recipe(f"{file}:bare").arguments()


def test_loading_twice_gives_the_same_module(file: Path) -> None:
    assert load_recipe(f"{file}:small") is load_recipe(f"{file}:small")


def test_a_file_named_like_a_known_module_replaces_nothing(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    job = "paceline.Job(model=1, train=None, validation=None)"
    file.write_text(f"import paceline\ndef build():\n    return {job}\n")
    assert built(load_recipe(f"{file}:build")) == 1
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize("reference", ["digits", "file.py", ":small", "module:"])
def test_what_names_no_recipe(reference: str) -> None:
    with pytest.raises(UsageError, match="names no recipe"):
        load_recipe(reference)


def test_a_missing_file_module_or_function(file: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file /.*absent\.py"):
        load_recipe("absent.py:small")
    with pytest.raises(UsageError, match=r"there is no module 'absent\.sub'"):
        load_recipe("absent.sub:small")
    with pytest.raises(UsageError, match=r"no function 'tiny'.*functions: small, plain, bare"):
        load_recipe(f"{file}:tiny")
    with pytest.raises(UsageError, match="no function 'CONSTANT'"):
        load_recipe(f"{file}:CONSTANT")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import absent_dependency\n", "ModuleNotFoundError: No module named 'absent_dependency'"),
        ("import helper_that_fails\n", "ConnectionResetError: gone"),
        ("def build(:\n", "SyntaxError: "),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_failing_import_shows_the_users_frames_alone(
    source: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "helper_that_fails.py").write_text("raise ConnectionResetError('gone')\n")
    file = tmp_path / "broken_job.py"
    file.write_text(source)
    with pytest.raises(JobError) as found:
        load_recipe(f"{file}:build")
    first, *trace, last = str(found.value).splitlines()
    assert first == f"{file} fails when it is imported:"
    assert last.startswith(told)
    places = [line for line in trace if line.startswith("  File ")]
    assert places[0].startswith(f'  File "{file}", line ')
    assert not any("importlib" in line or "paceline/training" in line for line in places)
    assert "broken_job" not in sys.modules


def test_a_module_that_fails(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(JobError, match="broken_module fails when it is imported:") as found:
        load_recipe("broken_module:build")
    assert str(found.value).splitlines()[2].startswith(f'  File "{tmp_path}/broken_module.py"')


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("*sizes", r"\*sizes can't be a flag"),
        ("width=3, **more", r"\*\*more can't be a flag"),
        ("width=3, /", "the positional argument width can't be a flag"),
        ("width: 'Nothing' = 3", "the annotation of an argument of build can't be read: .*Nothing"),
    ],
)
def test_arguments_that_cant_be_flags(arguments: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "my_flags.py"
    file.write_text(f"def build({arguments}):\n    return 1\n")
    with pytest.raises(UsageError, match=told):
        load_recipe(f"{file}:build").arguments()


def test_a_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "at_home.py"
    file.write_text(
        "import paceline\nfrom pathlib import Path\ndef build(*, data: Path = Path('~/data')):\n"
        "    return paceline.Job(model=data, train=None, validation=None)\n"
    )
    found = load_recipe("~/at_home.py:build")
    assert found.resolved({}) == {"data": str(tmp_path / "data")}
    assert built(found, data="~/other") == tmp_path / "other"


def test_the_decorator_without_parentheses() -> None:
    @recipe
    def my_job(*, width: int = 3) -> paceline.Job:
        raise NotImplementedError

    assert isinstance(my_job, Recipe)
    assert (my_job.name, my_job.settings) == ("my-job", {})


def test_a_module_by_name() -> None:
    found = load_recipe("paceline.recipes.digits:digits")
    assert isinstance(found, Recipe)
    assert found.name == "digits"


def test_the_decorator_names_a_recipe_as_a_command() -> None:
    @recipe(epochs=2)
    def my_job(*, width: int = 3) -> paceline.Job:
        raise NotImplementedError

    settings: dict[str, OptionValue] = {"epochs": 2}
    assert (my_job.name, my_job.settings) == ("my-job", settings)
