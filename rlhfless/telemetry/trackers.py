"""Trackers of experiments: Weights & Biases, MLflow, trackio.

A tracker works in a thread of its own, behind a queue: one that is slow, fails or hangs neither stops nor delays the
run. What it then misses is in metrics.jsonl. Addresses and keys come from the tracker's own environment variables.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rlhfless.spec import MlflowSpec, TrackerSpec, TrackioSpec, WandbSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.telemetry.sinks import NO_SAMPLES, Responses
from rlhfless.util.errors import class_and_line

log = logging.getLogger(__name__)

QUEUE_SIZE = 1024
"""Emissions that a tracker may be behind. Further ones are dropped and counted."""

CLOSE_S = 30.0
"""Longest wait for a tracker at the end of a run."""

MOST_FAILURES = 3
"""Failures in a row after which a tracker is given up."""


class Tracker(Protocol):
    """A run at a tracker. All methods are called in one thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Responses) -> None:
        """Show responses of a step."""

    def finish(self) -> str:
        """Write what remains, and return where the run can be seen."""


def missing_packages(trackers: Sequence[TrackerSpec]) -> list[Problem]:
    """Report trackers whose package, which has the name of the type, is not installed."""
    return [
        Problem(
            f"logging.trackers.{index}.type",
            f"{tracker.type!r} needs a package that is not installed",
            f"pip install 'rlhfless[{tracker.type}]'",
        )
        for index, tracker in enumerate(trackers)
        if importlib.util.find_spec(tracker.type) is None
    ]


class TrackerSink:
    """Sends a run's metrics and responses to a tracker; a MetricSink."""

    def __init__(self, spec: TrackerSpec, folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Start the thread, which opens the run at the tracker. Raises InputError if the package is not installed."""
        if problems := missing_packages([spec]):
            raise InputError("the spec", problems)
        self._spec = spec
        self._open: Callable[[], Tracker] = lambda: _OPENED[spec.type](spec, folder, run_id, config)
        self._waiting: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(QUEUE_SIZE)
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{spec.type}", daemon=True)
        self._thread.start()

    def emit(self, step: int, values: Mapping[str, float], samples: Mapping[str, Sequence[float]] = NO_SAMPLES) -> None:
        """See MetricSink. Of `samples`, only their mean is sent."""
        means = {f"{name}/mean": math.fsum(many) / len(many) for name, many in samples.items() if many}
        finite = {name: float(value) for name, value in {**values, **means}.items() if math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def responses(self, step: int, rows: Responses) -> None:
        """See MetricSinks.responses."""
        if shown := rows[: self._spec.responses]:
            self._put(lambda tracker: tracker.table(step, shown))

    def close(self) -> None:
        """Wait until the tracker has everything, for at most CLOSE_S."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("tracker %s: has not finished after %g s; the run ends without it", self._spec.type, CLOSE_S)
        if self._dropped:
            log.warning("tracker %s: %d emissions were dropped", self._spec.type, self._dropped)

    def _put(self, send: Callable[[Tracker], object]) -> None:
        try:
            self._waiting.put_nowait(send)
        except queue.Full:
            self._dropped += 1

    def _work(self) -> None:
        failures = 0
        try:
            tracker = self._open()
        except BaseException as error:  # wandb raises SystemExit-like errors of its own
            log.warning("tracker %s: cannot be opened, the run goes on without it: %s", *self._named(error))
            self._drain()
            return
        while (send := self._waiting.get()) is not None:
            try:
                send(tracker)
                failures = 0
            except Exception as error:
                failures += 1
                log.warning("tracker %s: %s", *self._named(error))
                if failures == MOST_FAILURES:
                    log.warning("tracker %s: given up after %d failures in a row", self._spec.type, failures)
                    self._drain()
                    break
        try:
            log.info("tracker %s: %s", self._spec.type, tracker.finish())
        except Exception as error:
            log.warning("tracker %s: %s", *self._named(error))

    def _drain(self) -> None:
        """Drop all further emissions until the end."""
        while self._waiting.get() is not None:
            self._dropped += 1

    def _named(self, error: BaseException) -> tuple[str, str]:
        return self._spec.type, class_and_line(error)


def _columns(rows: Responses) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


class _Wandb:
    def __init__(self, spec: WandbSpec, folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=run_id,
            name=run_id,
            resume="allow",
            config=dict(config),
            dir=str(folder),
            mode=spec.mode,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, rows: Responses) -> None:
        columns = _columns(rows)
        table = self._wandb.Table(columns=[*columns], data=[[row.get(name) for name in columns] for row in rows])
        self._run.log({"responses": table}, step=step)

    def finish(self) -> str:
        place = self._run.url or f"offline in {self._run.dir}; upload it with `wandb sync`"
        self._run.finish()
        return place


class _Mlflow:
    def __init__(self, spec: MlflowSpec, folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._uri = server or f"sqlite:///{folder.absolute()}/mlflow.db"
        files = None if server else (folder / "mlflow-files").absolute().as_uri()  # the default is ./mlruns
        self._client = MlflowClient(self._uri)
        known = self._client.get_experiment_by_name(spec.experiment)
        self._experiment = known.experiment_id if known else self._client.create_experiment(spec.experiment, files)
        found = self._client.search_runs([self._experiment], f"tags.`rlhfless.run_id` = '{run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
        else:
            tags = {"rlhfless.run_id": run_id}
            self._run = self._client.create_run(self._experiment, tags=tags, run_name=run_id).info.run_id
            for name, value in _flat(config):
                self._client.log_param(self._run, name, str(value)[:6000])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        from rlhfless.util.clock import unix_s

        at_ms = int(unix_s() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, at_ms, step) for name, value in values.items()])

    def table(self, step: int, rows: Responses) -> None:
        self._client.log_dict(self._run, {"rows": [dict(row) for row in rows]}, f"responses/step-{step:06}.json")

    def finish(self) -> str:
        self._client.set_terminated(self._run)
        return f"run {self._run} at {self._uri}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested values with dotted names."""
    flat = []
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat += _flat(value, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", value)]
    return flat


class _Trackio:
    def __init__(self, spec: TrackioSpec, folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        del folder
        import trackio

        self._trackio, self._project = trackio, spec.project
        self._run = trackio.init(
            project=spec.project,
            name=run_id,
            space_id=spec.space,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, rows: Responses) -> None:
        import pandas

        self._run.log({"responses": self._trackio.Table(dataframe=pandas.DataFrame(rows))}, step=step)

    def finish(self) -> str:
        self._run.finish()  # type: ignore[no-untyped-call]
        return f"see it with `trackio show --project {self._project}`"


_OPENED: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}
