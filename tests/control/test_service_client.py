"""The outbox of a driver, and its delivery to the service."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rlhfless.control.delivery import DriverOrder, DriverState, Push
from rlhfless.control.driver.service_client import KEPT_ITEMS, Outbox, ServiceClient, StaleOutbox, undelivered


def test_numbers_go_on_over_attempts_and_an_older_one_is_shut_out(tmp_path: Path) -> None:
    first = Outbox(tmp_path, 1)
    first.add("message", {"message": "a"})
    first.add("message", {"message": "b"})
    second = Outbox(tmp_path, 2)
    with pytest.raises(StaleOutbox, match="attempt 2 of the run has started"):
        first.add("message", {"message": "too late"})
    second.add("message", {"message": "c"})
    assert [(item.seq, item.attempt, item.data["message"]) for item in second.after(0)] == [
        (1, 1, "a"),
        (2, 1, "b"),
        (3, 2, "c"),
    ]
    assert [item.seq for item in undelivered(tmp_path, 2)] == [3]
    with pytest.raises(StaleOutbox):
        Outbox(tmp_path, 1)
    first.close()
    second.close()


def test_texts_that_no_database_keeps_are_escaped(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 1)
    outbox.add("message", {"message": "a\0b", "why": ["\ud800"]})
    assert outbox.after(0)[0].data == {"message": "a\\x00b", "why": ["\\ud800"]}
    assert Push(attempt=1, items=outbox.after(0), now=DriverState(reason="")).model_dump_json()
    outbox.close()


def test_what_was_delivered_long_ago_is_forgotten_and_numbers_are_not_used_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 1)
    for _ in range(3):
        outbox.add("message", {})
    outbox.forget_delivered(KEPT_ITEMS + 2)
    assert [item.seq for item in outbox.after(0)] == [3]
    outbox.forget_delivered(KEPT_ITEMS + 3)
    outbox.add("message", {})
    assert [item.seq for item in outbox.after(0)] == [4]
    outbox.close()


def test_no_outbox_and_an_empty_file_have_nothing(tmp_path: Path) -> None:
    assert undelivered(tmp_path, 0) == []
    (tmp_path / "outbox.sqlite").touch()
    assert undelivered(tmp_path, 0) == []


def _add_for_ever(folder: str) -> None:
    outbox = Outbox(Path(folder), 1)
    for number in range(10**9):
        outbox.add("message", {"number": number})


def test_a_kill_leaves_whole_items_without_gaps(tmp_path: Path) -> None:
    for round_ in range(5):
        folder = tmp_path / str(round_)
        folder.mkdir()
        process = multiprocessing.get_context("spawn").Process(target=_add_for_ever, args=(str(folder),), daemon=True)
        process.start()
        end = time.monotonic() + 60
        while len(undelivered(folder, 0)) < 20 and time.monotonic() < end:
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        items = undelivered(folder, 0)
        assert [item.seq for item in items] == list(range(1, len(items) + 1))
        assert [item.data["number"] for item in items] == list(range(len(items)))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_that_could_not_deliver_ends_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order = DriverOrder.model_construct(run_id="run-1", attempt=1, token="t", service_url="http://127.0.0.1:9")
    outbox, asked, free = Outbox(tmp_path, 1), threading.Event(), threading.Event()

    def state() -> DriverState:
        asked.set()
        free.wait(10)
        return DriverState(reason="stepping")

    link = ServiceClient(order, outbox, state, lambda _: None, lambda _: None)
    link._pushed = 0
    with caplog.at_level(logging.INFO):
        link.start()
        assert asked.wait(10)
        assert not link.close(0.01)  # the service is away, and the driver cannot wait any longer
        outbox.close()
        free.set()
        link._thread.join(10)
    assert not link._thread.is_alive()
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == []
