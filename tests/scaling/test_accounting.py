"""The bill: worked by hand, and its identities for any ledger."""

from __future__ import annotations

import dataclasses
import math
from datetime import date
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.builders import traced
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, StepRecord, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.accounting import (
    PHASES,
    LedgerError,
    Phase,
    billed_s,
    check_holdings,
    clip,
    cold_starts,
    leased_usd,
    leases,
    length,
    recovery_until_s,
    step_times,
    summarise,
    union,
    usage,
)
from rlhfless.scaling.prices import Billing, DevicePrice, Owned, PriceBook, PriceError, Residency

S = ReplicaState
META = TraceMeta("demo", 1, {}, {}, {})
PRICES = PriceBook(
    devices=(
        DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=date(2026, 11, 21)),
        DevicePrice(kind="h100", usd_per_hour=3.6, source="test", as_of=date(2026, 11, 21)),
    )
)


def hold(
    state: ReplicaState,
    start_s: float,
    end_s: float,
    *,
    replica: str = "a",
    device: str = "cpu-0",
    kind: str = "cpu-core",
    share: float = 1.0,
    function: FunctionName = FunctionName.GENERATION,
) -> Holding:
    return Holding(function, f"r-{replica}", replica, device, kind, share, state, start_s, end_s)


def call(
    work: Work,
    start_s: float,
    end_s: float,
    *,
    replica: str = "a",
    step: int = 1,
    function: FunctionName = FunctionName.GENERATION,
    input_tokens: int = 0,
    output_tokens: int = 0,
) -> Invocation:
    return Invocation(function, f"r-{replica}", replica, work, step, start_s, end_s, input_tokens, output_tokens)


def test_a_run_worked_by_hand() -> None:
    generation = [
        hold(S.STARTING, 0, 30),
        hold(S.STALE, 30, 32),
        hold(S.SERVING, 32, 60),
        hold(S.SLEEPING, 60, 70),
    ]
    learner = [
        hold(S.STARTING, 0, 10, replica="l", share=0.5, kind="h100", function=FunctionName.LEARNER),
        hold(S.SERVING, 10, 70, replica="l", share=0.5, kind="h100", function=FunctionName.LEARNER),
    ]
    calls = [
        call(Work.LOAD_WEIGHTS, 29, 32),  # its first second belongs to the cold start
        call(Work.GENERATE, 35, 45, input_tokens=100, output_tokens=400),
        call(Work.GENERATE, 40, 50, input_tokens=100, output_tokens=500),  # overlaps: busy 35 to 50
        call(Work.LEARN, 50, 58, replica="l", function=FunctionName.LEARNER, input_tokens=1100),
    ]
    steps = (StepRecord(1, 30.0, 60.0, {}),)
    rows = (traced(1, tokens=400), traced(1, tokens=500))
    summary = summarise(Trace(META, (*generation, *learner), tuple(calls), rows, steps), PRICES)

    generating, learning = summary.functions
    assert (generating.name, learning.name) == ("generation", "learner")
    assert generating.cold_device_s == 30
    assert generating.busy_device_s == 2 + 15
    assert generating.idle_device_s == 70 - 30 - 17
    assert generating.cost_usd == pytest.approx(70 * 0.036 / 3600)
    assert (generating.invocations, generating.cold_starts) == (3, 1)
    assert (generating.input_tokens, generating.output_tokens) == (200, 900)

    assert (learning.cold_device_s, learning.busy_device_s, learning.idle_device_s) == (5, 4, 26)
    assert learning.cost_usd == pytest.approx(35 * 3.6 / 3600)

    assert summary.total.provisioned_device_s == 70 + 35
    assert summary.cost_usd == pytest.approx(generating.cost_usd + learning.cost_usd)
    # Within the step: sync 30-32, generation 35-50, learn 50-58; nothing in 32-35 and 58-60.
    # Moving weights is no work of a step, so the sync counts as outside, too.
    (times,) = summary.steps
    assert times.wall_s == 30
    worked = {phase: seconds for phase, seconds in times.phases_s.items() if seconds}
    assert worked == {Phase.GENERATION: 15, Phase.LEARN: 8, Phase.SYNC: 2}
    assert times.overhead_s == 3 + 2 + 2
    assert summary.response_tokens == {0.5: 450, 0.9: 490, 0.99: 499, 1.0: 500}


def test_an_empty_trace_costs_nothing() -> None:
    summary = summarise(Trace(META), PRICES)
    assert summary.functions == ()
    assert summary.cost_usd == 0
    assert summary.response_tokens == {}


def test_phases_may_overlap_and_outside_counts_instants_once() -> None:
    step = StepRecord(1, 0.0, 10.0, {})
    calls = [
        call(Work.GENERATE, -5, 6),
        call(Work.SCORE, 3, 7, replica="s", function=FunctionName.SCORING),
        call(Work.LOGPROBS, 20, 30),
    ]
    times = step_times(step, calls)
    assert (times.phases_s[Phase.GENERATION], times.phases_s[Phase.SCORING]) == (6, 4)
    assert times.phases_s[Phase.REFERENCE] == 0
    assert times.overhead_s == 3


@pytest.mark.parametrize(
    ("function", "work", "phase"),
    [
        (FunctionName.REFERENCE, Work.LOGPROBS, Phase.REFERENCE),
        (FunctionName.CRITIC, Work.LOGPROBS, Phase.CRITIC),
        (FunctionName.CRITIC, Work.LEARN, Phase.CRITIC),
        ("sentiment", Work.LOGPROBS, Phase.COLUMNS),
        ("sentiment", Work.LEARN, Phase.COLUMNS),
        (FunctionName.LEARNER, Work.LEARN, Phase.LEARN),
        (FunctionName.LEARNER, Work.EVALUATE, Phase.LEARN),
        (FunctionName.REWARD_MODEL, Work.SCORE, Phase.SCORING),
        (FunctionName.CRITIC, Work.CHECKPOINT, Phase.CHECKPOINT),
    ],
)
def test_the_time_of_each_function_counts_under_its_own_name(function: str, work: Work, phase: Phase) -> None:
    times = step_times(StepRecord(1, 0.0, 10.0, {}), [call(work, 2, 5, function=function)])
    assert {each: seconds for each, seconds in times.phases_s.items() if seconds} == {phase: 3}


def test_the_recovery_of_a_step_is_in_none_of_its_phases_and_all_adds_up() -> None:
    calls = [
        call(Work.GENERATE, 1, 4, step=7),  # the try that failed
        call(Work.RESTORE, 6, 9, replica="l", step=4, function=FunctionName.LEARNER),
        call(Work.LEARN, 10, 14, replica="l", function=FunctionName.LEARNER, step=6),  # again, by the new learner
        call(Work.LOAD_WEIGHTS, 30, 31, step=7),
        call(Work.GENERATE, 32, 33, step=7),
        call(Work.LEARN, 35, 38, replica="l", step=7, function=FunctionName.LEARNER),
    ]
    assert recovery_until_s(7, 16.0, calls) == 32
    times = step_times(StepRecord(7, 0.0, 40.0, {"recovery_s": 32.0}), calls)
    assert {phase: seconds for phase, seconds in times.phases_s.items() if seconds} == {
        Phase.GENERATION: 1,
        Phase.LEARN: 3,
    }
    assert (times.wall_s, times.recovery_s, times.overhead_s) == (40, 32, 2 + 2)
    assert times.wall_s == times.recovery_s + times.overhead_s + 1 + 3


def test_a_step_in_which_no_function_worked_has_recovered_when_its_last_try_began() -> None:
    assert recovery_until_s(1, 5.0, [call(Work.LOAD_WEIGHTS, 6, 7), call(Work.GENERATE, 1, 2)]) == 5.0


def test_every_kind_of_work_has_a_phase() -> None:
    assert set(PHASES) == set(Work)


def test_a_tensor_parallel_actor_is_busy_on_all_its_devices() -> None:
    holdings = [hold(S.SERVING, 0, 10, device=f"gpu-{i}", kind="h100") for i in range(2)]
    row = usage("generation", holdings, [call(Work.GENERATE, 2, 5)], PRICES)
    assert (row.busy_device_s, row.idle_device_s) == (6, 14)


def test_work_outside_any_holding_is_not_billed() -> None:
    row = usage("generation", [hold(S.SERVING, 0, 10)], [call(Work.GENERATE, 8, 13)], PRICES)
    assert (row.busy_device_s, row.idle_device_s) == (2, 8)
    row = usage("generation", [hold(S.SERVING, 0, 10)], [call(Work.GENERATE, 1, 2, replica="ghost")], PRICES)
    assert (row.busy_device_s, row.idle_device_s) == (0, 10)


def test_overlapping_holdings_are_refused() -> None:
    with pytest.raises(LedgerError, match=r"serving holding of r-a \(incarnation a\) on cpu-0 .* overlaps"):
        check_holdings([hold(S.SERVING, 9, 20), hold(S.STALE, 0, 10)])
    with pytest.raises(LedgerError, match="overlaps"):  # with an earlier, longer one
        check_holdings([hold(S.SERVING, 0, 100), hold(S.STALE, 10, 20), hold(S.STALE, 30, 40)])
    check_holdings([hold(S.STALE, 0, 10), hold(S.SERVING, 10, 20)])
    check_holdings([hold(S.SERVING, 0, 10), hold(S.SERVING, 5, 15, device="cpu-1")])
    check_holdings([hold(S.SERVING, 0, 10, share=0.5), hold(S.SERVING, 5, 15, replica="b", share=0.5)])


def test_what_cannot_be_billed_is_refused() -> None:
    with pytest.raises(LedgerError, match="ends before it starts"):
        summarise(Trace(META, (hold(S.SERVING, 10, 5),)), PRICES)
    with pytest.raises(PriceError, match="abacus"):
        summarise(Trace(META, (hold(S.SERVING, 0, 1, kind="abacus"),)), PRICES)


def test_a_start_in_pieces_on_two_devices_is_one_cold_start() -> None:
    pieces = [
        hold(S.STARTING, 0, 5),
        hold(S.STARTING, 5, 12),
        hold(S.STALE, 12, 13),
        hold(S.STARTING, 40, 43),
    ]
    devices = [dataclasses.replace(piece, device="cpu-1") for piece in pieces]
    assert cold_starts([*pieces, *devices]) == [(0, 12), (40, 43)]
    other = dataclasses.replace(pieces[0], replica="r-b")
    assert cold_starts([*pieces, other]) == [(0, 12), (40, 43), (0, 5)]


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[list[Holding], list[Invocation]]:
    """Contiguous lives on whole seconds, and calls anywhere, also outside of them."""
    states = [S.STARTING, S.STALE, S.SERVING, S.DRAINING, S.SLEEPING, S.SUSPECT]
    holdings: list[Holding] = []
    for number in range(draw(st.integers(0, 3))):
        function = draw(st.sampled_from(list(FunctionName)))
        share = draw(st.sampled_from([1.0, 0.5, 1 / 3]))
        kind = draw(st.sampled_from(["cpu-core", "h100"]))
        now = draw(st.integers(0, 20))
        for state in draw(st.lists(st.sampled_from(states), max_size=6)):
            end = now + draw(st.integers(0, 9))
            of = {"replica": str(number), "kind": kind, "share": share, "function": function}
            holdings += [hold(state, now, end, device=f"d{device}", **of) for device in range(1 + number % 2)]
            now = end
    works, functions = st.sampled_from(list(Work)), st.sampled_from(list(FunctionName))
    drawn = st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 15), works, functions)
    calls = [
        call(work, start, start + duration, replica=str(replica), function=function)
        for replica, start, duration, work, function in draw(st.lists(drawn, max_size=12))
    ]
    return holdings, calls


@given(ledgers())
def test_busy_idle_and_cold_are_provisioned_and_cost_is_holdings_times_price(
    ledger: tuple[list[Holding], list[Invocation]],
) -> None:
    holdings, calls = ledger
    summary = summarise(Trace(META, tuple(holdings), tuple(calls)), PRICES)
    provisioned = math.fsum((h.end_s - h.start_s) * h.share for h in holdings)
    price = {"cpu-core": 0.036, "h100": 3.6}
    cost = math.fsum((h.end_s - h.start_s) * h.share * price[h.device_kind] / 3600 for h in holdings)
    for row in (*summary.functions, summary.total):
        assert min(row.busy_device_s, row.idle_device_s, row.cold_device_s) >= 0
    for rows in ((summary.total,), summary.functions):
        held = math.fsum(row.busy_device_s + row.idle_device_s + row.cold_device_s for row in rows)
        assert held == pytest.approx(provisioned, rel=1e-9)
        assert math.fsum(row.cost_usd for row in rows) == pytest.approx(cost, rel=1e-9)


@given(ledgers())
def test_each_second_is_counted_as_a_loop_would_count_it(
    ledger: tuple[list[Holding], list[Invocation]],
) -> None:
    holdings, calls = ledger
    busy = idle = cold = 0.0
    for h in holdings:
        for second in range(int(h.start_s), int(h.end_s)):
            works = any(c.incarnation == h.incarnation and c.start_s <= second < c.end_s for c in calls)
            if h.state is S.STARTING:
                cold += h.share
            elif works:
                busy += h.share
            else:
                idle += h.share
    row = usage("total", holdings, calls, PRICES)
    assert (row.busy_device_s, row.idle_device_s, row.cold_device_s) == pytest.approx((busy, idle, cold))


whole = st.tuples(st.integers(0, 40), st.integers(-3, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(whole, max_size=10), st.integers(0, 50), st.integers(0, 30))
def test_intervals_are_sets_of_instants(pairs: list[tuple[int, int]], start: int, span: int) -> None:
    def instants(intervals: list[tuple[float, float]]) -> set[int]:
        return {s for low, high in intervals for s in range(int(low), int(high))}

    merged = union(pairs)
    assert instants(merged) == {s for low, high in pairs for s in range(low, high)}
    assert all(first[1] < second[0] for first, second in pairwise(merged))
    assert length(merged) == len(instants(merged))
    inside = clip(merged, start, start + span)
    assert instants(inside) == {s for s in instants(merged) if start <= s < start + span}
    assert length(inside) == len(instants(inside))


def test_prompt_tokens_that_were_computed_once() -> None:
    """160 of 200 tokens had to be computed; the reference would have computed 300 tokens in 3 s, and did 200 in 2 s."""
    metrics = {"prompt_tokens_computed/generation": 120.0, "prompt_tokens_unique/generation": 100.0}
    metrics |= {"prompt_tokens_computed/reference": 80.0, "prompt_tokens_unique/reference": 60.0}
    logprobs = Invocation(
        FunctionName.REFERENCE, "r", "i", Work.LOGPROBS, 1, 1.0, 3.0, input_tokens=300, cached_tokens=100
    )
    trace = Trace(META, invocations=(logprobs,), steps=(StepRecord(1, 0.0, 9.0, metrics),))
    prompts = summarise(trace, PRICES).prompts
    assert prompts is not None
    assert prompts.once == pytest.approx(0.8)
    assert prompts.saved == pytest.approx(1 / 10)
    assert summarise(Trace(META), PRICES).prompts is None


READ = date(2026, 11, 21)
MINUTES = Billing(granularity_s=60, minimum_s=120, source="test", as_of=READ)
CORE = DevicePrice(kind="cpu-core", usd_per_hour=0.036, source="test", as_of=READ)


def book(**h100: object) -> PriceBook:
    """An h100 for 3.6 $ an hour, 0.001 $ a second."""
    device = DevicePrice.model_validate({"kind": "h100", "usd_per_hour": 3.6, "source": "test", "as_of": READ} | h100)
    return PriceBook(devices=(CORE, device))


def lease_hold(
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
    held = [lease_hold(0, 100), lease_hold(110, 130), lease_hold(200, 210)]
    first, second = leases(held, book(billing=MINUTES))
    assert (first.start_s, first.end_s, first.paid_until_s, first.held_s) == (0, 130, 180, 120)
    assert first.unused_s == 60
    assert (second.start_s, second.paid_until_s) == (200, 320)
    # 120 + 10 s held, 60 + 110 s paid for and not held.
    assert leased_usd(held, book(billing=MINUTES)) == pytest.approx(0.300)
    assert leased_usd(held, book()) == pytest.approx(0.130)


def test_devices_have_leases_of_their_own_and_shares_have_one() -> None:
    prices = book(billing=MINUTES)
    assert len(leases([lease_hold(0, 100), lease_hold(0, 100, device="gpu-1")], prices)) == 2
    halves = [lease_hold(0, 100, share=0.5), lease_hold(0, 100, share=0.5)]
    assert leased_usd(halves, prices) == pytest.approx(0.120)  # 100 s held by both, 20 s by neither


def test_a_state_without_a_device_is_no_lease() -> None:
    assert leases([lease_hold(0, 100, state=ReplicaState.DEAD)], book(billing=MINUTES)) == []


def test_a_replica_asleep_in_host_memory_is_on_no_lease() -> None:
    memory = Residency(usd_per_hour=0.36, source="test", as_of=READ)
    held = [lease_hold(0, 100), lease_hold(100, 1100, state=ReplicaState.SLEEPING)]
    (lease,) = leases(held, book(billing=MINUTES, residency=memory))
    assert (lease.end_s, lease.paid_until_s) == (100, 120)
    # 100 s on the device, 20 s paid for, 1000 s in memory at a tenth of the price.
    assert leased_usd(held, book(billing=MINUTES, residency=memory)) == pytest.approx(0.220)


def test_a_sleeping_replica_costs_its_residency() -> None:
    asleep = [lease_hold(0, 1000, state=ReplicaState.SLEEPING)]
    assert book().cost_usd(asleep) == pytest.approx(1.0)
    memory = Residency(usd_per_hour=0.36, source="test", as_of=READ)
    assert book(residency=memory).cost_usd(asleep) == pytest.approx(0.1)
    assert book(residency=memory).cost_usd([lease_hold(0, 1000)]) == pytest.approx(1.0)


def test_releasing_owned_hardware_saves_what_others_make_of_it() -> None:
    owned = book(owned=Owned(released_value=0.25))
    assert owned.device("h100").saved_usd_per_hour == pytest.approx(0.9)
    assert owned.cost_usd([lease_hold(0, 1000)]) == pytest.approx(1.0)
    assert book(rented_by="device").device("h100").saved_usd_per_hour == pytest.approx(3.6)
    whole = book().device("h100")  # a node is paid for, whatever is given back of it
    assert (whole.saved_usd_per_hour, whole.released_usd_per_hour) == (0.0, 3.6)


spans = st.lists(
    st.builds(
        lambda start, length, device: lease_hold(start, start + length, device=device),
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


def test_a_judge_is_compared_with_devices_of_its_own() -> None:
    judge = Holding("judge_grader", "g", "g", "cpu-1", "cpu-core", 0.5, S.SERVING, 100.0, 130.0)
    bill = summarise(Trace(META, (judge, hold(S.SERVING, 40.0, 140.0)), (), (), ()), PRICES)
    assert bill.pools_usd == {"judge_grader": pytest.approx(100.0 / 3600 * 0.036)}
    (usage_of_judge,) = (row for row in bill.functions if row.name == "judge_grader")
    assert usage_of_judge.cost_usd == pytest.approx(0.5 * 30.0 / 3600 * 0.036)
