"""Rules of the whole repository that the linters can't express."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import pytest

from paceline.cli.cluster_submit import cluster_options
from paceline.options.command_line import flag
from paceline.training.config import training_options
from tests.launch.waiting import patient

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
ALL = [
    path
    for folder in ("src", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FLAGS = Path(__file__).parent / "flags.txt"

MOST_LINES, MOST_CODE_LINES = 600, 60
UNSAFE_MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
PICKLING_COLLECTIVES = frozenset(
    f"{verb}_object{suffix}"
    for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for suffix in ("", "_list")
)
UNSAFE_CALLS = ("os.system", "os.popen", "eval", "exec")
MAY_READ_ENVIRONMENT = (
    "paceline/__init__.py",
    "paceline/distributed/environment.py",
    "paceline/launch/",
    "paceline/runtime/placement.py",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """Write `a.b.c` as it stands in the source; other expressions are empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def unsafe(node: ast.AST) -> str | None:
    """Name what could run foreign code or a shell."""
    for name in imported(node):
        if name.partition(".")[0] in UNSAFE_MODULES:
            return f"imports {name}"
    if isinstance(node, ast.Attribute | ast.Name):
        last = dotted(node).rpartition(".")[2]
        if last in PICKLING_COLLECTIVES:
            return f"the collective {last} pickles"
    if isinstance(node, ast.Call):
        return unsafe_call(node)
    return None


def unsafe_call(node: ast.Call) -> str | None:
    name = dotted(node.func)
    keywords = {k.arg: k.value for k in node.keywords}
    if name in UNSAFE_CALLS:
        return f"calls {name}"
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        return "a shell"
    safe = keywords.get("weights_only")
    if name == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
        return "torch.load without weights_only=True"
    return None


@cache
def nodes_of(path: Path) -> Sequence[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def test_nothing_unpickles_or_starts_a_shell() -> None:
    risky = (*UNSAFE_MODULES, *PICKLING_COLLECTIVES, *UNSAFE_CALLS, "shell", "torch.load")
    words = re.compile(rf"\b({'|'.join(risky)})\b")  # files without one needn't be parsed
    judged = [path for path in SOURCES if words.search(path.read_text())]
    found = [(path, node, unsafe(node)) for path in judged for node in nodes_of(path)]
    named = [f"{name_of(p)}:{getattr(n, 'lineno', 0)} {what}" for p, n, what in found if what]
    # CIFAR's files are pickles: tests/data/test_datasets.py shows that nothing in them is called.
    (unpickler,) = named
    assert re.fullmatch(r"src/paceline/data/datasets\.py:\d+ imports pickle", unpickler)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "imports pickle"),
        ("from marshal import loads", "imports marshal.loads"),
        ("dist.broadcast_object_list(x)", "pickles"),
        ("subprocess.run(x, shell=True)", "a shell"),
        ("torch.load(x)", "weights_only"),
        ("torch.load(x, weights_only=False)", "weights_only"),
        ("os.system(x)", "calls os.system"),
    ],
)
def test_what_is_unsafe_is_found(source: str, what: str) -> None:
    found = [unsafe(node) for node in ast.walk(ast.parse(source))]
    assert any(what in text for text in found if text)


def reads_environment(node: ast.AST) -> bool:
    read = ("os.environ", "os.getenv", "os.environb")
    if isinstance(node, ast.Attribute):
        return dotted(node) in read
    return any(name in read for name in imported(node))


@pytest.mark.slow
def test_the_environment_is_read_in_one_place() -> None:
    places = tuple(f"src/{place}" for place in MAY_READ_ENVIRONMENT)
    judged = [path for path in SOURCES if not name_of(path).startswith(places)]
    found = [(path, node) for path in judged for node in nodes_of(path) if reads_environment(node)]
    assert [f"{name_of(path)}:{getattr(node, 'lineno', 0)}" for path, node in found] == []


@pytest.mark.parametrize("source", ["os.environ['A']", "os.getenv('A')", "from os import environ"])
def test_reading_the_environment_is_found(source: str) -> None:
    assert any(reads_environment(node) for node in ast.walk(ast.parse(source)))


def compares_device(node: ast.AST) -> bool:
    """Tell whether it asks for one kind of device by its name."""
    return isinstance(node, ast.Compare) and any(
        isinstance(part, ast.Attribute) and dotted(part).endswith("device.type")
        for part in (node.left, *node.comparators)
    )


@pytest.mark.slow
def test_what_a_kind_of_device_can_is_known_in_one_place() -> None:
    """`distributed/device.py` has what PyTorch has for each: CUDA, ROCm, XPU and MPS are alike."""
    judged = [p for p in SOURCES if not name_of(p).startswith("src/paceline/distributed/")]
    found = [(path, node) for path in judged for node in nodes_of(path) if compares_device(node)]
    assert [f"{name_of(path)}:{getattr(node, 'lineno', 0)}" for path, node in found] == []


@pytest.mark.parametrize("source", ["device.type == 'cuda'", "if self._device.type != 'cpu': pass"])
def test_comparing_devices_is_found(source: str) -> None:
    assert any(compares_device(node) for node in ast.walk(ast.parse(source)))


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Give every function's name and its lines of code: no docstring, comments or blank lines."""
    source = path.read_text()
    coded = code_lines(source)
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = set(range(node.lineno, (node.end_lineno or 0) + 1)) & coded
            if ast.get_docstring(node) is not None:
                text = node.body[0]
                lines -= set(range(text.lineno, (text.end_lineno or 0) + 1))
            yield f"{name_of(path)}:{node.lineno} {node.name}", len(lines)


def code_lines(source: str) -> set[int]:
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in empty)
    return {line for span in spans for line in span}


@pytest.mark.slow
def test_files_and_functions_are_small() -> None:
    files = {name_of(path): len(path.read_text().splitlines()) for path in ALL}
    assert {name: lines for name, lines in files.items() if lines > MOST_LINES} == {}
    shipped = [path for path in ALL if ROOT / "tests" not in path.parents]
    functions = [entry for path in shipped for entry in functions_of(path)]
    assert [entry for entry in functions if entry[1] > MOST_CODE_LINES] == []


@pytest.mark.slow
def test_most_functions_of_the_package_are_short() -> None:
    sizes = [size for path in SOURCES for _, size in functions_of(path)]
    assert median(sizes) <= 10
    assert quantiles(sizes, n=10)[-1] <= 30


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and list the top-level packages it has imported."""
    listing = "print('modules:', *{name.partition('.')[0] for name in sys.modules})"
    script = f"import sys\n{code}\n{listing}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    return set(done.stdout.rpartition("modules:")[2].split())


HEAVY = {"torch", "numpy", "matplotlib", "torchvision", "rich", "jinja2", "pandas"}
NOT_OF_VERIFY = (HEAVY - {"torch", "numpy"}) | {"PIL", "fsspec", "pytorch_optimizer", "yaml"}
"""docs/how-to/verify.md says which packages it can do without."""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import paceline; paceline.__version__", HEAVY),
        ("from paceline.cli.app import main; main(['--help'])", HEAVY - {"rich"}),
        ("from paceline.cli.app import main; main(['train', '--help'])", HEAVY - {"rich"}),
        ("from paceline.cli.app import main; main(['recipes'])", HEAVY - {"rich"}),
        ("from paceline.cli.app import main; main(['runs'])", HEAVY),
        ("from paceline.cli.app import main; main(['--completion', 'bash'])", HEAVY - {"rich"}),
        ("import paceline.training.config, paceline.recipes.digits", HEAVY),
        ("import paceline.runtime.copying, paceline.checkpoint.remote.__main__", HEAVY),
        ("import paceline.launch.local.launcher, paceline.launch.local.worker", HEAVY),
        (
            "import paceline.cli.commands.verify, paceline.verify.study, paceline.script.verified",
            NOT_OF_VERIFY,
        ),
    ],
    ids=[
        "package",
        "help",
        "train-help",
        "recipes",
        "runs",
        "completion",
        "options",
        "copies",
        "launch",
        "verify",
    ],
)
@pytest.mark.core_cases(3)
def test_what_needs_no_torch_imports_none(code: str, heavy: set[str]) -> None:
    assert modules_after(code) & heavy == set()


def test_every_option_has_help() -> None:
    for option in training_options().values():
        assert option.help[0].isupper(), option.name
        assert option.help.endswith("."), option.name


def test_flags_change_only_on_purpose() -> None:
    """Scripts rely on names and defaults: change tests/flags.txt and the changelog with them."""
    options = [*training_options().values(), *cluster_options()]
    listed = [f"{flag(o.name)} {o.default!r}" for o in options]
    assert listed == FLAGS.read_text().splitlines()


@pytest.mark.parametrize("name", ["Job", "recipe", "Recipe", "TensorData", "PacelineError"])
def test_public_names_are_found_when_they_are_used(name: str) -> None:
    import paceline

    assert name in paceline.__all__
    assert getattr(paceline, name).__name__ == name
    assert len(paceline.__all__) <= 15


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import paceline

    with pytest.raises(AttributeError, match="has no attribute 'Jobs'"):
        paceline.Jobs  # noqa: B018
