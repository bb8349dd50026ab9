"""What the log of a driver says of the end of its run: a pause is a fact, and no error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.fake_service import RUN, order_of
from rlhfless.control.delivery import DriverOrder
from rlhfless.control.driver.main import ENDED, drive
from rlhfless.control.driver.service_client import undelivered
from rlhfless.control.drivers import write_order
from rlhfless.control.run_files import allow_changed, allowed_in
from rlhfless.orchestrator.host import RunPaused, StopCause
from rlhfless.records.checkpoints import NOTES_FILE, CheckpointNotes, Checkpoints
from rlhfless.spec.errors import InputError, Problem

PREPARED = SimpleNamespace(warnings=(), tokenizer=SimpleNamespace(special_tokens=()))


@pytest.mark.parametrize(
    ("error", "status", "errors", "has_traceback"),
    [
        (RunPaused(StopCause.PAUSE, "stopped after step 3"), "paused", 0, False),
        (RunPaused(StopCause.YIELD, "stopped after step 3"), "queued", 0, False),
        (RunPaused(StopCause.LIMIT, "max_cost_usd is reached"), "paused", 0, False),
        (InputError("the run cannot start", [Problem("steps", "wrong")]), "failed", 1, False),
        (ValueError("a fault of the program"), "failed", 1, True),
    ],
)
def test_the_end_of_a_run_in_its_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: str,
    errors: int,
    has_traceback: bool,
) -> None:
    async def ends(_: object) -> Any:
        raise error

    monkeypatch.setattr("rlhfless.control.driver.main.preflight", lambda _: PREPARED)
    monkeypatch.setattr("rlhfless.orchestrator.elastic_host.execute", ends)
    monkeypatch.setattr("rlhfless.control.driver.main.DELIVER_S", 0.1)
    write_order(tmp_path, DriverOrder.model_validate(order_of(spec=RUN)))
    assert drive(tmp_path) == ENDED
    text = (tmp_path / "run.log").read_text()
    assert undelivered(tmp_path, 0)[-1].data["status"] == status
    assert text.count(" ERROR ") == errors
    assert ("Traceback" in text) == has_traceback


def test_a_fault_that_a_user_can_correct_pauses_a_run_that_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause its journal is empty."""

    def refuses(*_: object) -> None:
        raise InputError("the run cannot resume", [Problem("prompts.path", "it has changed")])

    path = Path(Checkpoints(tmp_path / "checkpoints", 1).location(3))
    path.mkdir(parents=True)
    (path / NOTES_FILE).write_text(json.dumps(CheckpointNotes("run-1", 1, 3, "ab", None, {}).as_json()))
    monkeypatch.setattr("rlhfless.control.driver.main.preflight", refuses)
    monkeypatch.setattr("rlhfless.control.driver.main.DELIVER_S", 0.1)
    write_order(tmp_path, DriverOrder.model_validate(order_of(spec=RUN)))
    drive(tmp_path)
    assert undelivered(tmp_path, 0)[-1].data["status"] == "paused"


def test_a_driver_names_what_has_changed_and_takes_what_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[frozenset[str]] = []

    def hold(_: object, folder: Path, allowed: frozenset[str]) -> list[str]:
        asked.append(allowed)
        if "data" not in allowed:
            raise InputError("the run cannot resume", [Problem("prompts.path", "it has changed", "allow it")])
        return ["prompts.path: it has changed, which was allowed"]

    async def pauses(_: object) -> Any:
        raise RunPaused(StopCause.PAUSE, "stopped after step 3")

    monkeypatch.setattr("rlhfless.control.driver.main.preflight", lambda _: PREPARED)
    monkeypatch.setattr("rlhfless.control.driver.main.hold_inputs", hold)
    monkeypatch.setattr("rlhfless.orchestrator.elastic_host.execute", pauses)
    monkeypatch.setattr("rlhfless.control.driver.main.DELIVER_S", 0.1)
    write_order(tmp_path, DriverOrder.model_validate(order_of(spec=RUN)))
    drive(tmp_path)
    ended = undelivered(tmp_path, 0)[-1].data
    assert (ended["error"]["code"], ended["error"]["param"]) == ("invalid", "prompts.path")
    allow_changed(tmp_path, ["data"])
    drive(tmp_path)
    items = undelivered(tmp_path, 0)
    assert items[-1].data["status"] == "paused"
    assert [item.data["message"] for item in items if item.data.get("level") == "warning"] == [
        "prompts.path: it has changed, which was allowed"
    ]
    assert asked == [frozenset(), {"data"}]
    assert allowed_in(tmp_path) == frozenset()
