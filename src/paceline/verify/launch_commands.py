"""A user's own launching command: what it starts, and the same command for other workers. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, final

from paceline.errors import UsageError
from paceline.options.figures import listed

WORKERS = "{workers}"
"""Stands for the number of workers wherever it is in a command."""

Launcher = Literal["torchrun", "accelerate", "python"]

_KNOWN = ("torchrun", "accelerate launch", "python")
_EXAMPLE = "`paceline verify -- torchrun --nproc-per-node 2 train.py`"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_ACCELERATE_MODULES = frozenset({"accelerate.commands.launch"})
_ACCELERATE_COMMANDS = frozenset({"accelerate", "accelerate.commands.accelerate_cli"})
_PYTHON_FLAGS = frozenset({"-u", "-B"})
"""Options of Python that change nothing of a training."""
_PYTHON_VALUES = frozenset({"-W", "-X"})
_MODULE = frozenset({"m", "module"})

TORCHRUN_FLAGS = frozenset(
    "h help standalone m module no_python run_path use_env virtual_local_rank".split()
)
"""Options of torchrun without a value; every other one has one."""
_OF_TORCHRUN = frozenset(
    "nproc_per_node nnodes node_rank standalone master_addr master_port local_addr rdzv_backend "
    "rdzv_conf rdzv_endpoint rdzv_id max_restarts run_path log_dir r redirects t tee".split()
)
"""Options of torchrun that say where workers run and meet, or keep logs: replaced or left out."""

_KEPT_IN_EFFECT = frozenset(
    "nproc_per_node standalone run_path num_processes multi_gpu cpu".split()
)
"""Of these, the options that keep their effect in another form."""
_USUAL = frozenset({("nnodes", "1"), ("num_machines", "1"), ("max_restarts", "0")})

ACCELERATE_FLAGS = frozenset(
    "h help q quiet m module cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph "
    "dynamo_use_regional_compilation enable_cpu_affinity fp8_use_autocast_during_eval multi_gpu "
    "no_python no_tpu_cluster same_network tpu tpu_cluster tpu_use_sudo use_deepspeed use_fsdp "
    "use_megatron_lm use_parallelism_config".split()
)
"""Options of accelerate launch without a value."""
_OF_ACCELERATE = frozenset(
    "num_processes num_machines machine_rank main_process_ip main_process_port same_network "
    "rdzv_backend rdzv_conf max_restarts multi_gpu cpu log_dir t tee".split()
)
_NOT_DATA_PARALLEL = (
    "use_deepspeed",
    "use_fsdp",
    "use_megatron_lm",
    "use_parallelism_config",
    "tpu",
    "tpu_cluster",
    "mpirun_hostfile",
)
"""Options of accelerate launch whose trainings aren't observed: not DistributedDataParallel's."""


@final
@dataclass(frozen=True, kw_only=True)
class LauncherOption:
    """One of a launcher's own options."""

    name: str
    """Without dashes in front, and with `_` for `-`."""
    words: tuple[str, ...]
    """As it was given."""
    value: str = ""
    """Empty for a flag."""


@final
@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A launching command, taken apart."""

    launcher: Launcher
    program: tuple[str, ...]
    """The words that call the launcher, such as `python -m torch.distributed.run`."""
    script: str
    """A file, or a module's name."""
    is_module: bool
    arguments: tuple[str, ...]
    """The script's own."""
    options: tuple[LauncherOption, ...] = ()
    """The launcher's own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set before the command, as in `FOO=1 torchrun ...`."""

    @property
    def workers(self) -> int | None:
        """How many workers it starts on all its nodes; None where it doesn't say so in figures."""
        if self.launcher == "torchrun":
            counts = (self.option("nnodes", "1"), self.option("nproc_per_node", "1"))
            is_known = all(count.isdecimal() for count in counts)
            return int(counts[0]) * int(counts[1]) if is_known else None
        count = self.option("num_processes", "")
        return int(count) if count.isdecimal() else None

    @property
    def follows_workers(self) -> bool:
        """Whether `{workers}` stands anywhere in it."""
        given = [word for option in self.options for word in option.words]
        return any(WORKERS in w for w in (*given, *self.arguments, *self.variables.values()))

    @property
    def has_launcher(self) -> bool:
        """Whether a program other than the script itself starts the workers."""
        return self.launcher != "python"

    @property
    def requests_cpu(self) -> bool:
        """Whether it says that no GPU is to be used."""
        return self.launcher == "accelerate" and self.has("cpu")

    def option(self, name: str, default: str) -> str:
        """Give the last value of one of the launcher's options."""
        return next((o.value for o in reversed(self.options) if o.name == name), default)

    def has(self, name: str) -> bool:
        """Tell whether one of the launcher's options was given."""
        return any(option.name == name for option in self.options)


def is_launcher(word: str) -> bool:
    """Tell whether a word calls a launcher that is known, or Python."""
    name = PurePath(word).name
    known = ("torchrun", "accelerate", "accelerate-launch")
    return name in known or _PYTHON.fullmatch(name) is not None


def read_launch_command(words: Sequence[str]) -> LaunchCommand:
    """Take a launching command apart.

    Args:
        words: As a shell gives them; variables may be set before it, by `env` as well.

    Raises:
        UsageError: Its launcher isn't known, or it can't be observed.
    """
    variables, words = _variables(tuple(words))
    if not words:
        raise UsageError(f"a launching command is missing after --: for example {_EXAMPLE}")
    launcher, program, rest = _launcher(words)
    if launcher == "python":
        return _python_command(program, rest, variables)
    flags = TORCHRUN_FLAGS if launcher == "torchrun" else ACCELERATE_FLAGS
    options, rest = _options(rest, flags)
    name = " ".join(program)
    if not rest:
        raise UsageError(f"the command names no script: give it after the options of {name}")
    command = LaunchCommand(
        launcher=launcher,
        program=program,
        options=options,
        script=rest[0],
        is_module=any(option.name in _MODULE for option in options),
        arguments=tuple(rest[1:]),
        variables=variables,
    )
    _check(command)
    return command


def command_for(command: LaunchCommand, workers: int, observer: Sequence[str]) -> list[str]:
    """Give the words that start the same script on a number of workers of this machine.

    Args:
        command: Of torchrun or accelerate.
        observer: A module that runs a script under observation, and its own arguments before that.
    """
    replaced, more = _REPLACED[command.launcher]
    left = [o for o in command.options if o.name not in replaced and o.name not in _MODULE]
    own = [word for option in left for word in option.words]
    script = (*(("-m",) if command.is_module else ()), command.script)
    words = [*own, *more(workers), "-m", *observer, *script, *command.arguments]
    return [*command.program, *(with_workers(word, workers) for word in words)]


def left_out(command: LaunchCommand) -> list[str]:
    """Name the options of a command that do nothing here, as they were given.

    Args:
        command: Of torchrun or accelerate.
    """
    replaced, _ = _REPLACED[command.launcher]
    dropped = [o for o in command.options if o.name in replaced - _KEPT_IN_EFFECT]
    return list(dict.fromkeys(o.words[0] for o in dropped if (o.name, o.value) not in _USUAL))


def variables_for(command: LaunchCommand, workers: int, *, on_cpu: bool) -> dict[str, str]:
    """Give the variables that the command sets, for a number of workers.

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
    """Take assignments off the beginning, and an `env` before them."""
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if assigned := _ASSIGNMENT.fullmatch(word):
            found[assigned[1]] = assigned[2]
        elif PurePath(word).name != "env":
            _check_variables(word, found)
            return found, words[place:]
    return found, ()


def _check_variables(word: str, variables: Mapping[str, str]) -> None:
    if word.startswith("-"):
        raise UsageError(
            f"{word} stands before the launcher: of `env` only assignments are read, as in "
            "`env OMP_NUM_THREADS=1 torchrun ...`"
        )
    ours = [name for name in variables if name.startswith("PACELINE_")]
    if ours:
        raise UsageError(
            f"{listed(ours)} in the command: set Paceline's variables before `paceline verify`, or "
            "give its options before --"
        )


def _launcher(words: tuple[str, ...]) -> tuple[Launcher, tuple[str, ...], tuple[str, ...]]:
    """Part the words that call the launcher from what it is given."""
    name = PurePath(words[0]).name
    if name == "torchrun":
        return "torchrun", tuple(words[:1]), words[1:]
    if name == "accelerate-launch":
        return "accelerate", tuple(words[:1]), words[1:]
    if name == "accelerate":
        return _accelerate(words, 1)
    if _PYTHON.fullmatch(name):
        return _of_python(words)
    raise UsageError(_unknown(words[0]))


def _of_python(words: tuple[str, ...]) -> tuple[Launcher, tuple[str, ...], tuple[str, ...]]:
    """Tell which launcher `python -m ...` calls; Python itself where it is none of them."""
    # Python's own options come before the script or the module.
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        place += 2 if words[place] in _PYTHON_VALUES else 1
    module = words[place + 1] if words[place : place + 1] == ("-m",) and words[place + 1 :] else ""
    if module in _TORCHRUN_MODULES:
        return "torchrun", tuple(words[: place + 2]), words[place + 2 :]
    if module in _ACCELERATE_MODULES:
        return "accelerate", tuple(words[: place + 2]), words[place + 2 :]
    if module in _ACCELERATE_COMMANDS:
        return _accelerate(words, place + 2)
    return "python", tuple(words[:place]), words[place:]


def _accelerate(
    words: tuple[str, ...], place: int
) -> tuple[Launcher, tuple[str, ...], tuple[str, ...]]:
    if words[place : place + 1] != ("launch",):
        raise UsageError(f"`{' '.join(words[: place + 1])}` starts no training: accelerate launch")
    return "accelerate", tuple(words[: place + 1]), words[place + 1 :]


def _unknown(word: str) -> str:
    if word.endswith(".py"):
        return f"{word} isn't a command: write `python {word}`, or give the script before --"
    return (
        f"{word!r} is no launcher whose workers can be observed: known are {listed(_KNOWN)}. Give "
        f"the command with one of these, such as {_EXAMPLE}, or the script alone: "
        "`paceline verify train.py`"
    )


def _options(
    words: tuple[str, ...], flags: frozenset[str]
) -> tuple[tuple[LauncherOption, ...], tuple[str, ...]]:
    """Read a launcher's options, as argparse does, up to the script."""
    found: list[LauncherOption] = []
    place = 0
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        place += 1
        if word == "--":
            break
        given, joined, value = word.partition("=")
        if not word.startswith("--") and len(given) > 2:
            given, joined, value = word[:2], "=", word[2:].lstrip("=")  # as in `-r3`
        name = given.lstrip("-").replace("-", "_")
        used: tuple[str, ...] = (word,)
        # The value may be a word of its own.
        if name not in flags and not joined:
            if place == len(words):
                raise UsageError(f"{word} has no value")
            value = words[place]
            used, place = (word, value), place + 1
        found.append(LauncherOption(name=name, words=used, value=value))
    return tuple(found), words[place:]


def _check(command: LaunchCommand) -> None:
    """Refuse what can't be observed, or can't be compared on several numbers of workers."""
    if command.has("no_python"):
        raise UsageError(
            "the command starts another program than Python (--no-python): only Python code can be "
            "observed. Leave that option out, and give the script"
        )
    others = [name for name in _NOT_DATA_PARALLEL if command.has(name)]
    if others:
        flag = f"--{others[0]}"
        raise UsageError(
            f"a training by `accelerate launch {flag}` can't be observed: verify compares those of "
            f"DistributedDataParallel. Leave {flag} out to check data, loss and schedule"
        )


def _python_command(
    program: tuple[str, ...], words: tuple[str, ...], variables: Mapping[str, str]
) -> LaunchCommand:
    """Read `python SCRIPT`, whose number of workers is known by `{workers}` alone."""
    unknown = [word for word in program[1:] if word not in _PYTHON_FLAGS]
    if unknown:
        raise UsageError(
            f"{unknown[0]} can't be passed on to the workers: leave it out, or launch by "
            f"`{' '.join(program)} -m torch.distributed.run`"
        )
    is_module = words[:1] == ("-m",)
    left = words[1:] if is_module else words
    if not left:
        raise UsageError(f"`{' '.join([*program, *words])}` names no script")
    command = LaunchCommand(
        launcher="python",
        program=program,
        script=left[0],
        is_module=is_module,
        arguments=tuple(left[1:]),
        variables=variables,
    )
    if not command.follows_workers:
        shown = " ".join([*program, *words])
        raise UsageError(
            f"how many workers `{shown}` starts can't be known, nor how it is made to start one: "
            f"write {WORKERS} where the command gives their number, as in `paceline verify -- "
            f"{shown} --nprocs {WORKERS}`. A script that reads RANK and WORLD_SIZE is verified by "
            "its name, `paceline verify train.py`, or with its torchrun command"
        )
    return command


def _torchrun_options(workers: int) -> tuple[str, ...]:
    # A port of its own, and no second attempt: its records would be taken for the first one's.
    return ("--standalone", "--nnodes=1", f"--nproc_per_node={workers}", "--max_restarts=0")


def _accelerate_options(workers: int) -> tuple[str, ...]:
    words = ("--num_machines", "1", "--num_processes", str(workers))
    # Without it accelerate starts one process only where there are no GPUs.
    return words if workers == 1 else ("--multi_gpu", *words, "--main_process_port", "0")


_REPLACED: Mapping[str, tuple[frozenset[str], Callable[[int], tuple[str, ...]]]] = {
    "torchrun": (_OF_TORCHRUN, _torchrun_options),
    "accelerate": (_OF_ACCELERATE, _accelerate_options),
}
"""By launcher: the options that are left out, and those that take their place."""
