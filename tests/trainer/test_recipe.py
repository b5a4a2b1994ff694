import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.config.fields import OptionValue
from paceline.errors import UsageError
from paceline.trainer.recipe import Recipe, load_recipe, recipe

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
    return (width, name)

def plain(*, width=8):
    return width

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
    """Build what isn't a job here but shows which arguments arrived."""
    return found(**arguments)


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


def test_an_argument_without_default_cant_be_a_flag(file: Path) -> None:
    with pytest.raises(UsageError, match="the argument 'width' needs a default value"):
        load_recipe(f"{file}:bare").arguments()


def test_loading_twice_gives_the_same_module(file: Path) -> None:
    assert load_recipe(f"{file}:small") is load_recipe(f"{file}:small")


def test_a_file_named_like_a_known_module_replaces_nothing(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    file.write_text("def build():\n    return 1\n")
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


def test_an_error_in_the_users_file_is_shown_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "broken_job.py"
    file.write_text("import absent_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        load_recipe(f"{file}:build")


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
