"""The report of a stopped run: one message, its exit code, and the hint to resume where that helps."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fakes.builders import drawn
from rlhfless.cli import main
from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.ray_session import NoCluster
from rlhfless.fleet.replica import CallTimeout, ReplicaLost
from rlhfless.functions.calls import FunctionBroken, StaleCall
from rlhfless.functions.generation.engine import EngineDead, EngineTimeout
from rlhfless.orchestrator import elastic_host
from rlhfless.orchestrator.exit_codes import hint
from rlhfless.orchestrator.session import JOURNAL_FILE, Session
from rlhfless.planning import preflight
from rlhfless.records import WeightVersion
from rlhfless.records.checkpoints import (
    CHECKPOINTS_FOLDER,
    NOTES_FILE,
    CheckpointError,
    CheckpointNotes,
    Checkpoints,
)
from rlhfless.records.journal import Journal, JournalError, StaleAttempt
from rlhfless.rewards import RewardError
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.errors import UserError
from rlhfless.weights.check import WeightCheckFailed, WeightFileError

WRONG = WeightCheckFailed("probe", WeightVersion("run", 1, 3, "ab"), "the logprobs differ by 2 nats")


def journalled(folder: Path) -> None:
    """Leave the folder as a run does that was stopped during generation."""
    journal = Journal(folder / JOURNAL_FILE)
    journal.begin_attempt()
    journal.add(1, [drawn("p", 0, [1], [-1.0], text="a", seed=1)])
    journal.close()


FIVE_STEPS = RunSpec.model_validate(
    {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}], "steps": 5}
)


def checkpointed(folder: Path, step: int) -> None:
    path = Path(Checkpoints(folder / CHECKPOINTS_FOLDER, 1).location(step))
    path.mkdir(parents=True)
    (path / NOTES_FILE).write_text(json.dumps(CheckpointNotes("run", 1, step, "ab", None, {}).as_json()))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that calls `rlhfless run` with a driver that leaves a folder behind and raises."""
    spec = tmp_path / "spec.yaml"
    values = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}], "steps": 5}
    spec.write_text(yaml.safe_dump(values | {"output": str(tmp_path / "runs")}))

    def call(error: BaseException, leave: Any = journalled, *options: str) -> Any:
        async def execute(session: Session) -> None:
            leave(session.folder)
            raise error

        monkeypatch.setattr(preflight, "preflight", lambda spec: SimpleNamespace(spec=spec, warnings=()))
        monkeypatch.setattr(elastic_host, "execute", execute)
        return CliRunner().invoke(main.app, ["run", str(spec), *options])

    return call


@pytest.mark.parametrize(
    ("error", "code", "text", "resume"),
    [
        (WRONG, 3, "weight check `probe` failed for run/1/3/ab: the logprobs differ by 2 nats\n", False),
        (StaleAttempt("attempt 2 has begun"), 2, "attempt 2 has begun\n", False),
        (StaleCall("call of attempt 1"), 2, "call of attempt 1\n", False),
        (RewardError("judge", "503 Service Unavailable"), 2, "reward 'judge': 503 Service Unavailable\n", True),
        (JournalError("the journal x could not be written"), 2, "the journal x could not be written\n", True),
        (CheckpointError("its files were changed"), 2, "its files were changed\n", True),
        (InputError("the model", [Problem("model.path", "no")]), 2, "the model: 1 problem\n- model.path: no\n", True),
        (UserError("the model: 1 problem"), 2, "the model: 1 problem\n", True),
        (NoCluster("no Ray cluster answers"), 2, "no Ray cluster answers\n", True),
        (FleetError("a did not start: ValueError: x"), 4, "FleetError: a did not start: ValueError: x\n", True),
        (ReplicaLost("a was lost"), 4, "ReplicaLost: a was lost\n", True),
        (CallTimeout("waited 600 s for learn on a"), 4, "CallTimeout: waited 600 s for learn on a\n", True),
        (FunctionBroken("a rank was lost"), 4, "FunctionBroken: a rank was lost\n", True),
        (EngineDead("exit code -9"), 4, "EngineDead: exit code -9\n", True),
        (EngineTimeout("`load` within 9 s"), 4, "EngineTimeout: `load` within 9 s\n", True),
        (WeightFileError("cut short"), 4, "WeightFileError: cut short\n", True),
        (OSError(errno.ENOSPC, "No space left", "trace"), 2, "the disk is full: trace could not be written\n", True),
        (KeyError("x"), 1, "unexpected KeyError: 'x'\nRun it again with --debug for the traceback.\n", True),
    ],
)
def test_an_error_that_has_a_meaning_says_it(
    stopped: Any, error: BaseException, code: int, text: str, resume: bool
) -> None:
    result = stopped(error)
    assert result.exit_code == code
    assert result.stderr.startswith(text)
    assert result.stderr.count("unexpected") == text.count("unexpected")
    assert ("rlhfless run --resume" in result.stderr) is resume
    assert len(result.stderr.removeprefix(text).splitlines()) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [FleetError("a did not start"), InputError("the model", []), KeyError("x")])
def test_a_run_that_has_drawn_nothing_is_not_resumed(stopped: Any, error: BaseException) -> None:
    assert "resume" not in stopped(error, lambda _: None).stderr


def test_wrong_weights_say_what_to_do_instead(stopped: Any) -> None:
    for leave in (journalled, lambda _: None):
        text = stopped(WRONG, leave).stderr
        assert "resuming does not help. See `Wrong weights` in docs/faults.md" in text
        assert "--resume" not in text


def test_debug_shows_where_it_came_from(stopped: Any) -> None:
    result = stopped(WRONG, journalled, "--debug")
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert "WeightCheckFailed: weight check `probe` failed" in result.stderr


@pytest.mark.parametrize(("step", "expected"), [(5, "all 5 steps are done; the model is in "), (4, "go on: resume it")])
def test_a_checkpoint_is_something_to_go_on_from(step: int, expected: str, tmp_path: Path) -> None:
    checkpointed(tmp_path, step)
    assert hint("go on", True, "resume it", tmp_path, FIVE_STEPS).startswith(expected)


def test_an_empty_journal_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.begin_attempt()
    journal.close()
    assert hint("go on", True, "resume it", tmp_path, FIVE_STEPS) == ""


def test_what_cannot_be_read_may_be(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(b"no database, and long enough to be looked at" * 100)
    assert hint("go on", True, "resume it", tmp_path, FIVE_STEPS) == "go on: resume it"
