"""MLflow. Its own variables hold as ever: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN .."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import final
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from paceline.distributed.environment import read_environment, set_variables
from paceline.tracking.base import Ending, Opened, Row, RunInfo, Sink

_STATES: Mapping[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NO_NAME = re.compile(r"[^\w. /:-]")
"""What no name of a metric or a tag may have in it."""
_SERVICES = frozenset({"databricks", "databricks-uc", "uc"})
"""Names of MLflow's for stores, which look like folders."""
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
"""Of one call, as MLflow's REST API limits them."""


@final
class MlflowSink(Sink):
    """A run of MLflow; metrics have the optimizer step and the training's own time."""

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._id = ""
        self._started_s = 0.0
        self._newest = Row(step=0, time_s=0.0)

    def open(self, run: RunInfo, previous: str | None) -> Opened:
        """Begin or resume the run; a new one where MLflow hasn't the earlier one."""
        self._client = client = MlflowClient(_tracking_uri(run.kept_in))
        self._started_s = run.started_s
        if previous is not None and _resumed(client, previous):
            self._id = previous
        else:
            created = client.create_run(_experiment(client, run), run_name=run.name)
            self._id = created.info.run_id
        self._describe(run)
        # `log` has returned only once MLflow has the rows: no need to ask which it has.
        return Opened(id=self._id, where=self._where(), kept_in=_absolute(client.tracking_uri))

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows; they are delivered once it returns."""
        assert self._client is not None
        metrics = [metric for row in rows for metric in self._metrics(row)]
        for start in range(0, len(metrics), _MAX_METRICS):
            part = metrics[start : start + _MAX_METRICS]
            self._client.log_batch(self._id, metrics=part)
        self._newest = rows[-1]

    def finish(self, ending: Ending, summary: Mapping[str, float]) -> None:
        """Send the summary's numbers, as metrics of the last step, and how the training ended."""
        assert self._client is not None
        named = {f"summary/{name}": value for name, value in summary.items()}
        step = int(summary.get("steps", self._newest.step))
        time_s = summary.get("train_time_s", self._newest.time_s)
        self.log([Row(step=step, time_s=time_s, figures=named)])
        self._client.set_terminated(self._id, _STATES[ending])

    def close(self) -> None:
        """Nothing is kept open."""

    def _metrics(self, row: Row) -> Iterator[Metric]:
        moment_ms = int(1000 * (self._started_s + row.time_s))
        for name, value in row.figures.items():
            yield Metric(_NO_NAME.sub("_", name), value, moment_ms, row.step)

    def _describe(self, run: RunInfo) -> None:
        """Send the configuration; what has changed since the first start becomes a tag."""
        assert self._client is not None
        known = self._client.get_run(self._id).data.params
        wanted = {name: _text(value)[:_MAX_PARAM_LENGTH] for name, value in run.config.items()}
        new = [Param(name, value) for name, value in wanted.items() if name not in known]
        # A parameter of MLflow never changes.
        changed = [RunTag(f"resumed/{n}", v) for n, v in wanted.items() if known.get(n, v) != v]
        tags = [RunTag("paceline.run_dir", str(run.path)), *map(_tag, run.tags)]
        if run.note:
            tags.append(RunTag("mlflow.note.content", run.note))
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MAX_PARAMS])
        self._client.log_batch(self._id, tags=[*tags, *changed])

    def _where(self) -> str:
        assert self._client is not None
        info, uri = self._client.get_run(self._id).info, self._client.tracking_uri
        parts = urlsplit(uri)
        if not parts.scheme.startswith("http"):
            allowed = "MLFLOW_ALLOW_FILE_STORE=true " if parts.scheme in ("", "file") else ""
            look = f"{allowed}mlflow ui --backend-store-uri {uri}"
            return f"run {info.run_name} in {uri}; look: {look}"
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        return f"{address}/#/experiments/{info.experiment_id}/runs/{self._id}"


def _resumed(client: MlflowClient, run_id: str) -> bool:
    """Go on with a run; False where MLflow has none of this id."""
    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _tracking_uri(kept_in: str) -> str:
    """Settle where MLflow keeps runs.

    Where neither the user nor an earlier start says so, MLflow takes `mlflow.db` in the working
    directory. `mlflow-skinny` can't write that: then it is the folder `mlruns`, as in MLflow 2.

    Args:
        kept_in: Where the run was begun; it may be another host's folder, which isn't here.
    """
    # It prints the run's address, in which there may be a password; and it would try for minutes
    # before it says that nobody answers: `follow` tries again as well.
    retries = read_environment().get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    set_variables({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": retries})
    set_variables({"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"})
    uri, path = str(mlflow.get_tracking_uri()), _local_path(kept_in)
    if kept_in and not mlflow.is_tracking_uri_set() and (path is None or path.exists()):
        uri = kept_in
    if uri.startswith("sqlite:") and find_spec("sqlalchemy") is None:
        if mlflow.is_tracking_uri_set():
            raise ImportError(f"{uri} needs all of MLflow: pip install mlflow")
        uri = Path("mlruns").absolute().as_uri()
    if urlsplit(uri).scheme in ("", "file"):
        set_variables({"MLFLOW_ALLOW_FILE_STORE": "true"})  # MLflow 3.17 asks for it
    return uri


def _local_path(uri: str) -> Path | None:
    """Name the folder or file that an address stands for; None for a server's."""
    parts = urlsplit(uri)
    if uri in _SERVICES:
        return None
    if parts.scheme == "sqlite":
        return Path(uri.partition("///")[2])  # as it stands, without quoting
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _absolute(uri: str) -> str:
    """Write an address so that it is found from any working directory, and without a user."""
    parts, path = urlsplit(uri), _local_path(uri)
    if path is None:
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if path.is_absolute():
        return uri
    return f"sqlite:///{path.absolute()}" if parts.scheme == "sqlite" else path.absolute().as_uri()


def _experiment(client: MlflowClient, run: RunInfo) -> str:
    """Find the experiment, or make it."""
    variables = read_environment()
    if not run.is_project_given and "MLFLOW_EXPERIMENT_ID" in variables:
        return variables["MLFLOW_EXPERIMENT_ID"]
    name = run.project
    if not run.is_project_given:
        name = variables.get("MLFLOW_EXPERIMENT_NAME", name)
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _tag(tag: str) -> RunTag:
    """Give `team=vision` as key and value, any other tag as a key."""
    key, _, value = tag.partition("=")
    return RunTag(_NO_NAME.sub("_", key) or "tag", value or "true")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
