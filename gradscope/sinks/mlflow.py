"""MLflow: to the server that MLFLOW_TRACKING_URI names, else into ``mlflow.db`` (SQLite) of the run directory, to be shown with
``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``. The experiment is MLFLOW_EXPERIMENT_NAME, else "gradscope"; settings are
params of the run.

MLflow has no histograms, so lists stay behind; the quantiles of a sketch are curves of their own.
How it can mislead: SQL stores keep inf as the largest float (1.8e308); nan stays nan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gradscope.sinks import Destination, sinks
from gradscope.sinks.points import Histogram, Point

MOST_METRICS, MOST_PARAMS = 1000, 100  # of one request


@sinks.register("mlflow")
@dataclass(frozen=True, kw_only=True)
class Mlflow:
    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def __call__(self, run: Destination) -> MlflowRun:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = run.path.resolve()
        client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path / 'mlflow.db'}")
        if run.id:
            client.update_run(run.id, status="RUNNING")
            return MlflowRun(client, run.id)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gradscope")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.create_run(experiment, run_name=path.name).info.run_id
        params = [Param(key, value) for key, value in _flat(run.recipe).items()]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(found, params=params[start : start + MOST_PARAMS])
        return MlflowRun(client, found)


class MlflowRun:
    def __init__(self, client: Any, id: str) -> None:
        self.id = id
        self.where = f"run {id} at {client.tracking_uri}"
        self._client = client

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(p.name, p.value, now, p.step) for p in points if not isinstance(p.value, Histogram)]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[start : start + MOST_METRICS])

    def close(self, done: bool) -> None:
        self._client.set_terminated(self.id, status="FINISHED" if done else "KILLED")


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
    return flat
