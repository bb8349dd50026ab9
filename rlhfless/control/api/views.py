"""The objects of the API, made from rows of the database."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhfless.control.database.tables import Base, EventRow, RolloutRow, RunRow
from rlhfless.control.objects.common import ApiObject
from rlhfless.control.objects.runs import CheckpointObject, EventObject, RolloutObject, RunObject
from rlhfless.scaling.prices import SECONDS_PER_HOUR
from rlhfless.util.redaction import redacted, redacted_text

T = TypeVar("T", bound=ApiObject)


def object_of(kind: type[T], row: Base, **others: Any) -> T:
    """An object of the API from the columns of its fields' names; `others` come from elsewhere."""
    columns = kind.model_fields.keys() - {"object"} - others.keys()
    return kind(**{name: getattr(row, name) for name in columns}, **others)


def run_object(row: RunRow) -> RunObject:
    """A run."""
    checkpoints = checkpoint_objects(row)
    return object_of(
        RunObject,
        row,
        status_reason=redacted_text(row.status_reason),
        device_hours=row.device_s / SECONDS_PER_HOUR,
        metadata=row.run_metadata,
        latest_checkpoint=checkpoints[0] if checkpoints else None,
        best_checkpoint=next((each for each in checkpoints if each.best), None),
        error=redacted(row.error or None),
        spec=redacted(row.resolved or row.spec),
    )


def checkpoint_objects(row: RunRow) -> list[CheckpointObject]:
    """The checkpoints of a run, newest first."""
    checkpoints = [CheckpointObject.model_validate(_known(CheckpointObject, entry)) for entry in row.checkpoints]
    return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)


def event_object(row: EventRow) -> EventObject:
    """An event of a run."""
    return object_of(EventObject, row, id=row.seq, message=redacted_text(row.message), data=redacted(row.data))


def rollout_object(row: RolloutRow) -> RolloutObject:
    """A sample of a run to read."""
    values = _known(RolloutObject, row.data)
    return RolloutObject(
        run_id=row.run_id, step=row.step, **values | {"failures": redacted(values.get("failures", {}))}
    )


def _known(kind: type[ApiObject], values: dict[str, Any]) -> dict[str, Any]:
    """The values that a driver has reported, without fields that this version does not know (delivery.PROTOCOL)."""
    return {name: value for name, value in values.items() if name in kind.model_fields}
