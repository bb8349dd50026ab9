"""The price book."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.scaling.latency.devices import DeviceSheet, device_of, kind_of, load_devices
from rlhfless.scaling.placement import CPU_KIND, Device, DeviceGroup, Node
from rlhfless.scaling.prices import (
    OWN_DEVICES,
    RECENT,
    Acquired,
    AcquisitionLags,
    DevicePrice,
    PriceBook,
    PriceError,
    bundled_devices,
    by_kind,
    fitting,
    load_price_book,
)
from rlhfless.spec.errors import InputError

GOOD = """\
devices:
  - kind: cpu-core
    usd_per_hour: 0.05
    source: a cloud
    as_of: 2026-11-21
  - kind: h100
    usd_per_hour: 3
    source: another
    as_of: 2026-10-01
"""
READ = "source: s, as_of: 2026-11-01"


def holding(kind: str, seconds: float, share: float, state: ReplicaState = ReplicaState.SERVING) -> Holding:
    return Holding(FunctionName.GENERATION, "g", "a", "d", kind, share, state, 100.0, 100.0 + seconds)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return path


def test_the_bundled_book_has_what_a_laptop_and_a_gpu_node_need() -> None:
    book = load_price_book()
    assert book.cpu_kind == "cpu-core"
    assert 0.01 < book.device("cpu-core").usd_per_hour < 0.1
    assert {"h100", "h200", "a100-80gb", "l40s"} <= {device.kind for device in book.devices}
    assert all(device.source for device in book.devices)
    with_spot = {device.kind: device for device in book.devices if device.spot is not None}
    assert with_spot.keys() == {"h100", "h200"}
    assert all(device.spot and device.spot.usd_per_hour < device.usd_per_hour for device in with_spot.values())


def test_every_device_has_figures_and_a_price_or_says_why_it_has_none() -> None:
    sheets = load_devices()
    priced = {kind for kind, sheet in sheets.items() if sheet.price is not None}
    assert set(load_price_book().kinds) == priced
    assert {kind for kind, sheet in sheets.items() if not sheet.unpriced} == priced
    assert {"gb200", "mi325x", "gb300"} <= priced
    on_demand = {kind: sheet.hyperscaler.usd_per_hour for kind, sheet in sheets.items() if sheet.hyperscaler}
    assert len(on_demand) == 11
    # Oracle's nodes of 8, and of 4 GB300: 80 and 72 dollars an hour.
    assert (on_demand["h100"], on_demand["gb300"]) == (10.0, 18.0)
    assert all(sheets[kind].price and usd > sheets[kind].price.usd_per_hour for kind, usd in on_demand.items())
    with pytest.raises(ValidationError, match="take one of them out"):
        DeviceSheet.model_validate(sheets["h100"].model_dump() | {"unpriced": "nobody sells it"})


def test_a_known_device_without_a_price_says_why_and_how_to_give_one() -> None:
    with pytest.raises(PriceError, match=r"'h20'; no seller publishes .*`cluster.prices`.*docs/prices.md"):
        load_price_book().device("h20")


def test_a_book_of_the_users_own(tmp_path: Path) -> None:
    book = load_price_book(write(tmp_path, GOOD))
    assert book.devices[1] == DevicePrice(kind="h100", usd_per_hour=3.0, source="another", as_of=date(2026, 10, 1))
    assert book.device("h100").usd_per_hour == 3.0


def test_cost_is_device_seconds_times_price(tmp_path: Path) -> None:
    book = load_price_book(write(tmp_path, GOOD))
    # 1200 s of a whole h100 at 3 $/h is 1 $; 7200 s of half a core at 0.05 $/h is 0.05 $.
    held = [holding("h100", 1200, 1.0), holding("cpu-core", 7200, 0.5, ReplicaState.STARTING)]
    assert book.cost_usd(held) == pytest.approx(1.05, rel=1e-12)
    assert book.cost_usd([]) == 0.0
    assert book.cost_usd([holding("h100", 3600, 1.0, ReplicaState.DEAD)]) == 0.0  # it has no device


def test_a_kind_without_a_price_is_named_with_those_there_are(tmp_path: Path) -> None:
    book = load_price_book(write(tmp_path, GOOD))
    with pytest.raises(PriceError, match=r"'h10'; did you mean `h100`\?.*cpu-core, h100"):
        book.cost_usd([holding("h10", 1, 1.0)])


def test_the_snapshot_reads_back_as_the_same_book() -> None:
    book = load_price_book()
    assert PriceBook.model_validate(book.snapshot()) == book


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("usd_per_hour: 3", "usd_per_hour: -3"), ["devices.1.usd_per_hour (line 7)", "-3"]),
        (GOOD.replace("usd_per_hour: 3", "usd_per_hour: cheap"), ["devices.1.usd_per_hour", "cheap"]),
        (GOOD.replace("    source: a cloud\n", ""), ["devices.0.source", "missing"]),
        (GOOD.replace("as_of: 2026-10-01", "as_of: soon"), ["devices.1.as_of", "soon"]),
        (GOOD.replace("as_of: 2026-10-01", "as_off: 2026-10-01"), ["as_off", "did you mean `as_of`"]),
        (GOOD.replace("kind: h100", "kind: cpu-core"), ["'cpu-core' has two prices"]),
        (GOOD + "cpu_kind: core\n", ["cpu_kind is 'core'", "add it under `devices`"]),
        (GOOD + "currency: EUR\n", ["currency", "unknown key"]),
        (f"{GOOD}    biling: {{granularity_s: 60}}\n", ["biling", "did you mean `billing`"]),
        (f"{GOOD}    billing: {{granulrity_s: 60, {READ}}}\n", ["granulrity_s", "did you mean `granularity_s`"]),
        (f"{GOOD}    owned: {{released_value: 2}}\n", ["devices.1.owned.released_value", "2"]),
        (
            f"{GOOD}    owned: {{released_value: 0}}\n    billing: {{{READ}}}\n",
            ["hardware that is owned has no spot price and no billing", "take `spot` and `billing` out"],
        ),
        (f"{GOOD}    spot: {{usd_per_hour: 1}}\n", ["devices.1.spot.interruptions_per_hour", "missing"]),
        ("devices: []\n", ["devices", "at least one"]),
        ("- a\n", ["a section with keys of its own"]),
        ("devices: [\n", ["not YAML"]),
    ],
)
def test_faults_name_field_value_and_hint(tmp_path: Path, text: str, said: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_price_book(path)
    message = str(caught.value)
    assert str(path) in message
    for words in said:
        assert words in message


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scaling\.prices"):
        load_price_book(tmp_path / "none.yaml")


def moonchip(folder: Path, **changes: Any) -> Path:
    (own,) = (dict(entry) for entry in bundled_devices() if entry["kind"] == "h100")
    own |= {"kind": "moonchip", "price": own["price"] | {"usd_per_hour": 4.0}} | changes
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump({"devices": [own]}))
    return file


def test_devices_of_the_users_own_are_known_with_their_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_DEVICES, str(moonchip(tmp_path)))
    assert device_of("moonchip").flops_per_s == device_of("h100").flops_per_s
    book = load_price_book()
    assert (book.device("moonchip").usd_per_hour, book.device("h100").usd_per_hour) == (4.0, 2.95)
    assert kind_of("MOONCHIP", book.kinds) == "moonchip", "as Ray calls it"
    monkeypatch.delenv(OWN_DEVICES)
    assert "moonchip" not in load_devices()


def test_an_own_device_in_place_of_a_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_DEVICES, str(moonchip(tmp_path, kind="h100", price=None)))
    assert "h100" not in load_price_book().kinds, "it has no price"


def test_an_own_device_that_is_wrong_is_refused_by_field_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN_DEVICES, str(moonchip(tmp_path, memory_bytes={"value": -1, "source": "a guess"})))
    with pytest.raises(
        InputError, match=r"own.yaml: 1 problem\n- devices.0.memory_bytes.value \(line \d+\): -1: should be"
    ):
        load_devices()


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
