"""A driver without Ray and models: real outbox and client, but its steps only count.

python -m fakes.fake_driver RUN_FOLDER
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

from rlhfless.control.delivery import DriverState, LeaseWanted, PushAnswer
from rlhfless.control.driver.service_client import Outbox, ServiceClient
from rlhfless.control.drivers import read_order

STEP_S = 0.03
PROGRESS_FILE = "progress.json"
"""File with the last completed step, in place of a real run's checkpoint and journal."""


def main(folder: Path) -> None:
    order = read_order(folder)
    outbox = Outbox(folder, order.attempt)
    answers: list[PushAnswer] = []
    heard, replaced = threading.Event(), threading.Event()
    lease = LeaseWanted(kind="cpu-core", minimum=1, maximum=1, unit=1, held=0)

    def hear(answer: PushAnswer) -> None:
        answers[:] = [answer]
        heard.set()

    link = ServiceClient(
        order, outbox, lambda: DriverState(reason="stepping", lease=lease), hear, lambda _: replaced.set()
    )
    link.start()

    def tell(item: str, /, **data: object) -> None:
        outbox.add(item, data)
        link.wake()

    tell("status", status="provisioning", reason="asking for 1 x cpu-core")
    while not replaced.is_set() and not (answers and answers[0].granted):
        heard.clear()
        link.wake()
        heard.wait(1.0)
    progress = folder / PROGRESS_FILE
    done = json.loads(progress.read_text()) if progress.exists() else 0
    tell("status", status="running", reason="running")
    steps = order.spec["steps"]
    for step in range(done + 1, steps + 1):
        if replaced.is_set():
            return
        time.sleep(random.uniform(0.5, 1.5) * STEP_S)
        tell("metrics", step=step, kind="step", values={"step_s": STEP_S, "reward_mean": step / steps})
        usage = {"function": "learner", "kind": "cpu-core", "busy_device_s": float(step), "idle_device_s": 0.0}
        tell("usage", functions=[usage | {"cold_device_s": 0.0, "cost_usd": 2.0 * step, "cold_starts": 1,
                                          "invocations": step}])  # fmt: skip
        new = folder / "progress.new"
        new.write_text(json.dumps(step))
        new.replace(progress)
        desired_state = answers[0].desired_state if answers else "run"
        if desired_state == "cancel":
            tell("ended", status="cancelled", reason="cancelled", error=None, retry=False)
            break
    else:
        tell("ended", status="succeeded", reason="all steps are done", error=None, retry=False)
    link.close(10.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
