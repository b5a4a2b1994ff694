"""Options of a training that Slurm starts."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s

_OURS = {
    "-p": "--partition",
    "--partition": "--partition",
    "-A": "--account",
    "--account": "--account",
    "-N": "--nodes",
    "--nodes": "--nodes",
    "-n": "--workers",
    "--ntasks": "--workers",
    "--ntasks-per-node": "--workers",
    "-c": "--cpus-per-worker",
    "--cpus-per-task": "--cpus-per-worker",
    "--gpus-per-node": "--gpus-per-node",
    "-t": "--time-limit",
    "--time": "--time-limit",
    "--signal": "--slurm-grace",
    "-J": "--job-name",
    "--job-name": "--job-name",
    "--requeue": "--slurm-requeue",
    "--no-requeue": "--no-slurm-requeue",
}
"""Options of sbatch for which Paceline has its own."""
_NEVER = {
    "-a": "a training is one job, not an array",
    "--array": "a training is one job, not an array",
    "-D": "the job runs where you submit it",
    "--chdir": "the job runs where you submit it",
    "-o": "the output is in the run directory",
    "--output": "the output is in the run directory",
    "-e": "the output is in the run directory",
    "--error": "the output is in the run directory",
    "--open-mode": "the output is in the run directory",
    "--parsable": "Paceline reads what sbatch prints",
    "-Q": "Paceline reads what sbatch prints",
    "--quiet": "Paceline reads what sbatch prints",
    "--test-only": "--dry-run shows what would be submitted",
    "--wrap": "the job's script is Paceline's",
    "-W": "Paceline waits by itself",
    "--wait": "Paceline waits by itself",
}


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What to ask of Slurm."""

    partition: str | None = None
    """Partition to submit to. Default: the cluster's."""

    account: str | None = None
    """Account that pays."""

    cpus_per_worker: int | None = None
    """CPU cores for each worker, its data loading included. Default: the cluster's, often 1."""

    slurm_grace: str = "2m"
    """How long before the time limit the workers are told to stop: long enough to finish a step and
    to write a snapshot."""

    slurm_requeue: bool = True
    """Queue the job again after preemption, at its time limit, and where the infrastructure failed;
    it then resumes exactly."""

    slurm_arg: tuple[str, ...] = ()
    """Any other option of sbatch, verbatim: --slurm-arg=--constraint=a100. Repeat it for each."""

    def __post_init__(self) -> None:
        """Check what can be checked without Slurm.

        Raises:
            UsageError: A value can't be right.
        """
        if self.cpus_per_worker is not None and self.cpus_per_worker < 1:
            raise UsageError(f"--cpus-per-worker is {self.cpus_per_worker}; it must be at least 1")
        parse_duration_s(self.slurm_grace, "--slurm-grace")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not _is_plain(value):
                raise UsageError(f"--{name} is {value!r}: not a name that Slurm can have")
        for argument in self.slurm_arg:
            _check(argument)


def _check(argument: str) -> None:
    """Refuse what isn't one option in one word, and what Paceline says itself."""
    name = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
    if len(name.strip("-")) < 1 or not argument.startswith("-") or not argument.isprintable():
        raise UsageError(
            f"--slurm-arg {argument!r} is not one option of sbatch in one word. Write its value "
            "with =, such as --slurm-arg=--constraint=a100"
        )
    own, why = _full_name(name, _OURS), _full_name(name, _NEVER)
    if own:
        raise UsageError(f"--slurm-arg {argument}: use Paceline's own {own}")
    if why:
        raise UsageError(f"--slurm-arg {argument} can't be used: {why}")


def _full_name(name: str, known: dict[str, str]) -> str | None:
    """Look a name up, long ones also by their beginnings, as sbatch does."""
    if name in known or not name.startswith("--"):
        return known.get(name)
    long = [full for full in known if full.startswith(name) and len(name) > len("--x")]
    return known[long[0]] if long else None


def _is_plain(value: str) -> bool:
    return bool(value) and value.isprintable() and not value.startswith("-")
