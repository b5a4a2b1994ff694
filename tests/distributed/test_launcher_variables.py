"""One table for all launchers and services: what they set, and what is read from it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.distributed.environment import detect_launchers, read_placement
from paceline.distributed.launcher_variables import port_of_job, port_of_name
from paceline.distributed.placement import NodePlacement, Placement
from paceline.errors import UsageError

SRUN = {  # Slurm 22.05, `srun -N2 --ntasks=6`, rank 5 on the second node
    "SLURM_JOB_ID": "815",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "4(x3)",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_JOB_NODELIST": "gpu[007-009]",
    "SLURM_STEP_NODELIST": "gpu[008-009]",
}
SRUN_FOUND = Placement(
    rank=5,
    world_size=6,
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    nodes=2,
    source="slurm",
    master_addr="gpu008",
    master_port=port_of_job(815, 2),
)
BATCH_SCRIPT = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NNODES")} | {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": SRUN["SLURM_JOB_NODELIST"],
}
MPIRUN = {  # Open MPI 4.1, all on one host
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2344026113",
}
HYDRA = {  # MPICH 4, Intel MPI
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}


def mpi(**changed: object) -> Placement:
    common: dict[str, object] = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 3,
        "local_world_size": 4,
        "source": "openmpi",
        "master_addr": "127.0.0.1",
        "master_port": port_of_name("2344026113"),
    }
    return Placement(**(common | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (SRUN, SRUN_FOUND),
        (SRUN | {"SLURM_RESTART_COUNT": "2"}, replace(SRUN_FOUND, attempt=2)),  # requeued twice
        (BATCH_SCRIPT, Placement()),
        (SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, Placement()),  # salloc's shell
        (MPIRUN, mpi()),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            mpi(local_rank=1, local_world_size=2, settled=False, master_addr=""),
        ),
        (
            MPIRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "29777"},
            mpi(master_addr="a", master_port=29777),
        ),
        (
            HYDRA,
            mpi(
                rank=1,
                world_size=2,
                local_rank=1,
                local_world_size=2,
                source="mpich",
                master_port=29500,
            ),
        ),
    ],
    ids=["srun", "requeued", "sbatch", "salloc", "mpirun", "mpirun on nodes", "mpirun -x", "mpich"],
)
def test_workers(environment: Mapping[str, str], found: Placement) -> None:
    assert read_placement(environment) == found


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_NPROC_PER_NODE": "8",
                "PET_MASTER_ADDR": "job-node-0-0.job",
                "PET_MASTER_PORT": "29500",
            },
            NodePlacement(
                node_rank=1,
                nodes=2,
                workers=8,
                source="kubeflow",
                master_addr="job-node-0-0.job",
                master_port=29500,
            ),
        ),
        (
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
            NodePlacement(node_rank=0, nodes=1, workers=None, source="kubeflow"),
        ),
        (
            {
                "SM_HOSTS": '["algo-2", "algo-1"]',
                "SM_CURRENT_HOST": "algo-2",
                "SM_NUM_GPUS": "4",
            },
            NodePlacement(
                node_rank=1, nodes=2, workers=4, source="sagemaker", master_addr="algo-1"
            ),
        ),
        (
            {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0"},
            NodePlacement(
                node_rank=0, nodes=1, workers=1, source="sagemaker", master_addr="algo-1"
            ),
        ),
        (
            {
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
                "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            },
            NodePlacement(
                node_rank=1, nodes=2, workers=1, source="skypilot", master_addr="10.0.0.4"
            ),
        ),
    ],
    ids=["kubeflow", "kubeflow auto", "sagemaker", "sagemaker cpu", "skypilot"],
)
def test_nodes(environment: Mapping[str, str], found: NodePlacement) -> None:
    assert detect_launchers(environment).node == found
    expected = found.only_worker() if found.nodes > 1 else Placement()
    assert read_placement(environment) == expected


TORCH = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SKY = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}


@pytest.mark.parametrize(
    ("environments", "source", "address"),
    [
        ([SRUN, TORCH | {"MASTER_ADDR": "b"}], "torch", "b"),
        ([SRUN, MPIRUN], "openmpi", "127.0.0.1"),
        ([SRUN, {"PMI_RANK": "5", "PMI_SIZE": "6"}], "slurm", "gpu008"),  # srun --mpi=pmi2
        ([SRUN, HYDRA], "mpich", "127.0.0.1"),
        ([BATCH_SCRIPT, MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}], "openmpi", "gpu007"),
        ([SKY, MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}], "openmpi", "10.0.0.4"),
        ([SKY, SRUN], "slurm", "gpu008"),
    ],
)
def test_the_innermost_launcher_counts(
    environments: list[Mapping[str, str]], source: str, address: str
) -> None:
    environment = {name: value for part in environments for name, value in part.items()}
    found = read_placement(environment)
    assert (found.source, found.master_addr) == (source, address)


def test_a_task_of_srun_may_be_a_nodes_supervisor() -> None:
    (node,) = detect_launchers(SRUN).nodes
    task = read_placement(SRUN)
    assert (node.node_rank, node.nodes, node.workers) == (task.node_rank, task.nodes, None)
    assert (node.master_addr, node.master_port) == (task.master_addr, task.master_port)


def test_what_is_wrong_further_out_doesnt_count() -> None:
    seen = detect_launchers(TORCH | SRUN | {"SLURM_PROCID": "6"})
    assert [worker.source for worker in seen.workers] == ["torch"]
    assert seen.problems == ("what slurm calls RANK is 6, but WORLD_SIZE is 6",)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (SRUN | {"SLURM_PROCID": "6"}, "what slurm calls RANK is 6, but WORLD_SIZE is 6"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "not tasks per node .*'many'"),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE should be a whole number"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1:4"}, "PET_NNODES is '1:4': .*fixed number"),
        (
            {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "some"},
            "not a number of workers: 'some'",
        ),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "a"}, "SM_HOSTS should be a JSON list"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "'b', which is none of SM_HOSTS"),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, "skypilot says that this is node 2 of 2"),
    ],
)
def test_variables_that_cant_be_right(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect_launchers(environment)


def test_ports_of_jobs_lie_below_those_of_the_kernel() -> None:
    ports = {port_of_job(job, step) for job in range(0, 90_000, 7) for step in (0, 1)}
    assert min(ports) >= 20_000
    assert max(ports) < 32_000
    assert port_of_job(815) != port_of_job(816) != port_of_job(815, 1)
    assert port_of_name("a") == port_of_name("a") != port_of_name("b")
