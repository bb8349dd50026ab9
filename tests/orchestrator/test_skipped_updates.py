"""A run whose gradients are not finite reports it after each step."""

from __future__ import annotations

import pytest

from rlhfless.orchestrator.base_run import warn_of_skipped_updates
from rlhfless.records import StepRecord


def test_skipped_updates_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_skipped_updates(StepRecord(3, 0.0, 1.0, {"skipped_updates": 0.0, "loss": 0.5}))
    assert not caplog.records
    warn_of_skipped_updates(StepRecord(4, 0.0, 1.0, {"skipped_updates": 2.0, "critic_skipped_updates": 1.0}))
    assert [record.getMessage() for record in caplog.records] == [
        "step 4: 2 update(s) skipped: the gradient was not finite; try a lower optimizer.learning_rate",
        "step 4: 1 update(s) skipped: the gradient was not finite; try a lower critic.optimizer.learning_rate",
    ]
