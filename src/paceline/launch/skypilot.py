"""`--on skypilot`: a task for machines that SkyPilot rents, on whatever cloud."""

import shlex
from collections.abc import Mapping
from typing import final

from paceline._version import __version__
from paceline.errors import ExitCode, UsageError
from paceline.launch.base import Launcher, Rendered, run_tool
from paceline.launch.cluster import ClusterJob, Manifest, NoOptions, merged

_MAX_NAME_LENGTH = 30
_KILL_AFTER_S = 120


@final
class SkypilotLauncher(Launcher):
    """Renders a task file, and launches it with `sky`."""

    def __init__(self, options: NoOptions) -> None:
        pass

    def render(self, job: ClusterJob) -> Rendered:
        """Return the task; it is a managed job where the patch asks for spot machines."""
        from paceline.launch.yaml_text import to_yaml

        name = job.unique_name(_MAX_NAME_LENGTH)
        resources = job.patch.get("resources")
        is_managed = isinstance(resources, Mapping) and resources.get("use_spot") is True
        written = merged(task(job, name, is_managed=is_managed), job.patch)
        launch = ("jobs", "launch", "-n", name) if is_managed else ("launch", "-c", name)
        path = job.folder / "skypilot.yaml"
        return Rendered(
            files={path.name: to_yaml(written)},
            submit=("sky", *launch, "--yes", "--detach-run", str(path)),
            follow=f"sky jobs logs -n {name}" if is_managed else f"sky logs {name}",
            stop=f"sky jobs cancel -n {name}" if is_managed else f"sky down {name}",
        )

    def submit(self, rendered: Rendered) -> None:
        """Launch the task."""
        run_tool(rendered.submit)


def task(job: ClusterJob, name: str, *, is_managed: bool) -> Manifest:
    """Return the task.

    Args:
        is_managed: Whether SkyPilot starts it again when its machines are taken away.

    Raises:
        UsageError: GPUs are asked for without their type.
    """
    if job.gpus_per_node:
        raise UsageError(
            "SkyPilot asks for GPUs by type: instead of --gpus-per-node write "
            "`resources: {accelerators: A100:4}` into the file of --job-patch"
        )
    # Machines of a managed job go with it; others are torn down once they are idle.
    resources: Manifest = {"autostop": {"idle_minutes": 10, "down": True}}
    if is_managed:
        resources = {"job_recovery": {"max_restarts_on_errors": job.max_restarts}}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    wanted = shlex.quote(f"paceline=={__version__}")
    return {
        "name": name,
        "num_nodes": job.nodes,
        "workdir": str(job.directory),
        "resources": resources,
        "setup": f"python3 -c 'import paceline' || python3 -m pip install {wanted}\n",
        "run": _script(job),
    }


def _script(job: ClusterJob) -> str:
    command = shlex.join(["python3", "-P", "-m", "paceline", *job.words(job.run_dir)])
    if job.time_limit_s is None:
        return f"{command}\n"
    # Out of time, it isn't to be started again as after a failure.
    limit = f"timeout --preserve-status --kill-after={_KILL_AFTER_S}s {job.time_limit_s}s"
    stopped = int(ExitCode.RESUMABLE)
    return f"{limit} {command}\ncode=$?\n[ $code -eq {stopped} ] || exit $code\n"
