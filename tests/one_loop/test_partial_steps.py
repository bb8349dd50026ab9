"""Steps that do not learn from all groups that they generate, by hand and as properties."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.tiny_scenario import PRICES, actor, batch_of, setup_of
from fakes.views import Evenly
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import Work
from rlhfless.records.traces import Trace
from rlhfless.sim.run import LearnedStep, simulate
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import Setup
from rlhfless.spec import PartialSpec


@dataclass(frozen=True)
class PartialStep:
    """A step, by names of prompts."""

    begun: tuple[str, ...]
    """Its groups, oldest first."""
    learned: tuple[str, ...]
    tokens: dict[str, list[int]]
    """The tokens of the samples that it had to generate, at its end."""


def batches_of(*lengths: list[int]) -> list[RolloutBatch]:
    """One batch a step, of groups of one response, each to a prompt of five tokens."""
    batches = [batch_of([(5, [length]) for length in each]) for each in lengths]
    return [
        replace(batch, step=step, prompt_ids=tuple(f"{step}{i}" for i in range(batch.groups)))
        for step, batch in enumerate(batches, 1)
    ]


def simulated(
    schedule: PartialSpec, batches: list[RolloutBatch], setup: Setup | None = None
) -> tuple[Trace, list[PartialStep]]:
    steps: list[PartialStep] = []

    def on_step(step: LearnedStep) -> None:
        generated, tokens = step.progress.batch, step.progress.table.tokens
        of = {name: tokens[generated.group == number].tolist() for number, name in enumerate(generated.prompt_ids)}
        names = step.batch.prompt_ids
        steps.append(PartialStep(names, tuple(sorted(names[number] for number in step.groups)), of))

    setup = replace(setup or setup_of(actor(0)), schedule=schedule)
    return simulate(setup, Evenly(), PRICES, batches, on_step=on_step), steps


def calls(trace: Trace, work: Work, step: int) -> int:
    return sum(call.work is work and call.step == step for call in trace.invocations)


def test_a_sample_that_is_left_goes_on_with_its_tokens() -> None:
    trace, (first, second) = simulated(PartialSpec(ahead=1), batches_of([4, 190], [6, 8]))
    assert (first.begun, first.learned) == (("10", "11", "20", "21"), ("10", "20"))
    assert first.tokens == {"10": [4], "11": [6], "20": [6], "21": [6]}, "the engine stops with the second group"
    assert second.begun == ("11", "21")
    assert second.learned == ("11", "21")
    assert second.tokens["11"] == [190]
    metrics = [step.metrics for step in trace.steps]
    assert [each["response_tokens"] for each in metrics] == [10.0, 198.0]
    assert [each["responses"] for each in metrics] == [2.0, 2.0]
    assert [each["deferred_groups"] for each in metrics] == [2.0, 0.0]
    assert (metrics[1]["resumed_samples"], metrics[1]["resumed_tokens"]) == (2.0, 12.0)
    learns = [call.input_tokens for call in trace.invocations if call.work is Work.LEARN]
    assert learns == [10 + 10, 10 + 198]


def test_a_step_whose_groups_are_all_complete_generates_nothing() -> None:
    """All four responses end at once. The first step learns from two, and the second from the others."""
    trace, (first, second) = simulated(PartialSpec(ahead=1), batches_of([4, 4], [4, 4]))
    assert (first.learned, second.learned) == (("10", "11"), ("20", "21"))
    assert second.tokens == {}
    assert (calls(trace, Work.GENERATE, 1), calls(trace, Work.GENERATE, 2)) == (1, 0)
    assert (calls(trace, Work.LEARN, 1), calls(trace, Work.LEARN, 2)) == (1, 1)


def test_a_prompt_of_the_next_epoch_whose_group_is_still_under_way_has_another_name() -> None:
    """Of two prompts, both are generated in each step; the first step leaves the long one to the second."""
    batches = [replace(batch, prompt_ids=("a", "b")) for batch in batches_of([4, 190], [6, 8])]
    _, (first, second) = simulated(PartialSpec(ahead=1), batches)
    assert first.begun == ("a", "b", "a'", "b'")
    assert (first.learned, second.learned) == (("a", "a'"), ("b", "b'"))


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
    batches = [
        replace(
            batch_of([(5, group) for group in groups]),
            step=step,
            prompt_ids=tuple(f"{step}-{i}" for i in range(len(groups))),
        )
        for step, groups in enumerate(lengths, 1)
    ]
    trace, steps = simulated(schedule, batches, setup_of(*map(actor, range(actors))))
    names = Counter(name for batch in batches for name in batch.prompt_ids)
    assert Counter(name for step in steps for name in step.learned) == names
    assert {len(step.learned) for step in steps} == {len(lengths[0])}
    assert sum(record.metrics["response_tokens"] for record in trace.steps) == np.sum(lengths)
    begun: dict[str, int] = {}
    for number, step in enumerate(steps, 1):
        for name in step.begun:
            begun.setdefault(name, number)
        assert all(number - begun[name] <= schedule.max_staleness for name in step.learned)


def test_a_lost_actor_loses_the_tokens_of_its_step_only() -> None:
    """In the second step, sample 21 has ended when the actor dies; sample 11 restarts from its tokens of the first."""
    setup = setup_of(actor(0, spot_mean_s=20.0), seed=3)
    trace, (first, second) = simulated(PartialSpec(ahead=1), batches_of([4, 190], [6, 8]), setup)
    generated = [call for call in trace.invocations if call.work is Work.GENERATE]
    assert [call.replica for call in generated] == ["simulated-generation-0", "simulated-generation-1"]
    kept = first.tokens["11"][0]
    assert 0 < kept < 190
    assert generated[1].output_tokens == 190 - kept
    assert generated[1].input_tokens == 5 + kept, "the KV of what is kept is computed again"
    assert second.tokens["11"] == [190]


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (batches_of([4, 8], [6]), "equal numbers of groups"),
        (
            [batch_of([(5, [3]), (5, [3])], prefixes=PrefixTree.of_prompts([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]))],
            "shared prefixes are not known",
        ),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused(batches: list[RolloutBatch], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        simulated(PartialSpec(), batches)
