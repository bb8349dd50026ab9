"""The schedules of a run in simulations and replays: `partial`, and weights that are loaded during generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.tiny_scenario import (
    LEARNER,
    MODEL,
    PlayedStep,
    actor,
    batch_of,
    called,
    on,
    play,
    scenario,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly
from rlhfless.records import Work
from rlhfless.scaling.engine_model import decode_s
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.replay.recorded import as_begun
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.draw import batches
from rlhfless.spec import AsyncSpec, PartialSpec

APART = [{"name": "static_disaggregated"}]

OFTEN_S = 0.001


def batches_of(*lengths: list[list[int]]) -> list[RolloutBatch]:
    """One batch a step, from the lengths of each group, each to a prompt of five tokens."""
    return [
        dataclasses.replace(
            batch_of([(5, group) for group in groups]),
            step=step,
            prompt_ids=tuple(f"{step}-{i}" for i in range(len(groups))),
        )
        for step, groups in enumerate(lengths, 1)
    ]


def learned(step: PlayedStep) -> list[str]:
    return [step.whole.prompt_ids[group] for group in sorted(step.learned)]


def begun_in(steps: list[PlayedStep]) -> dict[str, int]:
    begun: dict[str, int] = {}
    for number, step in enumerate(steps, 1):
        for name in step.whole.prompt_ids:
            begun.setdefault(name, number)
    return begun


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
def test_a_trace_tells_when_each_group_was_begun(
    schedule: PartialSpec, lengths: list[list[list[int]]], actors: int
) -> None:
    """From what each step learned from, as a trace has it, the steps have as many groups, begun when they were."""
    setup, given_batches = setup_of(*map(actor, range(actors)), schedule=schedule), batches_of(*lengths)
    _, steps = play(setup, given_batches, Evenly())
    groups = {name: (batch, number) for batch in given_batches for number, name in enumerate(batch.prompt_ids)}
    batches, begun = list[RolloutBatch](), begun_in(steps)
    for step, names in enumerate(map(learned, steps), 1):
        of = [groups[name] for name in names]
        each = [batch.response_tokens[batch.group == number].tolist() for batch, number in of]
        batch = dataclasses.replace(batch_of([(5, tokens) for tokens in each]), step=step, prompt_ids=tuple(names))
        batches.append(batch)
    known = {(step, name): begun[name] for step, each in enumerate(steps, 1) for name in learned(each)}
    again = as_begun(batches, known)
    assert [batch.groups for batch in again] == [batch.groups for batch in given_batches]
    assert begun_in(play(setup, again, Evenly())[1]) == begun


def test_weights_that_come_during_generation_stop_it_for_the_load_and_the_kv_of_its_samples() -> None:
    """Two steps are generated at once, as if they were one; the sample of the second stops at the first boundary after
    the first has been learned from."""
    learner = on(LEARNER, slot_setup(9, start_s=0.0, node=0))
    setup = setup_of(actor(0), learner=learner, heartbeat_s=OFTEN_S)
    both = dataclasses.replace(setup, schedule=AsyncSpec(max_staleness=1))
    trace, (first, second) = play(both, batches_of([[20]], [[200]]), Evenly())
    _, (alone,) = play(setup, batches_of([[20], [200]]), Evenly())
    boundary_s = decode_s(MODEL, 1, 205, 1)
    assert first.end_s == pytest.approx(alone.finish_s[0], abs=boundary_s)
    published_s = called(trace, Work.PUBLISH)[0].end_s
    load = called(trace, Work.LOAD_WEIGHTS)[-1]
    assert load.start_s == pytest.approx(published_s)
    # The load begins at the next boundary, and takes 0.3 s.
    assert 0 <= load.duration_s - 0.3 <= boundary_s
    tokens = round((published_s - second.start_s[0]) / decode_s(MODEL, 1, 105, 1))
    assert 0 < tokens < 200
    assert second.end_s - alone.end_s == pytest.approx(0.3 + MODEL.prefill_s(5 + tokens), abs=2 * boundary_s)


def test_a_scenario_has_the_schedules_of_a_run() -> None:
    assert scenario(schedule={"type": "async", "max_staleness": 3}, policies=APART).steps_ahead == 3
    assert scenario(schedule="partial").steps_ahead == 0
    with pytest.raises(ValidationError, match="simulated without shared prefixes"):
        scenario(schedule="partial", prefixes={"levels": [{"tokens": 4}]})


def test_each_policy_learns_from_every_response_under_partial() -> None:
    """A co-located fleet may do it, too."""
    policies = [{"name": name} for name in ("static_colocated", "static_disaggregated", "cost_aware", "clairvoyant")]
    changes: dict[str, Any] = {"steps": 6, "seeds": 1, "policies": policies}
    found = compare(scenario(schedule="partial", **changes)).results
    for (result,) in found.values():
        total = sum(int(batch.response_tokens.sum()) for batch in batches(scenario(**changes), result.seed))
        assert sum(step.response_tokens for step in result.steps) == total
