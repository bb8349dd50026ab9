"""Steps that do not learn from all that they draw, by hand; and weights that are loaded in the midst of a draw."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.tiny_scenario import (
    LEARNER,
    LINKS,
    MODEL,
    PRICES,
    actor,
    batch_of,
    called,
    on,
    scenario,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import Work
from rlhfless.scaling.engine_model import decode_s
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.generation import Generation
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.selection import as_begun, steps_of
from rlhfless.sim.setup import Setup
from rlhfless.sim.simulation import LOOKS, Simulation
from rlhfless.spec import AsyncSpec, PartialSpec, SyncSpec
from rlhfless.spec.generation import ScheduleSpec

APART = [{"name": "static_disaggregated"}]

OFTEN = dataclasses.replace(LINKS, heartbeat_s=0.001)


def batches_of(*lengths: list[int]) -> list[RolloutBatch]:
    """One batch a step, of groups of one response, each to a prompt of five tokens."""
    batches = [batch_of([(5, [length]) for length in each]) for each in lengths]
    return [
        dataclasses.replace(batch, step=step, prompt_ids=tuple(f"{step}{i}" for i in range(batch.groups)))
        for step, batch in enumerate(batches, 1)
    ]


def simulated(
    schedule: ScheduleSpec, batches: list[RolloutBatch], setup: Setup | None = None
) -> tuple[Simulation, list[Generation]]:
    simulation = Simulation(
        dataclasses.replace(setup or setup_of(actor(0), links=OFTEN), schedule=schedule), Evenly(), PRICES
    )
    return simulation, list(steps_of(simulation, batches))


def learned(generation: Generation) -> list[str]:
    progress = generation.progress
    return [name for name, left in zip(progress.whole.prompt_ids, progress.left_out, strict=True) if not left]


def test_a_sample_that_is_left_goes_on_with_its_tokens_whose_kv_is_computed_again() -> None:
    simulation, (first, second) = simulated(PartialSpec(ahead=1), batches_of([4, 190], [6, 8]))
    assert (first.progress.batch.prompt_ids, learned(first)) == (("10", "11", "20", "21"), ["10", "20"])
    drawn = dict(zip(first.progress.batch.prompt_ids, first.progress.table.tokens.tolist(), strict=True))
    assert drawn["10"] == 4
    assert drawn["20"] == 6
    assert 6 <= drawn["11"] <= 8, "as far as the others, and no further than to the next heartbeat"
    assert second.progress.batch.prompt_ids == ("11", "21")
    assert learned(second) == ["11", "21"]
    assert second.computed_tokens == sum(5 + drawn[name] for name in ("11", "21") if drawn[name] < 8)
    records = simulation.ledger.steps
    assert [record.metrics["response_tokens"] for record in records] == [10.0, 198.0]
    assert [record.metrics["responses"] for record in records] == [2.0, 2.0]
    learns = called(simulation, Work.LEARN)
    assert [call.input_tokens for call in learns] == [10 + 10, 10 + 198]


def test_a_step_that_has_enough_does_not_wait_for_a_beat() -> None:
    """It goes on for a 32nd part of a heartbeat at most."""
    ends_s = []
    for links in (OFTEN, LINKS):
        given = batches_of([40, 190], [60, 80])
        simulation, _ = simulated(PartialSpec(ahead=1), given, setup_of(actor(0), links=links))
        ends_s.append(simulation.ledger.steps[0].metrics["generation_s"])
    assert 0 <= ends_s[1] - ends_s[0] <= LINKS.heartbeat_s / LOOKS + OFTEN.heartbeat_s


def test_a_prompt_of_the_next_epoch_whose_group_is_still_under_way_is_another_prompt() -> None:
    """Of two prompts, both are drawn in each step; the first step leaves the long one to the second."""
    batches = [dataclasses.replace(batch, prompt_ids=("a", "b")) for batch in batches_of([4, 190], [6, 8])]
    _, (first, second) = simulated(PartialSpec(ahead=1), batches)
    assert first.progress.batch.prompt_ids == ("a", "b", "a'", "b'")
    assert (learned(first), learned(second)) == (["a", "a'"], ["b", "b'"])


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([PartialSpec(ahead=0.5), PartialSpec(ahead=1, max_staleness=1)]),
    st.integers(1, 4).flatmap(
        lambda groups: st.lists(
            st.lists(st.lists(st.integers(1, 150), min_size=2, max_size=2), min_size=groups, max_size=groups),
            min_size=1,
            max_size=5,
        )
    ),
    st.integers(1, 2),
)
def test_every_group_is_learned_from_once_with_all_its_tokens(
    schedule: PartialSpec, lengths: list[list[list[int]]], actors: int
) -> None:
    given = [batch_of([(5, group) for group in step]) for step in lengths]
    given = [
        dataclasses.replace(batch, step=step, prompt_ids=tuple(f"{step}-{i}" for i in range(batch.groups)))
        for step, batch in enumerate(given, 1)
    ]
    simulation, steps = simulated(schedule, given, setup_of(*map(actor, range(actors))))
    names = Counter(name for batch in given for name in batch.prompt_ids)
    assert Counter(name for step in steps for name in learned(step)) == names
    assert {len(learned(step)) for step in steps} == {len(lengths[0])}
    total = sum(sum(group) for step in lengths for group in step)
    assert sum(record.metrics["response_tokens"] for record in simulation.ledger.steps) == total
    drawn = sum(call.output_tokens for call in called(simulation, Work.GENERATE))
    assert drawn >= total
    assert drawn <= total + len(steps), "a step that has nothing left to draw draws one token again"
    begun = begun_in(steps)
    for number, step in enumerate(steps, 1):
        assert all(number - begun[name] <= schedule.max_staleness for name in learned(step))
    check_served_again(schedule, given, steps)


def begun_in(steps: list[Generation]) -> dict[str, int]:
    begun: dict[str, int] = {}
    for number, step in enumerate(steps, 1):
        for name in step.progress.whole.prompt_ids:
            begun.setdefault(name, number)
    return begun


def check_served_again(schedule: PartialSpec, given: list[RolloutBatch], steps: list[Generation]) -> None:
    """From what each step learned from, as a trace has it, the steps are as many groups, begun when they were."""
    groups = {name: (batch, number) for batch in given for number, name in enumerate(batch.prompt_ids)}
    batches, begun = list[RolloutBatch](), begun_in(steps)
    for step, names in enumerate(map(learned, steps), 1):
        of = [groups[name] for name in names]
        lengths = [batch.response_tokens[batch.group == number].tolist() for batch, number in of]
        batch = dataclasses.replace(batch_of([(5, each) for each in lengths]), step=step, prompt_ids=tuple(names))
        batches.append(batch)
    known = {(step, name): begun[name] for step, each in enumerate(steps, 1) for name in learned(each)}
    again = as_begun(batches, known)
    assert [batch.groups for batch in again] == [batch.groups for batch in given]
    _, steps_again = simulated(schedule, again)
    assert begun_in(steps_again) == begun


def test_steps_that_wait_for_all_are_as_they_were() -> None:
    given = batches_of([4, 190], [6, 7])
    simulation, steps = simulated(SyncSpec(), given)
    assert [step.progress.batch for step in steps] == given
    assert [record.metrics["responses"] for record in simulation.ledger.steps] == [2.0, 2.0]


def test_weights_that_come_in_the_midst_of_a_draw_stop_it_for_the_load_and_the_kv_of_its_samples() -> None:
    """Two steps are drawn at once, as if they were one; the sample of the second stops at the first boundary after the
    first has been learned from."""
    learner = on(LEARNER, slot_setup(9, start_s=0.0, node=0))
    setup = setup_of(actor(0), learner=learner, links=OFTEN)
    simulation, (first, second) = simulated(AsyncSpec(max_staleness=1), batches_of([20], [200]), setup)
    simulation.close()
    _, (both,) = simulated(SyncSpec(), batches_of([20, 200]), setup_of(actor(0), learner=learner, links=OFTEN))
    boundary_s = decode_s(MODEL, 1, 205, 1)
    assert first.end_s == pytest.approx(both.progress.table.finish_s[0], abs=boundary_s)
    published_s = called(simulation, Work.PUBLISH)[0].end_s
    _, (step, start_s, end_s) = [
        (call.step, call.start_s, call.end_s) for call in called(simulation, Work.LOAD_WEIGHTS)
    ]
    assert step == 2
    assert 0 <= start_s - published_s <= boundary_s
    assert end_s - start_s == pytest.approx(0.3)
    tokens = (first.computed_tokens + second.computed_tokens - 10) - 5
    assert 0 < tokens < 200
    assert second.end_s - both.end_s == pytest.approx(0.3 + MODEL.prefill_s(5 + tokens), abs=2 * boundary_s)


def test_a_scenario_has_the_schedules_of_a_run() -> None:
    assert scenario(schedule={"type": "async", "max_staleness": 3}, policies=APART).steps_ahead == 3
    assert scenario(schedule="partial").steps_ahead == 0
    with pytest.raises(ValidationError, match="simulated without shared prefixes"):
        scenario(schedule="partial", prefixes={"levels": [{"tokens": 4}]})
    tree = PrefixTree.of_prompts([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)])
    shared = batch_of([(5, [3]), (5, [3])], prefixes=tree)
    with pytest.raises(ValueError, match="shared prefixes are not known"):
        simulated(PartialSpec(), [shared])


def test_the_runs_own_policies_draw_what_is_left() -> None:
    """In all policies of a scenario each response is learned from, and a co-located fleet may do it, too."""
    policies = [{"name": name} for name in ("static_colocated", "static_disaggregated", "cost_aware")]
    changes: dict[str, Any] = {"steps": 6, "seeds": 1, "policies": policies}
    found = compare(scenario(schedule="partial", **changes)).results
    for (result,) in found.values():
        total = sum(int(batch.response_tokens.sum()) for batch in batches(scenario(**changes), result.seed))
        assert sum(step.response_tokens for step in result.steps) == total
