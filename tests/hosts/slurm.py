"""A real Slurm over the hosts of a rig: its controller on the first, a node daemon on each.

Nodes are called n0, n1, ...: names that no resolver knows, as on clusters without DNS. What belongs
to Slurm is in one directory, and all of it ends with the rig.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.machine import Machine
from tests.hosts.rig import Rig
from tests.launch.waiting import patient, until

CPUS = 4
_LIMIT_S = 150.0
_CONFIGURATION = """\
ClusterName=rig
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdParameters=config_overrides
SlurmdTimeout=12
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
_GROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"


class Slurm:
    """A cluster that is up; users work on the rig's client."""

    def __init__(self, rig: Rig, directory: Path) -> None:
        """Start it, and wait until every node is idle."""
        self._rig = rig
        self._configuration = directory / "slurm.conf"
        directory.chmod(0o755)
        _write(rig, directory)
        controller = rig.host(0)
        _start_munge(controller, directory)
        configuration = ("-D", "-f", str(self._configuration))
        controller.start_daemon("/usr/sbin/slurmctld", *configuration)
        for n, host in enumerate(rig.hosts):
            host.start_daemon("/usr/sbin/slurmd", *configuration, "-N", f"n{n}")
        until(lambda: self._idle() == len(rig.hosts), _LIMIT_S)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a user's shell has set."""
        return {"SLURM_CONF": str(self._configuration), "OMP_NUM_THREADS": "1"}

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run a command on the client. Returns what it printed."""
        done = self._rig.client.run(command, env=self.environment, cwd=cwd)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def field(self, job_id: str, name: str) -> str:
        """Read a field of a job."""
        words = self.run("scontrol", "show", "job", "-o", job_id).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, job_id: str, state: str) -> None:
        """Wait until a job has a state."""
        until(lambda: self.field(job_id, "JobState") == state, _LIMIT_S)

    def start_again(self, job_id: str) -> None:
        """Let a job that was queued again start: Slurm would have it wait for two minutes."""
        self.wait_for(job_id, "PENDING")
        # Within the second in which it was ended, its nodes would refuse it.
        self.run("scontrol", "update", f"jobid={job_id}", "starttime=now+3")

    def _idle(self) -> int:
        done = self._rig.client.run(
            ["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"], env=self.environment
        )
        return int(done.stdout or 0) if done.returncode == 0 else 0


class Command:
    """A command that a user of the cluster has started on the client."""

    def __init__(
        self,
        rig: Rig,
        slurm: Slurm,
        words: Sequence[str | Path],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it in a directory, in which it also leaves what it prints."""
        directory.mkdir(exist_ok=True)
        self._out, self._err = directory / "stdout", directory / "stderr"
        env = {**slurm.environment, **(environment or {})}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = rig.client.popen(
                list(map(str, words)), cwd=directory, env=env, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it has said on standard error so far."""
        return self._err.read_text()

    def end(self) -> int:
        """Wait for its end. Returns the exit code."""
        return self.process.wait(patient(_LIMIT_S))

    @property
    def job_id(self) -> str:
        """The number of the job that it has submitted."""
        until(lambda: "Submitted batch job " in self.out, _LIMIT_S)
        return self.out.partition("Submitted batch job ")[2].split()[0]


def paceline(*words: str | Path) -> list[str | Path]:
    """Give the words of a `paceline` command."""
    return [sys.executable, "-m", "paceline", *words]


def _write(rig: Rig, directory: Path) -> None:
    nodes = []
    for n, host in enumerate(rig.hosts):
        (directory / f"spool.n{n}").mkdir()
        at = f"NodeHostName={host.name} NodeAddr={host.address}"
        nodes.append(f"NodeName=n{n} {at} CPUs={CPUS} RealMemory=1000 State=UNKNOWN")
    (directory / "state").mkdir()
    (directory / "cgroup.conf").write_text(_GROUPS)
    text = _CONFIGURATION.format(
        controller=rig.host(0).name,
        address=rig.host(0).address,
        directory=directory,
        nodes="\n".join(nodes),
    )
    (directory / "slurm.conf").write_text(text)


def _start_munge(host: Machine, directory: Path) -> None:
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(bytes(range(256)) * 4)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    words = [f"--{option}={directory}/munge.{name}" for option, name in files.items()]
    host.start_daemon("/usr/sbin/munged", "--foreground", "--force", *words)
    until((directory / "munge.socket").exists, _LIMIT_S)
