"""kubectl: the user's own, with its configuration, asked for JSON."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import final

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.json_fields import Answer
from paceline.launch.kubernetes.options import KubernetesOptions
from paceline.launch.yaml_text import Plain

_LIMIT_S = 60.0
_LOG = re.compile(r"[EWI]\d{4} ")
"""Begins a line that kubectl's libraries write beside its own message."""


@final
class Kubectl:
    """Calls kubectl in one context and namespace."""

    def __init__(self, program: str, where: Sequence[str]) -> None:
        self._command = (program, *where)

    def command(self, *arguments: str) -> list[str]:
        """Give the whole command line, for callers that start it themselves."""
        return [*self._command, *arguments]

    def run(self, *arguments: str, content: str | None = None) -> str:
        """Run a command to its end. Blocks.

        Returns:
            What it printed.

        Raises:
            InfrastructureError: It failed; the message has its own.
        """
        called = f"kubectl {arguments[0]}"
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=content or "",
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"{called} didn't answer within {_LIMIT_S:g} s") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line and not _LOG.match(line)]
            reason = "\n".join(lines) if lines else f"code {done.returncode}"
            raise InfrastructureError(f"{called} failed: {reason}")
        return done.stdout

    def get(self, *arguments: str) -> Answer:
        """Ask for an object, or a list of them.

        Raises:
            InfrastructureError: There is none, or the cluster can't be reached.
        """
        text = self.run("get", *arguments, "-o", "json")
        try:
            return Answer(json.loads(text))
        except ValueError as error:
            raise InfrastructureError(f"kubectl get printed no JSON: {text[:200]}") from error

    def apply(self, manifests: Sequence[Plain]) -> None:
        """Make objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.run("apply", "-f", "-", content=json.dumps(listed))

    def has_trainjobs(self) -> bool:
        """Tell whether the cluster has Kubeflow Trainer v2."""
        listed = self.run("api-resources", "--api-group=trainer.kubeflow.org", "-o", "name")
        return any(line.startswith("trainjobs.") for line in listed.splitlines())


def find_kubectl(options: KubernetesOptions) -> Kubectl:
    """Find kubectl.

    Raises:
        UsageError: It isn't installed.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise UsageError(
            "--on kubernetes needs kubectl, which isn't on the PATH: install it, or print what "
            "would be applied with --dry-run"
        )
    where = []
    if options.kubernetes_context:
        where.append(f"--context={options.kubernetes_context}")
    if options.namespace:
        where.append(f"--namespace={options.namespace}")
    return Kubectl(program, where)
