"""Launching commands are taken apart as their launchers do, and made to start other workers."""

import shlex

import pytest

from paceline.errors import UsageError
from paceline.verify.launch_commands import (
    command_for,
    find_launcher,
    left_out,
    read_launch_command,
    variables_for,
)

OBSERVER = ("watch", "trial.json")
RUN = "--standalone --nnodes=1 --nproc_per_node={n} --max_restarts=0 -m watch trial.json"
ONE = "--num_machines=1 --num_processes=1 --main_process_port=0 -m watch trial.json"
SEVERAL = f"--multi_gpu {ONE}".replace("processes=1", "processes=3")


def for_workers(command: str, workers: int) -> str:
    words = command_for(read_launch_command(shlex.split(command)), workers, OBSERVER)
    return shlex.join(words)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 0.1", f"torchrun {RUN}"),
        ("torchrun --nproc_per_node=2 train.py", f"torchrun {RUN}"),
        (
            "uv run --with x torchrun --nproc-per-node=2 a.py",
            f"uv run --with x torchrun {RUN}",
        ),
        ("torchrun --standalone train.py", f"torchrun {RUN}"),
        ("bin/torchrun --nproc-per-node gpu -- train.py", f"bin/torchrun {RUN}"),
        ("torchrun --nnodes=2 --nproc-per-node=4 train.py", f"torchrun {RUN}"),
        (
            "torchrun --nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint a:29500 "
            "--rdzv_id=7 --master-addr a --master_port=29500 --max-restarts 3 train.py",
            f"torchrun {RUN}",
        ),
        (
            "torchrun --role trainer --monitor-interval=1 --virtual-local-rank train.py",
            f"torchrun --monitor_interval=1.0 --role=trainer --virtual_local_rank {RUN}",
        ),
        # Logs of workers would lie among the user's files.
        ("torchrun -r3 -t 3 --log-dir logs train.py", f"torchrun {RUN}"),
        ("torchrun -m pkg.train --nproc-per-node 9", f"torchrun {RUN}"),
        ("torchrun --module --run-path pkg.train", f"torchrun {RUN}"),
        ("torchrun --role {workers} train.py", f"torchrun --role={{n}} {RUN}"),
        (
            "python3.11 -u -W ignore -m torch.distributed.run --nproc_per_node 2 train.py",
            f"python3.11 -u -W ignore -m torch.distributed.run {RUN}",
        ),
        (
            "python -m torch.distributed.launch --use-env --nproc_per_node 2 train.py",
            f"python -m torch.distributed.launch --use_env {RUN}",
        ),
    ],
)
def test_torchrun_starts_as_many_on_this_machine(command: str, expected: str) -> None:
    for workers in (1, 3):
        assert for_workers(command, workers) == expected.replace("{n}", str(workers))


def test_what_stands_behind_the_script_is_its_own() -> None:
    command = read_launch_command("torchrun -m pkg.train --nproc-per-node {workers}".split())
    assert (command.script, command.is_module, command.workers) == ("pkg.train", True, 1)
    assert (command.arguments, command.follows_workers) == (("--nproc-per-node", "{workers}"), True)


@pytest.mark.parametrize(
    "launch",
    [
        "accelerate launch",
        "accelerate-launch",
        "python -m accelerate.commands.launch",
        "python -m accelerate launch",
        "python -m accelerate.commands.accelerate_cli launch",
    ],
)
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--num_processes 2 --cpu", ""),
        ("--multi_gpu --num-processes=8 --num_machines 2 --machine_rank 1", ""),
        ("--main_process_ip a --main_process_port 29500 --same_network --cpu", ""),
        ("--dynamo_backend no -q", "--quiet --dynamo_backend=no"),
    ],
)
def test_accelerate_starts_as_many_on_this_machine(launch: str, options: str, kept: str) -> None:
    pytest.importorskip("accelerate")
    kept = f" {kept}".rstrip()
    command = f"{launch} {options} train.py --lr 1"
    assert for_workers(command, 1) == f"{launch}{kept} {ONE}"
    assert for_workers(command, 3) == f"{launch}{kept} {SEVERAL}"


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        ("torchrun --nproc-per-node 2 train.py", 2),
        ("torchrun --nproc_per_node=2 --nproc-per-node=3 train.py", 3),
        ("torchrun --nnodes 2 --nproc-per-node=4 train.py", 8),
        ("torchrun train.py", 1),
        ("torchrun --nproc-per-node auto train.py", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 train.py", None),
        ("torchrun --nproc-per-node {workers} train.py", None),
        ("accelerate launch --num_processes 4 train.py", 4),
        ("accelerate launch --num_processes=4 --num_machines 2 train.py", 4),
        ("accelerate launch train.py", None),
        ("python train.py --nprocs {workers}", None),
    ],
)
def test_how_many_workers_a_command_starts(command: str, workers: int | None) -> None:
    assert read_launch_command(shlex.split(command)).workers == workers


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --standalone --nproc-per-node 2 --nnodes=1 --max-restarts 0 train.py", []),
        ("torchrun --nnodes=2 --log-dir a -r3 train.py", ["--nnodes", "--log_dir", "--redirects"]),
        ("torchrun --role a train.py --log-dir b", []),
        ("accelerate launch --num_processes 2 --num_machines 1 --multi_gpu --cpu train.py", []),
        (
            "accelerate launch --machine_rank 1 --same_network -m a",
            ["--same_network", "--machine_rank"],
        ),
    ],
)
def test_options_without_effect_are_named(command: str, expected: list[str]) -> None:
    assert left_out(read_launch_command(shlex.split(command))) == expected


@pytest.mark.parametrize("before", ["", "env ", "/usr/bin/env "])
def test_variables_before_the_command(before: str) -> None:
    words = shlex.split(f"{before}FOO=1 'BAR=a b=c' NUMBER={{workers}} torchrun a.py X=1")
    command = read_launch_command(words)
    given = {"FOO": "1", "BAR": "a b=c", "NUMBER": "3"}
    assert variables_for(command, 3, on_cpu=False) == given
    assert variables_for(command, 3, on_cpu=True) == {**given, "CUDA_VISIBLE_DEVICES": ""}
    assert command.arguments == ("X=1",)


def test_accelerate_is_told_to_leave_gpus_alone() -> None:
    command = read_launch_command("accelerate launch --cpu --num_processes 2 a.py".split())
    assert command.requests_cpu
    expected = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    assert variables_for(command, 2, on_cpu=True) == expected
    assert not read_launch_command("accelerate launch --num_processes 2 a.py".split()).requests_cpu


@pytest.mark.parametrize(
    ("command", "is_module", "variables"),
    [
        ("python -u train.py --nprocs {workers}", False, {}),
        ("python3 -m pkg.train --nprocs {workers}", True, {}),
        ("NPROCS={workers} python train.py", False, {"NPROCS": "2"}),
    ],
)
def test_python_starts_a_script_that_is_given_the_number(
    command: str, is_module: bool, variables: dict[str, str]
) -> None:
    found = read_launch_command(shlex.split(command))
    assert found.script == ("pkg.train" if is_module else "train.py")
    assert (found.is_module, found.has_launcher) == (is_module, False)
    assert variables_for(found, 2, on_cpu=False) == variables


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "a launching command is missing after --"),
        ("FOO=1", "a launching command is missing after --"),
        ("mpirun -n 2 python train.py", "known are torchrun, accelerate launch and python"),
        ("srun train.py", "'srun' is no launcher"),
        ("deepspeed train.py", "'deepspeed' is no launcher"),
        ("bash run.sh", "'bash' is no launcher"),
        ("train.py --lr 1", "write `python train.py`"),
        ("env -i torchrun train.py", "'-i' is no launcher"),
        ("PACELINE_SHARDS=4 torchrun train.py", "PACELINE_SHARDS in the command"),
        ("torchrun --nproc-per-node 2", "training_script"),
        ("torchrun --nproc-per-node", "--nproc-per-node/--nproc_per_node: expected one argument"),
        ("torchrun --help", "`torchrun` can't start this: no script"),
        ("torchrun --no-python --nproc-per-node 2 ./a", "--no_python` can't be observed"),
        ("accelerate config", "known are torchrun, accelerate launch"),
        ("uv run train.py", "'uv' is no launcher"),
        ("fabric run train.py", "known are torchrun, accelerate launch"),
        ("accelerate launch --use_fsdp train.py", "`accelerate launch --use_fsdp`"),
        ("accelerate launch --mpirun_hostfile a train.py", "--mpirun_hostfile"),
        ("python", "`python` can't start this"),
        ("python -m", "`python` can't start this"),
        ("python -c 1", "-c can't be passed on"),
        ("python -O train.py {workers}", "-O can't be passed on"),
        ("python train.py", "as in `paceline verify -- python train.py --nprocs {workers}`"),
    ],
)
def test_what_cannot_be_observed_is_refused(command: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_launch_command(shlex.split(command))
    assert message in str(raised.value)


def test_launchers_are_known_by_their_names() -> None:
    known = "torchrun", "accelerate launch", "/usr/bin/python3", "python3.11", "uv run torchrun"
    for command in (*known, "accelerate-launch"):
        assert find_launcher(command.split()) is not None
    for command in ("digits", "python.py", "train.py:build", "mpirun", "uv run train.py"):
        assert find_launcher(command.split()) is None


def test_all_options_of_a_launcher_can_be_given_by_the_names_that_its_parser_has() -> None:
    for launcher in ("torch.distributed.run", "accelerate.commands.launch"):
        module = pytest.importorskip(launcher)
        make = getattr(module, "get_args_parser", None) or module.launch_command_parser
        for option in (o for o in vars(make())["_actions"] if o.option_strings):
            assert f"--{option.dest}" in option.option_strings or option.dest == "tpu_use_cluster"
            assert option.nargs in (None, 0)
