"""The log of a run."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfless.telemetry.logs import RunLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    opened = RunLog(tmp_path / "demo", "demo-1")
    yield opened
    opened.close()


def test_everything_goes_to_the_file_with_time_and_run(log: RunLog) -> None:
    logging.getLogger("rlhfless.fleet").info("2 actors up")
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("somebody.else").warning("disk is slow")
    first, second = log.path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO demo-1 rlhfless\.fleet: 2 actors up", first)
    assert second.endswith("WARNING demo-1 somebody.else: disk is slow")


def test_passwords_are_not_logged(log: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("rlhfless.fleet").error("%s", "cannot ask http://user:p@ssw0rd@host/x?api_key=hunter2 today")
    for text in (log.path.read_text(), capsys.readouterr().err):
        assert "cannot ask http://***@host/x?api_key=*** today" in text


def test_only_warnings_reach_the_terminal(log: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("rlhfless.fleet").info("quiet")
    logging.getLogger("rlhfless.fleet").warning("replica is suspect")
    assert log.path.name == "run.log"
    assert capsys.readouterr().err == "WARNING rlhfless.fleet: replica is suspect\n"


def test_python_warnings_are_logged(log: RunLog) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # pytest replaces the hook around each test
        warnings.warn("old name", stacklevel=1)
    assert "old name" in log.path.read_text()


def test_a_resumed_run_appends_and_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    handlers = list(logging.getLogger().handlers)
    for text in ("first", "second"):
        log = RunLog(tmp_path, "demo-1")
        logging.getLogger("rlhfless").info(text)
        log.close()
    logging.getLogger("rlhfless").info("third")
    assert [line.rsplit(" ", 1)[1] for line in log.path.read_text().splitlines()] == ["first", "second"]
    assert logging.getLogger().handlers == handlers
