"""What `rlhfless runs watch` counts."""

from __future__ import annotations

import pytest

from rlhfless.cli.runs_tables import DrivenTime
from rlhfless.control.objects import EventObject


def status(at: float, value: str) -> EventObject:
    return EventObject(
        id=1, run_id="r", created_at=at, level="info", type="status", message=value, data={"status": value}
    )


def test_the_time_of_a_run_is_without_its_queue_and_its_pauses() -> None:
    worked = DrivenTime()
    life = [
        *((0.0, "queued"), (100.0, "validating"), (103.0, "provisioning"), (110.0, "running"), (150.0, "pausing")),
        *((151.0, "paused"), (900.0, "queued"), (950.0, "validating"), (960.0, "running"), (990.0, "succeeded")),
    ]
    for at, value in life:
        worked.add(status(at, value))
        worked.add(status(at, value).model_copy(update={"type": "message"}))
    assert worked.seconds == pytest.approx(51 + 40)
