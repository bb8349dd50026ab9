"""The database tables. Only the API process writes them (docs/control.md). Times are unix seconds.

A change here needs a migration (database/migrations); a test compares the two.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[Any] = {Json: JSON, list[Any]: JSON, float: Double, int: BigInteger, str: Text}


RUN_ID = String(80)


def _of_run() -> Mapped[str]:
    return mapped_column(RUN_ID, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


class RunRow(Base):
    """Runs."""

    __tablename__ = "runs"
    __table_args__ = (Index("runs_by_creation", "created_at", "id"), Index("runs_by_status", "status"))

    id: Mapped[str] = mapped_column(RUN_ID, primary_key=True)
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(String(80))
    """Id of the API key that created the run; `local` if the service needs no key."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    """Start of the first step."""
    finished_at: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(16))
    status_reason: Mapped[str]
    status_since: Mapped[float]
    desired_state: Mapped[str] = mapped_column(String(8))
    """The state that the user requested (lifecycle.DesiredState)."""
    desired_at: Mapped[float]
    priority: Mapped[int]
    spec: Mapped[Json]
    """The spec as POSTed."""
    resolved: Mapped[Json | None]
    """The driver's spec with every default, resolved for the run's devices."""
    run_metadata: Mapped[Json] = mapped_column("metadata")
    folder: Mapped[str]
    steps: Mapped[int]
    step: Mapped[int] = mapped_column(default=0)
    """The last finished step."""
    latest: Mapped[Json] = mapped_column(default=dict)
    """The newest value of each metric, by name."""
    checkpoints: Mapped[list[Any]] = mapped_column(default=list)
    error: Mapped[Json | None]
    """code, message, param."""
    plan: Mapped[Json | None]
    """The prediction made before the run started (objects.PlannedCost)."""
    sizes: Mapped[Json | None]
    """The planned sizes of an elastic run (planning.objects.PlannedSizes); null until planned, and for other runs."""
    best_static: Mapped[Json | None]
    """The best static fleet for the same steps (objects.StaticFleet)."""
    simulated_step: Mapped[int] = mapped_column(default=0)
    """The last step that the simulation behind `best_static` covers."""
    cost_usd: Mapped[float] = mapped_column(default=0.0)
    device_s: Mapped[float] = mapped_column(default=0.0)
    left_s: Mapped[float | None]
    """Predicted time until the run ends."""
    attempt: Mapped[int] = mapped_column(default=0)
    """Number of drivers of the run so far."""
    deaths: Mapped[int] = mapped_column(default=0)
    """Number of consecutive drivers that died without completing a step."""
    driver: Mapped[Json | None]
    """The handle of the driver (drivers.DriverHandle)."""
    driver_token: Mapped[str] = mapped_column(default="")
    """Hash of the secret of the run's driver."""
    pushed: Mapped[int] = mapped_column(default=0)
    """Number of the last item that a driver delivered."""
    last_event: Mapped[int] = mapped_column(default=0)
    """Number of the run's newest event."""


class EventRow(Base):
    """Events of runs, for their users. `seq` counts from 1 in each run, without gaps."""

    __tablename__ = "events"

    run_id: Mapped[str] = _of_run()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    created_at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    """info, warning or error."""
    type: Mapped[str] = mapped_column(String(24))
    """status, message, metrics, checkpoint, ..."""
    message: Mapped[str]
    data: Mapped[Json]


class MetricsRow(Base):
    """The metrics of a step, or of an evaluation after it."""

    __tablename__ = "metrics"

    run_id: Mapped[str] = _of_run()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(12), primary_key=True)
    """step or evaluation."""
    at: Mapped[float]
    values: Mapped[Json]


class UsageRow(Base):
    """Device time of each function of a run, over all its attempts."""

    __tablename__ = "usage"

    run_id: Mapped[str] = _of_run()
    function: Mapped[str] = mapped_column(String(24), primary_key=True)
    kind: Mapped[str] = mapped_column(String(40), primary_key=True)
    """Kind of the devices."""
    busy_device_s: Mapped[float]
    idle_device_s: Mapped[float]
    cold_device_s: Mapped[float]
    cost_usd: Mapped[float]
    cold_starts: Mapped[int]
    invocations: Mapped[int]


class RolloutRow(Base):
    """Samples of the newest steps, for people to read."""

    __tablename__ = "rollouts"

    run_id: Mapped[str] = _of_run()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    data: Mapped[Json]


class LeaseRow(Base):
    """Devices that the broker granted to a run, or that the run waits for."""

    __tablename__ = "leases"

    run_id: Mapped[str] = _of_run()
    kind: Mapped[str] = mapped_column(String(40))
    minimum: Mapped[int]
    maximum: Mapped[int]
    unit: Mapped[int]
    """Devices of one actor. Grants above the minimum change by multiples of this number."""
    granted: Mapped[int]
    """0 while the run waits."""
    held: Mapped[int]
    """Number of devices that the run uses, as reported by its driver."""
    asked_at: Mapped[float]
    tenants: Mapped[int] = mapped_column(default=1, server_default="1")
    """Maximum number of runs on a device, including this run."""
    sizes: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Numbers of devices that an elastic run can have; empty for others."""
    seen_s: Mapped[Json] = mapped_column(default=dict, server_default="{}")
    """Measured seconds per step of an elastic run, by number of devices."""
    steps_left: Mapped[float] = mapped_column(default=0.0, server_default="0")
    change_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """Seconds that a change of an elastic run's size costs."""
    size_reason: Mapped[str] = mapped_column(default="", server_default="")
    """Why an elastic run has this number of devices."""


class IdempotencyRow(Base):
    """Answered POSTs, by the idempotency key that the client chose."""

    __tablename__ = "idempotency"

    owner: Mapped[str] = mapped_column(String(80), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[str] = mapped_column(RUN_ID, ForeignKey("runs.id", ondelete="CASCADE"))
    created_at: Mapped[float]


class KeyRow(Base):
    """API keys. Only hashes of their secrets are stored."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str]
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[Any]]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


class SimulationRow(Base):
    """POSTed simulations and their results."""

    __tablename__ = "simulations"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    owner: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(16))
    request: Mapped[Json]
    result: Mapped[Json | None]
    error: Mapped[Json | None]
