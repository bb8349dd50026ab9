"""Plans against brute force and exact dynamic programmes, and what every plan keeps to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fakes.views import Roofline, Straight, brute_force, device, fleet, group_times, least_time_s, least_usd
from rlhfless.scaling.policies.contract import CheapestUnderDeadline, FastestUnderBudget, Weighted
from rlhfless.scaling.policies.cost_aware.group_times import responses
from rlhfless.scaling.policies.cost_aware.plan import GenerationPlan, Standby, plan

WITHIN = 1.01
"""What a plan may miss the exact optimum by."""


def warm(actors: int) -> Standby:
    return Standby("warm", actors, 0.0)


def drawn(samples: int, seed: int, *, shape: str = "lognormal", siblings: int = 8, alike: bool = True):
    """A step's responses; `alike` siblings have one predicted length."""
    random = np.random.default_rng(seed)
    prompts = samples // siblings
    size = prompts if alike else samples
    if shape == "lognormal":
        lengths = random.lognormal(6.0, 0.9, size)
    else:
        lengths = np.where(random.random(size) < 0.8, random.normal(250, 50, size), random.normal(4000, 600, size))
    tokens = np.clip(np.repeat(lengths, siblings) if alike else lengths, 1, 12_000)
    return responses(tokens, np.repeat(np.arange(prompts), siblings), random.integers(50, 400, prompts))


# By hand: lengths 2, 2, 8 and a(B) = 1 + B/2. One actor: 2 iterations of 2.5 s and 6 of 1.5 s are 14 s.
# The long one alone takes 8 x 1.5 = 12 s and the short ones 2 x 2 = 4 s: 12 s in all, for 16 USD.
THREE = responses([2, 8, 2], [0, 1, 2], [0, 0, 0])


def test_the_cheapest_is_one_actor_where_time_allows():
    made = plan(THREE, fleet(device(Straight(), warm(3))), CheapestUnderDeadline(14.0))
    assert [actor.samples.tolist() for actor in made.actors] == [[1, 2, 0]]
    assert (made.step_s, made.usd, made.feasible) == (pytest.approx(14), pytest.approx(14), True)


def test_a_deadline_adds_actors_that_are_released_when_their_group_ends():
    made = plan(THREE, fleet(device(Straight(), warm(3))), CheapestUnderDeadline(12.5))
    assert [actor.samples.tolist() for actor in made.actors] == [[1], [2, 0]]
    assert [actor.finish_s for actor in made.actors] == pytest.approx([12, 4])
    assert made.usd == pytest.approx(16)


def test_an_impossible_deadline_is_planned_as_fast_as_can_be():
    made = plan(THREE, fleet(device(Straight(), warm(3))), CheapestUnderDeadline(5.0))
    assert not made.feasible
    assert made.step_s == pytest.approx(12)
    assert made.reason.startswith(
        "no plan on these devices ends before 12 s, so not cheapest within 5 s; 2 actors: 12 s"
    )


def test_a_budget_buys_time():
    options = fleet(device(Straight(), warm(3)))
    assert plan(THREE, options, FastestUnderBudget(16.0)).step_s == pytest.approx(12)
    assert plan(THREE, options, FastestUnderBudget(15.9)).step_s == pytest.approx(14)


def test_an_impossible_budget_is_planned_as_cheap_as_can_be():
    made = plan(THREE, fleet(device(Straight(), warm(3))), FastestUnderBudget(3.0))
    assert not made.feasible
    assert made.usd == pytest.approx(14)
    assert made.nearest == FastestUnderBudget(made.usd)
    assert plan(THREE, fleet(device(Straight(), warm(3))), made.nearest).feasible
    assert made.reason.startswith("no plan on these devices costs less than 14 USD, so not fastest for at most 3 USD; ")


def test_a_budget_pays_for_what_waits():
    # 2 USD a second beside the actors: 14 s cost 14 + 28 = 42 USD in all, 12 s cost 16 + 24 = 40.
    options = fleet(device(Straight(), warm(3)))
    kept = plan(THREE, options, FastestUnderBudget(40.0), waiting_usd_per_s=2.0)
    assert (kept.feasible, kept.step_s, kept.usd, kept.waiting_usd) == (True, *map(pytest.approx, (12, 16, 24)))
    # Nothing fits into 30 USD: not the fewest actors, which would cost more in all.
    nearest = plan(THREE, options, FastestUnderBudget(30.0), waiting_usd_per_s=2.0)
    assert (nearest.feasible, len(nearest.actors), nearest.step_s) == (False, 2, pytest.approx(12))
    assert nearest.nearest == FastestUnderBudget(nearest.usd + nearest.waiting_usd)
    assert nearest.reason.startswith(
        "no plan on these devices costs less than 40 USD, so not fastest for at most 30 USD"
    )


@given(st.integers(0, 10**6), st.floats(0.0, 3.0), st.floats(1.0, 200.0), st.floats(1.0, 2.0))
def test_a_larger_budget_buys_no_slower_step_and_no_limit_is_exceeded(seed, waiting, budget, more):
    step = drawn(48, seed, siblings=4)
    options = fleet(device(Roofline(), warm(9)), max_actors=9)
    tight, loose = (
        plan(step, options, FastestUnderBudget(usd), waiting_usd_per_s=waiting) for usd in (budget, budget * more)
    )
    for made in (tight, loose):
        assert not made.feasible or made.usd + made.waiting_usd <= made.contract.budget_usd
    if tight.feasible:
        assert loose.feasible
        assert loose.step_s <= tight.step_s * WITHIN


def test_devices_that_are_paid_for_anyway_are_no_extra_cost():
    made = plan(THREE, fleet(device(Straight(), warm(3), usd_per_s=0.0)), CheapestUnderDeadline(14.0))
    assert made.reason == "2 actors: 12 s, no extra cost; more would save no time"


def test_weights_choose_between_the_two_ends():
    options = fleet(device(Straight(), warm(3)))
    # From 14 s and 14 USD to 12 s and 16 USD: 2/12 of T0 against 2/14 of C0, so time wins at equal weights.
    steps = [plan(THREE, options, Weighted(weight)).step_s for weight in (0.0, 0.4, 0.5, 1.0)]
    assert steps == pytest.approx([14, 14, 12, 12])


def test_what_an_actor_costs_until_the_next_step_counts_against_one_more():
    # With the weight half, a second is worth the cheapest plan's cost / the least time: 14 / 12 USD, and 17 / 12 where
    # an actor costs 3 USD between two steps. One actor is then worth 17 + 14 x 17 / 12 = 36.8, two are 22 + 17 = 39.
    free = plan(THREE, fleet(device(Straight(), warm(3))), Weighted(0.5))
    assert (len(free.actors), free.usd) == (2, pytest.approx(16))
    dear = plan(THREE, fleet(device(Straight(), warm(3), between_usd=3.0)), Weighted(0.5))
    assert (len(dear.actors), dear.usd) == (1, pytest.approx(17))


def test_the_wait_and_the_weights_are_paid_for_and_late_actors_get_the_short_ones():
    late = device(Straight(), warm(1), Standby("host", 1, 3.0))
    made = plan(THREE, fleet(late, weight_sync_s=1.0), CheapestUnderDeadline(13.5))
    assert [(actor.tier, actor.samples.tolist()) for actor in made.actors] == [("warm", [1]), ("host", [2, 0])]
    assert [actor.finish_s for actor in made.actors] == pytest.approx([1 + 12, 3 + 1 + 4])
    assert made.usd == pytest.approx(13 + 8)


def test_siblings_stay_together_if_nothing_is_gained_by_splitting():
    # Four prompts of four alike siblings on four actors: each prompt whole.
    step = responses([50] * 16, np.repeat(range(4), 4), [200] * 4)
    made = plan(step, fleet(device(Roofline(), warm(4))), Weighted(1.0))
    assert sorted(actor.samples.tolist() for actor in made.actors) == [
        [3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8], [15, 14, 13, 12],
    ]  # fmt: skip


def test_siblings_are_split_where_that_pays():
    # One prompt of eight on an engine whose time is all per sequence: two actors need half the time of one.
    step = responses([100] * 8, [0] * 8, [10])
    made = plan(step, fleet(device(Straight(1e-3, 1.0), warm(2))), Weighted(1.0))
    assert [actor.samples.size for actor in made.actors] == [4, 4]


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=7)


@given(lengths, st.integers(1, 3), st.floats(0.0, 3.0), st.integers(0, 100))
def test_straight_engines_are_planned_exactly(tokens, actors, fixed_s, share):
    """Brute force over all contiguous groups: fastest, cheapest, and cheapest under a deadline between the two."""
    step = responses(tokens, range(len(tokens)), [0] * len(tokens))
    option = device(Straight(fixed_s + 0.01, 0.5), warm(actors))
    every = brute_force(group_times(step, option), [0.0] * actors)
    fastest_s, cheapest = min(every)[0], min(usd for _, usd in every)
    assert plan(step, fleet(option), Weighted(1.0)).step_s <= fastest_s * WITHIN
    assert plan(step, fleet(option), Weighted(0.0)).usd == pytest.approx(cheapest)
    slowest_s = max(s for s, usd in every if usd <= cheapest * (1 + 1e-9))
    deadline_s = fastest_s + share / 100 * max(slowest_s - fastest_s, 0.0) + 1e-9
    made = plan(step, fleet(option), CheapestUnderDeadline(deadline_s))
    assert made.feasible
    assert made.usd == pytest.approx(min(usd for s, usd in every if s <= deadline_s))


@given(lengths, st.floats(0.0, 20.0), st.integers(0, 100))
def test_late_actors_are_planned_as_brute_force_does(tokens, wait_s, share):
    step = responses(tokens, range(len(tokens)), [0] * len(tokens))
    option = device(Straight(), warm(1), Standby("cold", 2, wait_s))
    every = brute_force(group_times(step, option), [0.0, wait_s, wait_s])
    deadline_s = min(every)[0] * (1 + share / 50) + 1e-9
    made = plan(step, fleet(option), CheapestUnderDeadline(deadline_s))
    assert made.feasible
    assert made.usd <= min(usd for s, usd in every if s <= deadline_s) * WITHIN


@pytest.mark.parametrize("shape", ["lognormal", "bimodal"])
@pytest.mark.parametrize("tight", [1.001, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("waits_s", [(0.0, 0.0), (2.0, 20.0)])
def test_a_deadline_costs_what_the_exact_programme_says(shape, tight, waits_s):
    step = drawn(256, 1, shape=shape)
    option = device(Roofline(), warm(8), *(Standby(f"tier{i}", 8, wait) for i, wait in enumerate(waits_s)))
    table, ready_s = group_times(step, option), [1.0] * 8 + [1 + w for w in waits_s for _ in range(8)]
    limit_s = least_time_s(table, ready_s) * tight
    made = plan(step, fleet(option, weight_sync_s=1.0), CheapestUnderDeadline(limit_s))
    assert made.feasible
    assert made.step_s <= limit_s
    assert made.usd <= least_usd(table, ready_s, 1.0, limit_s) * WITHIN


@pytest.mark.parametrize("shape", ["lognormal", "bimodal"])
@pytest.mark.parametrize("extra", [1.05, 1.2, 1.6])
def test_a_budget_buys_the_time_that_the_exact_programme_says(shape, extra):
    step, option = drawn(256, 2, shape=shape), device(Roofline(), warm(16))
    table, ready_s = group_times(step, option), [0.0] * 16
    budget_usd = least_usd(table, ready_s, 1.0, math.inf) * extra
    made = plan(step, fleet(option), FastestUnderBudget(budget_usd))
    assert made.feasible
    assert made.usd <= budget_usd
    # For two percent less money no plan is more than two percent faster: cuts at the gap between two modes of lengths
    # are not looked for.
    assert least_usd(table, ready_s, 1.0, made.step_s / 1.02) > budget_usd / 1.02


@pytest.mark.parametrize("shape", ["lognormal", "bimodal"])
@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_weights_find_the_best_of_all_limits(shape, weight):
    step, option = drawn(128, 3, shape=shape), device(Roofline(), warm(12))
    table, ready_s = group_times(step, option), [0.0] * 12
    fastest_s, cheapest = least_time_s(table, ready_s), least_usd(table, ready_s, 1.0, math.inf)
    made = plan(step, fleet(option), Weighted(weight))

    def value(time_s: float, usd: float) -> float:
        return weight * time_s / fastest_s + (1 - weight) * usd / cheapest

    limits_s = np.geomspace(fastest_s * 1.0001, fastest_s * 20, 60)
    best = min(value(limit, least_usd(table, ready_s, 1.0, limit)) for limit in limits_s)
    assert value(made.step_s, made.usd) <= best * WITHIN


def _keeps_to(made: GenerationPlan, samples: int) -> None:
    everyone = np.concatenate([actor.samples for actor in made.actors])
    assert sorted(everyone.tolist()) == list(range(samples))
    assert made.step_s == max(actor.finish_s for actor in made.actors)
    assert made.usd == pytest.approx(sum(actor.usd for actor in made.actors))


contracts = st.one_of(
    st.builds(Weighted, st.floats(0, 1)),
    st.builds(CheapestUnderDeadline, st.floats(0, 60)),
    st.builds(FastestUnderBudget, st.floats(0, 120)),
)


@given(st.integers(0, 10**6), st.booleans(), contracts, st.integers(1, 9), st.sampled_from([7000, 30_000, 10**6]))
def test_every_plan_keeps_to_what_it_says(seed, alike, contract, actors, memory):
    """Each sample once, no more actors than allowed, contracts kept or declared infeasible, the same plan again."""
    step = drawn(48, seed, siblings=4, alike=alike)
    assume(step.tokens.max() + 2 * 400 < memory)
    quick = device(Roofline(), warm(2), Standby("cold", 9, 3.0), kv_capacity_tokens=memory, max_sequences=16)
    options = fleet(quick, weight_sync_s=0.5, max_actors=actors)
    made, again = (plan(step, options, contract) for _ in range(2))
    _keeps_to(made, 48)
    assert len(made.actors) <= actors
    assert [a.samples.tolist() for a in made.actors] == [a.samples.tolist() for a in again.actors]
    assert (made.step_s, made.usd, made.reason) == (again.step_s, again.usd, again.reason)
    if isinstance(contract, CheapestUnderDeadline):
        assert made.feasible == (made.step_s <= contract.deadline_s)
    if isinstance(contract, FastestUnderBudget):
        assert made.feasible == (made.usd <= contract.budget_usd)


def test_an_engine_that_slows_down_with_the_batch_gets_small_groups():
    class Thrashing(Straight):
        def iteration_s(self, sequences: int) -> float:
            return 0.1 + 0.1 * sequences**2

    # a(B) / B is least at B = 1: one by one is the cheapest, although one actor could do all in time.
    step = responses([10] * 8, range(8), [0] * 8)
    made = plan(step, fleet(device(Thrashing(), warm(8))), CheapestUnderDeadline(1e4))
    assert made.usd <= 8 * 10 * 0.2 * 1.25


def test_the_decision_says_what_it_was_made_from():
    made = plan(THREE, fleet(device(Straight(), warm(3))), CheapestUnderDeadline(14.0))
    decision = made.record(step=4, at_s=100.0)
    assert (decision.step, decision.kind, decision.choice) == (4, "plan", "1 actors")
    assert decision.inputs["reason"] == "1 actors: 14 s, $14; 2 would save 2 s for $2"
