"""The requests of the API: their bodies, answers, and whether they are repeatable. Both clients send them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import TypeAdapter

from rlhfless.client.errors import KEY, URL, ServiceAway, fault_of
from rlhfless.control.lifecycle import ENDED
from rlhfless.control.objects import (
    CheckpointObject,
    EventObject,
    FleetObject,
    ListObject,
    MetricsObject,
    ReplicaObject,
    RolloutObject,
    RunObject,
    SimulationObject,
    UsageObject,
)
from rlhfless.control.settings import DATA_FOLDER, read_announcement

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8080"

TIMEOUT_S = 30.0
"""Longest wait for an answer, in seconds."""

COMPUTE_S = 250.0
"""Longest wait for a computation by the service, which takes at most 120 s."""

STREAM_S = 60.0
"""Longest silence of an event stream; the service sends something every 15 s."""

TRIES = 6
"""Most tries of a repeatable request, over about ten seconds; a service starts in three."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 5.0
"""Wait between two tries: the first, doubled each time up to the longest."""

RETRIED = frozenset({429, 502, 503, 504})
"""Status codes after which the same request may succeed."""


@dataclass(frozen=True, slots=True)
class ClientCall(Generic[T]):
    method: str
    path: str
    answer: Any
    """Type of the answer. `str` and `bytes` are the body itself; None is an empty body."""
    params: Sequence[tuple[str, str]] = ()
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether a repeated request has no effect beyond the first one's."""
    timeout_s: float | None = None
    """Longest wait for an answer; defaults to the client's."""

    def request_of(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        timeout = httpx.USE_CLIENT_DEFAULT if self.timeout_s is None else self.timeout_s
        return client.build_request(
            self.method,
            self.path,
            params=list(self.params),
            json=self.body,
            headers=dict(self.headers),
            timeout=timeout,
        )

    def is_last(self, attempt: int, error: httpx.TransportError | None = None) -> bool:
        """Return whether try number `attempt` (from 0) is the last. Long computations are not repeated."""
        slow = self.timeout_s is not None and isinstance(error, httpx.ReadTimeout)
        return attempt == TRIES - 1 or not self.repeatable or slow

    def parsed(self, response: httpx.Response) -> T:
        """Return the parsed answer. Raises ApiFault."""
        if not response.is_success:
            raise fault_of(response)
        if self.answer in (None, str, bytes):
            return {None: None, str: response.text, bytes: response.content}[self.answer]  # type: ignore[return-value]
        answer: T = TypeAdapter(self.answer).validate_json(response.content)
        return answer


def wait_s(attempt: int, response: httpx.Response | None) -> float:
    """Return the seconds to wait after try number `attempt` (from 0)."""
    retry_after = response.headers.get("retry-after", "") if response is not None else ""
    return float(retry_after) if retry_after.isdecimal() else min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)


def service_url(url: str | None, data: str | None = None) -> str:
    """Return the service's address: `url`, else RLHFLESS_URL, else the data folder's service, else the default."""
    url = url or os.environ.get(URL)
    if url is None:
        service = read_announcement(data or DATA_FOLDER)
        url = DEFAULT_URL if service is None else str(service["url"])
    return url.rstrip("/")


def headers(key: str | None) -> dict[str, str]:
    key = key or os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def away(url: str, error: Exception) -> ServiceAway:
    if isinstance(error, httpx.ReadTimeout):
        return ServiceAway(f"the service at {url} has not answered in time, but it is there; ask again later")
    return ServiceAway(
        f"no rlhfless service answers at {url} ({error or type(error).__name__}); start one with `rlhfless up`, or "
        f"name another with {URL} or --url"
    )


# -- the requests: each is a method of both clients


def create_run(spec: Mapping[str, Any], idempotency_key: str | None = None) -> ClientCall[RunObject]:
    """Queue a run. Repeating the call with the same `idempotency_key` returns the same run."""
    key = idempotency_key or uuid.uuid4().hex
    return ClientCall("POST", "/v1/runs", RunObject, body=dict(spec), headers={"Idempotency-Key": key})


def get_run(run_id: str) -> ClientCall[RunObject]:
    """Return a run."""
    return ClientCall("GET", f"/v1/runs/{run_id}", RunObject)


def list_runs(
    after: str | None = None, limit: int = 20, status: Sequence[str] = (), metadata: Mapping[str, str] | None = None
) -> ClientCall[ListObject[RunObject]]:
    """List runs, newest first. `after`: ID of the last run of the previous page."""
    params = [("limit", str(limit)), *(("status", name) for name in status)]
    params += [(f"metadata[{name}]", value) for name, value in (metadata or {}).items()]
    params += [("after", after)] if after else []
    return ClientCall("GET", "/v1/runs", ListObject[RunObject], params)


def cancel_run(run_id: str) -> ClientCall[RunObject]:
    """Stop a run permanently."""
    return ClientCall("POST", f"/v1/runs/{run_id}/cancel", RunObject)


def pause_run(run_id: str) -> ClientCall[RunObject]:
    """Stop a run after its current step, with a checkpoint."""
    return ClientCall("POST", f"/v1/runs/{run_id}/pause", RunObject)


def resume_run(
    run_id: str, limits: Mapping[str, Any] | None = None, allow_changed: Sequence[str] = ()
) -> ClientCall[RunObject]:
    """Queue a paused run again.

    `limits` replace those of its spec; a limit of None removes it. `allow_changed`: those of `data`, `model` and `code`
    that may have changed since the run started.
    """
    body: dict[str, Any] = {"limits": dict(limits)} if limits else {}
    body |= {"allow_changed": list(allow_changed)} if allow_changed else {}
    return ClientCall("POST", f"/v1/runs/{run_id}/resume", RunObject, body=body or None)


def delete_run(run_id: str) -> ClientCall[None]:
    """Delete an ended run and its folder."""
    return ClientCall("DELETE", f"/v1/runs/{run_id}", None)


def events(run_id: str, after: int = 0, limit: int = 100) -> ClientCall[ListObject[EventObject]]:
    """List events of a run after the event with ID `after`, oldest first."""
    params = [("after", str(after)), ("limit", str(limit))]
    return ClientCall("GET", f"/v1/runs/{run_id}/events", ListObject[EventObject], params)


def metrics(
    run_id: str,
    names: Sequence[str] = (),
    after_step: int | None = None,
    points: int | None = None,
    until_step: int | None = None,
) -> ClientCall[MetricsObject]:
    """Return time series of a run's metrics; all metrics if `names` is empty."""
    params = [("name", name) for name in names]
    bounds = {"after_step": after_step, "until_step": until_step, "points": points}
    params += [(name, str(value)) for name, value in bounds.items() if value is not None]
    return ClientCall("GET", f"/v1/runs/{run_id}/metrics", MetricsObject, params)


def checkpoints(run_id: str) -> ClientCall[ListObject[CheckpointObject]]:
    """List checkpoints of a run, newest first."""
    return ClientCall("GET", f"/v1/runs/{run_id}/checkpoints", ListObject[CheckpointObject])


def usage(run_id: str) -> ClientCall[UsageObject]:
    """Return a run's device-seconds and cost by function."""
    return ClientCall("GET", f"/v1/runs/{run_id}/usage", UsageObject)


def rollouts(
    run_id: str, step: int | None = None, limit: int = 20, **filters: str | int
) -> ClientCall[ListObject[RolloutObject]]:
    """List samples of a run to read, of one step or of the newest steps.

    `filters`: `before_step`, `data_set`, `prompt_id`, `search`, `result` and `reward`, as in docs/control.md.
    """
    params = [("limit", str(limit)), *([("step", str(step))] if step is not None else [])]
    params += [(name, str(value)) for name, value in filters.items()]
    return ClientCall("GET", f"/v1/runs/{run_id}/rollouts", ListObject[RolloutObject], params)


def logs(run_id: str, lines: int = 100) -> ClientCall[str]:
    """Return the last lines of a run's log."""
    return ClientCall("GET", f"/v1/runs/{run_id}/logs", str, [("lines", str(lines))])


def functions() -> ClientCall[ListObject[ReplicaObject]]:
    """List the current replicas of all runs."""
    return ClientCall("GET", "/v1/functions", ListObject[ReplicaObject])


def fleets() -> ClientCall[ListObject[FleetObject]]:
    """List the fleets of runs that share engines, with the device time of each run."""
    return ClientCall("GET", "/v1/fleets", ListObject[FleetObject])


def plan(spec: Mapping[str, Any], **question: Any) -> ClientCall[dict[str, Any]]:
    """Predict memory, time and cost of a run before it starts. `question`: lengths_of."""
    body = {"spec": dict(spec)} | question
    return ClientCall("POST", "/v1/runs:plan", dict[str, Any], body=body, timeout_s=COMPUTE_S)


def compare(spec: Mapping[str, Any], **question: Any) -> ClientCall[dict[str, Any]]:
    """Compare a run's time and cost on other devices and in other placements.

    `question`: devices, quantization, speculation, share_prefixes, lengths_of, deadline_s, limit.
    """
    body = {"spec": dict(spec)} | question
    return ClientCall("POST", "/v1/runs:compare", dict[str, Any], body=body, timeout_s=COMPUTE_S)


def test_rewards(
    rewards: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> ClientCall[dict[str, Any]]:
    """Score given responses, by part of the reward."""
    body = {"rewards": list(rewards), "samples": list(samples)}
    return ClientCall("POST", "/v1/rewards:test", dict[str, Any], body=body, timeout_s=COMPUTE_S)


def simulate(
    scenario: Mapping[str, Any] | None = None, run_id: str | None = None, policies: Sequence[str] = ()
) -> ClientCall[SimulationObject]:
    """Queue a simulation of a scenario, or of a run's own steps under other policies.

    `policies` limits a scenario to these labels. Poll `get_simulation` until it has ended.
    """
    body = {"scenario": scenario and dict(scenario), "run": run_id, "policies": list(policies)}
    return ClientCall("POST", "/v1/simulations", SimulationObject, body=body, repeatable=False, timeout_s=COMPUTE_S)


def get_simulation(simulation_id: str) -> ClientCall[SimulationObject]:
    """Return a simulation."""
    return ClientCall("GET", f"/v1/simulations/{simulation_id}", SimulationObject)


# -- streams


class Stream:
    """Parses the lines of an event stream into events, each once and in order, across several connections."""

    def __init__(self, run_id: str, after: int) -> None:
        self.path = f"/v1/runs/{run_id}/events"
        self.after = after
        """ID of the last parsed event."""
        self.ended = False
        """Whether the run's last event was parsed."""
        self._data: list[str] = []

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept": "text/event-stream", "Last-Event-ID": str(self.after)}

    def begin(self) -> None:
        """Start a new connection, discarding a partial event of the last one."""
        self._data = []

    def feed(self, line: str) -> Iterator[EventObject]:
        """Parse a line; yield the event that it completes, if any."""
        if line.startswith("data: "):
            self._data.append(line.removeprefix("data: "))
        elif not line and self._data:
            event = EventObject.model_validate_json("\n".join(self._data))
            self._data = []
            if event.id > self.after:
                self.after = event.id
                self.ended = event.type == "status" and event.data.get("status") in ENDED
                yield event


def is_ended(run: RunObject) -> bool:
    """Return whether a run has ended permanently."""
    return run.status in ENDED
