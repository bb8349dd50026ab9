"""What runs did on devices lately, by hand."""

from __future__ import annotations

from rlhfless.control.objects import DeviceWork
from rlhfless.control.service import HISTORY_S, DeviceHistory


def worked(work: str, start_s: float, end_s: float, *devices: str) -> DeviceWork:
    return DeviceWork(function="learner", work=work, step=1, devices=list(devices), start_s=start_s, end_s=end_s)


def test_work_of_all_runs_by_device_of_the_cluster() -> None:
    history = DeviceHistory()
    history.add("a", [worked("learn", 10, 12, "node 0", "node 1")], 12)
    history.add("b", [worked("learn", 12, 14, "node 0")], 14)
    rows = {row.device: [(bar.run_id, bar.start_s) for bar in row.bars] for row in history.since(0).rows}
    assert rows == {"node 0": [("a", 10), ("b", 12)], "node 1": [("a", 10)]}
    assert {row.device for row in history.since(13).rows} == {"node 0"}


def test_what_is_old_is_forgotten() -> None:
    history = DeviceHistory()
    history.add("a", [worked("learn", 10, 12, "node 0", "node 1")], 12)
    history.add("b", [worked("learn", HISTORY_S + 12, HISTORY_S + 13, "node 0")], HISTORY_S + 13)
    assert [(row.device, [bar.run_id for bar in row.bars]) for row in history.since(0).rows] == [("node 0", ["b"])]
