"""Billing granularity, residency and owned hardware: worked by hand, and their identities."""

from __future__ import annotations

from datetime import date
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.scaling.accounting import billed_s, leased_usd, leases
from rlhfless.scaling.prices import Billing, DevicePrice, Owned, PriceBook, Residency

READ = date(2026, 11, 21)
MINUTES = Billing(granularity_s=60, minimum_s=120, source="test", as_of=READ)
CORE = DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=READ)


def book(**h100: object) -> PriceBook:
    """An h100 for 3.6 $ an hour, 0.001 $ a second."""
    device = DevicePrice.model_validate({"kind": "h100", "usd_per_hour": 3.6, "source": "test", "as_of": READ} | h100)
    return PriceBook(devices=(CORE, device))


def hold(
    start_s: float,
    end_s: float,
    *,
    device: str = "gpu-0",
    share: float = 1.0,
    state: ReplicaState = ReplicaState.SERVING,
) -> Holding:
    return Holding(FunctionName.GENERATION, "r", "i", device, "h100", share, state, start_s, end_s)


def test_time_is_rounded_up_by_hand() -> None:
    assert billed_s(61.5, None) == 61.5
    assert billed_s(130, MINUTES) == 180
    assert billed_s(30, MINUTES) == 120
    assert billed_s(180 * (1 + 1e-12), MINUTES) == pytest.approx(180)
    assert billed_s(0, MINUTES) == 0
    assert billed_s(30, MINUTES.model_copy(update={"granularity_s": 0.0})) == 120


def test_coming_back_within_the_paid_time_goes_on_with_the_lease() -> None:
    # 0..100 is paid until 120. Coming back at 110 goes on: 0..130 is paid until 180. At 200 a new lease begins.
    held = [hold(0, 100), hold(110, 130), hold(200, 210)]
    first, second = leases(held, book(billing=MINUTES))
    assert (first.start_s, first.end_s, first.paid_until_s, first.held_s) == (0, 130, 180, 120)
    assert first.unused_s == 60
    assert (second.start_s, second.paid_until_s) == (200, 320)
    # 120 + 10 s held, 60 + 110 s paid for and not held.
    assert leased_usd(held, book(billing=MINUTES)) == pytest.approx(0.300)
    assert leased_usd(held, book()) == pytest.approx(0.130)


def test_devices_have_leases_of_their_own_and_shares_have_one() -> None:
    prices = book(billing=MINUTES)
    assert len(leases([hold(0, 100), hold(0, 100, device="gpu-1")], prices)) == 2
    halves = [hold(0, 100, share=0.5), hold(0, 100, share=0.5)]
    assert leased_usd(halves, prices) == pytest.approx(0.120)  # 100 s held by both, 20 s by neither


def test_a_state_without_a_device_is_no_lease() -> None:
    assert leases([hold(0, 100, state=ReplicaState.DEAD)], book(billing=MINUTES)) == []


def test_a_replica_asleep_in_host_memory_is_on_no_lease() -> None:
    memory = Residency(usd_per_hour=0.36, source="test", as_of=READ)
    held = [hold(0, 100), hold(100, 1100, state=ReplicaState.SLEEPING)]
    (lease,) = leases(held, book(billing=MINUTES, residency=memory))
    assert (lease.end_s, lease.paid_until_s) == (100, 120)
    # 100 s on the device, 20 s paid for, 1000 s in memory at a tenth of the price.
    assert leased_usd(held, book(billing=MINUTES, residency=memory)) == pytest.approx(0.220)


def test_a_sleeping_replica_costs_its_residency() -> None:
    asleep = [hold(0, 1000, state=ReplicaState.SLEEPING)]
    assert book().cost_usd(asleep) == pytest.approx(1.0)
    memory = Residency(usd_per_hour=0.36, source="test", as_of=READ)
    assert book(residency=memory).cost_usd(asleep) == pytest.approx(0.1)
    assert book(residency=memory).cost_usd([hold(0, 1000)]) == pytest.approx(1.0)


def test_releasing_owned_hardware_saves_what_others_make_of_it() -> None:
    owned = book(owned=Owned(released_value=0.25))
    assert owned.device("h100").saved_usd_per_hour == pytest.approx(0.9)
    assert owned.cost_usd([hold(0, 1000)]) == pytest.approx(1.0)
    assert book(rented_by="device").device("h100").saved_usd_per_hour == pytest.approx(3.6)
    whole = book().device("h100")  # a node is paid for, whatever is given back of it
    assert (whole.saved_usd_per_hour, whole.released_usd_per_hour) == (0.0, 3.6)


spans = st.lists(
    st.builds(
        lambda start, length, device: hold(start, start + length, device=device),
        st.integers(0, 2000),
        st.integers(1, 500),
        st.sampled_from(["gpu-0", "gpu-1"]),
    ),
    max_size=8,
)


@given(spans, spans)
def test_costs_add_up(one: list[Holding], two: list[Holding]) -> None:
    prices = book()
    assert prices.cost_usd(one + two) == pytest.approx(prices.cost_usd(one) + prices.cost_usd(two))
    assert leased_usd(one, prices) == pytest.approx(prices.cost_usd(one), abs=1e-9)


@given(spans, st.sampled_from([0.0, 1.0, 60.0, 3600.0]), st.sampled_from([0.0, 60.0, 1000.0]))
def test_leases_cover_what_is_held_and_bill_no_less(
    held: list[Holding], granularity_s: float, minimum_s: float
) -> None:
    billing = Billing(granularity_s=granularity_s, minimum_s=minimum_s, source="test", as_of=READ)
    found = leases(held, book(billing=billing))
    for lease in found:
        assert lease.unused_s >= -1e-9
        assert lease.paid_until_s - lease.start_s >= minimum_s - 1e-9
    for first, second in pairwise(found):
        assert first.device != second.device or second.start_s > first.paid_until_s
    assert leased_usd(held, book(billing=billing)) >= book().cost_usd(held) - 1e-9
