"""The thread that delivers a driver's items, at the end of a run whose service does not answer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from rlhfless.control.delivery import DriverOrder, DriverState
from rlhfless.control.driver.service_client import Outbox, ServiceClient


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
