"""From rows of the database to the objects of the API."""

from __future__ import annotations

from typing import Any

from rlhfless.control.database.tables import EventRow, RolloutRow, RunRow, UsageRow
from rlhfless.control.objects import (
    ApiObject,
    CheckpointObject,
    ErrorObject,
    EventObject,
    FunctionUsage,
    RolloutObject,
    RunObject,
)
from rlhfless.redaction import redacted, redacted_text
from rlhfless.scaling.prices import SECONDS_PER_HOUR


def run_object(row: RunRow) -> RunObject:
    """One run."""
    checkpoints = checkpoint_objects(row)
    return RunObject(
        id=row.id,
        name=row.name,
        status=row.status,  # type: ignore[arg-type]
        status_reason=redacted_text(row.status_reason),
        status_since=row.status_since,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        step=row.step,
        steps=row.steps,
        latest=row.latest,
        cost_usd=row.cost_usd,
        device_hours=row.device_s / SECONDS_PER_HOUR,
        left_s=row.left_s,
        attempt=row.attempt,
        priority=row.priority,
        metadata=row.run_metadata,
        owner=row.owner,
        latest_checkpoint=checkpoints[0] if checkpoints else None,
        last_event=row.last_event,
        error=ErrorObject.model_validate(redacted(row.error)) if row.error else None,
        spec=redacted(row.resolved or row.spec),
    )


def checkpoint_objects(row: RunRow) -> list[CheckpointObject]:
    """The newest first."""
    checkpoints = [CheckpointObject.model_validate(_known(CheckpointObject, entry)) for entry in row.checkpoints]
    return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)


def event_object(row: EventRow) -> EventObject:
    """One event."""
    return EventObject(
        id=row.seq,
        run_id=row.run_id,
        created_at=row.created_at,
        level=row.level,  # type: ignore[arg-type]
        type=row.type,
        message=redacted_text(row.message),
        data=redacted(row.data),
    )


def usage_row(row: UsageRow) -> FunctionUsage:
    """One function's."""
    return FunctionUsage(**{name: getattr(row, name) for name in FunctionUsage.model_fields})


def rollout_object(row: RolloutRow) -> RolloutObject:
    """One sample."""
    values = _known(RolloutObject, row.data)
    return RolloutObject(
        run_id=row.run_id, step=row.step, **values | {"failures": redacted(values.get("failures", {}))}
    )


def _known(kind: type[ApiObject], values: dict[str, Any]) -> dict[str, Any]:
    """What a driver has told, without fields that this version does not know (rlhfless.control.delivery.PROTOCOL)."""
    return {name: value for name, value in values.items() if name in kind.model_fields}
