"""A user's own launching command: what it starts, and the same command for other workers."""

import io
import math
import re
from argparse import REMAINDER, ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, cast, final

from paceline.errors import UsageError
from paceline.options.figures import listed

WORKERS = "{workers}"
"""Stands for the number of workers wherever it is in a command."""

Launcher = Literal["torchrun", "accelerate", "python"]

_EXAMPLE = "`paceline verify -- torchrun --nproc-per-node 2 train.py`"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = r"python[\d.]*\n(?:-[WX]\n.*\n|-(?!m\n).*\n)*"
"""With its own options, which come before a module or a script."""
_CALL = re.compile(
    rf"""(?:(?:uv|poetry|pdm|pipenv|hatch|pixi|conda)\nrun\n(?:.*\n)*?)?  # a project's environment
    (?:.*/)?(?:
      (?P<torchrun>torchrun\n|{_PYTHON}-m\ntorch\.distributed\.(?:run|launch)\n)
     |(?P<accelerate>accelerate[-\n]launch\n
       |{_PYTHON}-m\naccelerate(?:\.commands\.launch|(?:\.commands\.accelerate_cli)?\nlaunch)\n)
     |(?P<python>{_PYTHON}))""",
    re.VERBOSE,
)
"""The words that call a launcher, a line each."""
_PASSED_ON = frozenset({"-u", "-B"})
"""Options of Python that change nothing of a training."""

_LEFT_OUT = frozenset(
    "nnodes node_rank master_addr master_port local_addr rdzv_backend rdzv_conf rdzv_endpoint "
    "rdzv_id max_restarts log_dir redirects tee num_machines machine_rank main_process_ip "
    "main_process_port same_network".split()
)
"""Options of torchrun and accelerate that say where workers run and meet, or keep logs."""
_REPLACED = frozenset(
    "nproc_per_node standalone run_path num_processes multi_gpu cpu module".split()
)
"""Options that keep their effect in another form."""
_NOT_DATA_PARALLEL = (
    "use_deepspeed use_fsdp use_megatron_lm use_parallelism_config tpu tpu_use_cluster "
    "mpirun_hostfile".split()
)
"""Options of accelerate launch whose trainings aren't DistributedDataParallel's."""


@final
@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A launching command, taken apart."""

    launcher: Launcher
    program: tuple[str, ...]
    """The words that call the launcher, such as `python -m torch.distributed.run`."""
    script: str
    """A file, or a module's name."""
    arguments: tuple[str, ...]
    """The script's own."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Those of the launcher that aren't its defaults."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set before the command, as in `FOO=1 torchrun ...`."""

    @property
    def workers(self) -> int | None:
        """How many workers it starts on all its nodes; None where it doesn't say so in figures."""
        if self.launcher == "torchrun":
            counts = [str(self.options.get(name, 1)) for name in ("nnodes", "nproc_per_node")]
        else:
            counts = [str(self.options.get("num_processes"))]
        return math.prod(map(int, counts)) if all(map(str.isdecimal, counts)) else None

    @property
    def follows_workers(self) -> bool:
        """Whether `{workers}` stands anywhere in it."""
        words = (*self.options.values(), *self.arguments, *self.variables.values())
        return any(WORKERS in str(word) for word in words)

    @property
    def is_module(self) -> bool:
        """Whether the script is a module's name."""
        return "module" in self.options

    @property
    def has_launcher(self) -> bool:
        """Whether a program other than the script itself starts the workers."""
        return self.launcher != "python"

    @property
    def requests_cpu(self) -> bool:
        """Whether it says that no GPU is to be used."""
        return "cpu" in self.options


def find_launcher(words: Sequence[str]) -> re.Match[str] | None:
    """Find the words at the beginning of a command that call a launcher, or Python."""
    return _CALL.match("".join(f"{word}\n" for word in words))


def read_launch_command(words: Sequence[str]) -> LaunchCommand:
    """Take a launching command apart.

    Args:
        words: As a shell gives them; variables may be set before it, by `env` as well.

    Raises:
        UsageError: Its launcher isn't known, or it can't be observed.
    """
    variables, words = _variables(tuple(words))
    call = find_launcher(words)
    if call is None:
        raise UsageError(_unknown(*words[:1]))
    launcher, program = cast(Launcher, call.lastgroup), tuple(call[0].splitlines())
    options = _parsed(launcher, program, words[len(program) :])
    shown = " ".join(program)
    for name in ("no_python", *_NOT_DATA_PARALLEL):
        if name in options:
            raise UsageError(
                f"`{shown} --{name}` can't be observed: verify compares Python scripts that train "
                f"by DistributedDataParallel. Leave --{name} out to check data, loss and schedule"
            )
    command = LaunchCommand(
        launcher=launcher,
        program=program,
        script=str(options.pop("training_script")),
        arguments=tuple(cast(list[str], options.pop("training_script_args", []))),
        options=options,
        variables=variables,
    )
    if launcher == "python" and not command.follows_workers:
        shown = " ".join(words)
        raise UsageError(
            f"how many workers `{shown}` starts can't be known, nor how it is made to start one: "
            f"write {WORKERS} where the command gives their number, as in `paceline verify -- "
            f"{shown} --nprocs {WORKERS}`. A script that reads RANK and WORLD_SIZE is verified by "
            "its name, `paceline verify train.py`, or with its torchrun command"
        )
    return command


def command_for(command: LaunchCommand, workers: int, observer: Sequence[str]) -> list[str]:
    """Return the words that start observers of a script on a number of workers of this machine.

    Args:
        command: Of torchrun or accelerate.
        observer: A module that runs a script under observation, and its arguments.
    """
    replaced = _LEFT_OUT | _REPLACED
    options = {name: v for name, v in command.options.items() if name not in replaced}
    options |= _options_for(command.launcher, workers)
    given = [f"--{name}" + f"={value}" * (value is not True) for name, value in options.items()]
    return [*command.program, *(with_workers(word, workers) for word in given), "-m", *observer]


def _options_for(launcher: Launcher, workers: int) -> dict[str, object]:
    if launcher == "torchrun":
        # A port of its own, and no second attempt: its records would be taken for the first one's.
        return {"standalone": True, "nnodes": 1, "nproc_per_node": workers, "max_restarts": 0}
    # Without it accelerate starts one process only where there are no GPUs.
    several: dict[str, object] = {} if workers == 1 else {"multi_gpu": True}
    return several | {"num_machines": 1, "num_processes": workers, "main_process_port": 0}


def left_out(command: LaunchCommand) -> list[str]:
    """Return the options of a command that do nothing here.

    Args:
        command: Of torchrun or accelerate.
    """
    usual = _options_for(command.launcher, 1)
    given = ((name, v) for name, v in command.options.items() if name in _LEFT_OUT)
    return [f"--{name}" for name, value in given if str(value) != str(usual.get(name))]


def variables_for(command: LaunchCommand, workers: int, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables that the command sets, for a number of workers.

    Args:
        command: Of any launcher.
    """
    given = {n: with_workers(value, workers) for n, value in command.variables.items()}
    if not on_cpu:
        return given
    # accelerate takes the CPU for several processes only where this says so.
    accelerate = {"ACCELERATE_USE_CPU": "true"} if command.launcher == "accelerate" else {}
    return given | accelerate | {"CUDA_VISIBLE_DEVICES": ""}


def with_workers(word: str, workers: int) -> str:
    """Put the number of workers where `{workers}` stands."""
    return word.replace(WORKERS, str(workers))


def _variables(words: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Split assignments at the beginning, and an `env` before them, from the command.

    Raises:
        UsageError: A variable is Paceline's.
    """
    found: dict[str, str] = {}
    words = words[1:] if words and PurePath(words[0]).name == "env" else words
    while words and (given := _ASSIGNMENT.fullmatch(words[0])):
        found[given[1]], words = given[2], words[1:]
    if ours := [name for name in found if name.startswith("PACELINE_")]:
        raise UsageError(
            f"{listed(ours)} in the command: set Paceline's variables before `paceline verify`, or "
            "give its options before --"
        )
    return found, words


def _unknown(word: str = "") -> str:
    if not word:
        return f"a launching command is missing after --: for example {_EXAMPLE}"
    if word.endswith(".py"):
        return f"{word} isn't a command: write `python {word}`, or give the script before --"
    known = "known are torchrun, accelerate launch and python, also behind `uv run`"
    if word in ("fabric", "lightning"):
        return (
            f"`{word} run` can't be observed: {known}. It is torchrun with variables set: give "
            "`paceline verify -- env LT_CLI_USED=1 LT_STRATEGY=ddp LT_DEVICES={workers} torchrun "
            "--nproc-per-node 2 train.py`, with LT_ACCELERATOR and LT_PRECISION where you set them"
        )
    return (
        f"{word!r} is no launcher whose workers can be observed: {known}. A script that reads RANK "
        "and WORLD_SIZE, as torchrun sets them, can be verified by its name, `paceline verify "
        f"train.py`, or with a command such as {_EXAMPLE}"
    )


def _parsed(launcher: Launcher, program: Sequence[str], words: Sequence[str]) -> dict[str, object]:
    """Read a launcher's options, script and arguments by its own parser; without defaults.

    Raises:
        UsageError: The launcher would refuse them, or isn't installed.
    """
    if launcher == "torchrun":
        from torch.distributed.launch import parse_args as parse  # as torchrun, and has --use-env
    elif launcher == "accelerate":
        try:
            from accelerate.commands.launch import launch_command_parser
        except ImportError as error:
            raise UsageError(f"accelerate isn't installed beside Paceline: {error}") from error
        parse = launch_command_parser().parse_args
    else:
        parse = _python_parser(program).parse_args
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            given, usual = vars(parse([*words])), vars(parse(["script"]))
    except SystemExit as error:
        text = printed.getvalue().rpartition("error: ")[2].strip() if error.code else "no script"
        raise UsageError(f"`{' '.join(program)}` can't start this: {text}") from error
    named = given.pop("nondefault", ())  # by accelerate, whose file of settings yields to them
    return {name: v for name, v in given.items() if v != usual[name] or name in named}


def _python_parser(program: Sequence[str]) -> ArgumentParser:
    if unknown := [word for word in program[1:] if word not in _PASSED_ON]:
        raise UsageError(
            f"{unknown[0]} can't be passed on to the workers: leave it out, or launch by "
            f"`{' '.join(program)} -m torch.distributed.run`"
        )
    parser = ArgumentParser(add_help=False)
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=REMAINDER)
    return parser
