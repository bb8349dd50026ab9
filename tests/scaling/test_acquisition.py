"""Waits for devices: rows of the trace, what is counted on, and which devices have to come."""

from __future__ import annotations

from rlhfless.scaling.placement import CPU_KIND, Device, DeviceGroup, Node
from rlhfless.scaling.prices import RECENT, Acquired, AcquisitionLags, PriceBook, by_kind, fitting

SOURCE = {"source": "test", "as_of": "2026-11-01"}
PRICES = PriceBook.model_validate(
    {
        "devices": [
            {"kind": "h100", "usd_per_hour": 3.0, "provisioning": {"lag_s": 300} | SOURCE} | SOURCE,
            {"kind": "l4", "usd_per_hour": 1.0} | SOURCE,
            {"kind": CPU_KIND, "usd_per_hour": 0.1} | SOURCE,
        ]
    }
)


def waited(lag_s: float, *, came: bool = True, kind: str = "h100") -> Acquired:
    return Acquired(kind, 4, 1000.0, 1000.0 + lag_s, came)


def test_rows_of_the_trace_are_read_back() -> None:
    rows = [waited(2.5, came=False).decision(3), waited(180.0).decision(4)]
    assert (rows[0].kind, rows[0].choice, rows[0].step, rows[0].at_s) == ("acquire", "4 x h100", 3, 1000.0)
    assert Acquired.of(rows) == [waited(2.5, came=False), waited(180.0)]
    assert by_kind([waited(2.5, came=False), waited(180.0)]) == {"h100": ([2.5], [180.0])}


def test_the_price_book_is_believed_until_something_was_measured() -> None:
    lags = AcquisitionLags(PRICES)
    assert (lags.lag_s("h100"), lags.lag_s("l4")) == (300.0, 0.0)
    lags.add(waited(2.0, came=False))
    assert lags.lag_s("h100") == 300.0, "a node that was there says nothing of one that has to come"
    for lag_s in (100.0, 900.0, 120.0):
        lags.add(waited(lag_s))
    assert lags.lag_s("h100") == 120.0
    for _ in range(RECENT):
        lags.add(waited(60.0))
    assert lags.lag_s("h100") == 60.0
    assert AcquisitionLags(PRICES, [waited(70.0)]).lag_s("h100") == 70.0, "an earlier attempt has measured"


def group(name: str, devices: int, kind: str = "h100") -> DeviceGroup:
    return DeviceGroup(name, tuple(Device(f"{name}-{i}", kind, i) for i in range(devices)))


def test_groups_that_fit_use_up_what_is_free() -> None:
    nodes = [
        Node("a", "1", cores=8, free_cores=1, gpu_kind="h100", gpus=8, free_gpus=3),
        Node("b", "2", cores=8, free_cores=4, gpu_kind="h100", gpus=8, free_gpus=4),
    ]
    groups = [group("g0", 2), group("g1", 2), group("g2", 2), group("g3", 2), group("c", 4, CPU_KIND), group("x", 1)]
    # a has 3 and takes g0; b takes g1 and g2; a's last one is too few for g3, and x has it.
    assert fitting(groups, nodes) == {"g0", "g1", "g2", "c", "x"}
    assert fitting(groups, []) == frozenset()
