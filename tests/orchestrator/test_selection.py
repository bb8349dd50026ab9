"""Group selection: each started group is learned from once, whatever its length, and none late."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes.fake_cluster import prompt
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.prompt_selection import PromptHistory, select
from rlhfless.orchestrator.rollout_request import RolloutRequest, sampling_of
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Work
from rlhfless.records.journal import Journal
from rlhfless.scaling.selection import GroupGate
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import InputError

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


def spec_of(schedule: Mapping[str, Any], prompts_per_step: int = 4, steps: int = 6) -> RunSpec:
    return RunSpec.model_validate(
        MINIMAL | {"schedule": schedule, "prompts_per_step": prompts_per_step, "steps": steps, "seed": 3}
    )


def order_of(prompts: int, *, shuffle: bool = True) -> PromptOrder:
    return PromptOrder([prompt(f"p{number:03}") for number in range(prompts)], 3, shuffle)


@dataclass
class Draws:
    """The generation of a run, on an engine that generates a token of every sample in each iteration."""

    spec: RunSpec
    order: PromptOrder
    journal: Journal
    lengths: random.Random
    length_of: dict[tuple[int, str], int] = field(default_factory=dict)
    """Tokens of a group's longest sample, by (starting step, prompt id)."""
    tokens: dict[tuple[int, str], int] = field(default_factory=dict)
    """Tokens kept of the unfinished groups."""
    taken: list[list[tuple[int, str]]] = field(default_factory=list)
    seconds: list[int] = field(default_factory=list)
    """Iterations of each step."""

    def request(self, step: int) -> RolloutRequest:
        prompts, selection = select(self.spec, step, self.order, PromptHistory(self.spec), self.journal)
        call = Call("run", 1, step)
        given = (tuple(prompts), 1, sampling_of(self.spec), Work.GENERATE, 3, step)
        return RolloutRequest(call, *given, selection=selection)

    def step(self, step: int) -> None:
        request = self.request(step)
        assert request.selection is not None
        keys = [(request.selection.begun[prompt.prompt_id], prompt.prompt_id) for prompt in request.prompts]
        assert len({prompt_id for _, prompt_id in keys}) == len(keys), "no prompt is drawn twice at once"
        for key in keys:
            self.length_of.setdefault(key, min(int(self.lengths.paretovariate(1.2) * 10), 1000))
        gate, iteration, complete = GroupGate(request.groups, request.selection.must_include), 0, set[tuple[int, str]]()
        done = {key: self.length_of[key] - self.tokens.get(key, 0) for key in keys}
        while gate.left:
            for key in keys:
                if done[key] <= iteration and key not in complete and gate.left:
                    complete.add(key)
                    gate.admits(key[1])
            iteration += 1
        took = [key for key in keys if key[1] in gate.admitted]
        self.journal.take_groups(step, took)
        self.taken.append(took)
        self.seconds.append(iteration)
        self.tokens |= {key: min(self.tokens.get(key, 0) + iteration, self.length_of[key]) for key in keys}


def run_all(spec: RunSpec, order: PromptOrder, seed: int) -> Draws:
    journal = Journal(Path(":memory:"))
    journal.begin_attempt()
    draws = Draws(spec, order, journal, random.Random(seed))
    for step in range(1, spec.steps + 1):
        draws.step(step)
    return draws


SCHEDULES = st.builds(
    lambda ahead, bound: {"type": "partial", "ahead": ahead, "max_staleness": bound},
    st.floats(0.01, 1),
    st.integers(1, 4),
)


@settings(deadline=None)
@given(SCHEDULES, st.integers(1, 7), st.integers(1, 12), st.integers(0, 30), st.booleans(), st.integers(0, 9))
def test_all_groups_that_are_begun_are_learned_from_once_and_in_time(
    schedule: dict[str, Any], prompts_per_step: int, steps: int, further: int, shuffle: bool, seed: int
) -> None:
    spec = spec_of(schedule, prompts_per_step, steps)
    draws = run_all(spec, order_of(prompts_per_step + further, shuffle=shuffle), seed)
    assert [len(took) for took in draws.taken] == [prompts_per_step] * steps
    assert all(len({prompt_id for _, prompt_id in took}) == len(took) for took in draws.taken)
    assert Counter(key for took in draws.taken for key in took) == Counter([*draws.length_of])
    for step, took in enumerate(draws.taken, 1):
        assert max(step - begun for begun, _ in took) <= schedule["max_staleness"]


def test_the_lengths_trained_on_are_those_sampled_and_the_tails_are_shorter() -> None:
    """Over the whole run the lengths are identical, one for one, while a step waits for fewer of the long ones."""
    spec = spec_of({"type": "partial"}, prompts_per_step=16, steps=40)
    draws = run_all(spec, order_of(800), seed=1)
    trained = sorted(draws.length_of[key] for took in draws.taken for key in took)
    assert trained == sorted(draws.length_of.values())
    assert len(trained) == 16 * 40
    waited_for_all = sum(
        max(list(draws.length_of.values())[first : first + 16]) for first in range(0, len(draws.length_of), 16)
    )
    assert sum(draws.seconds) < 0.8 * waited_for_all
    assert {prompt_id for _, prompt_id in draws.length_of} == {
        each.prompt_id for step in range(40) for each in order_of(800).batch(step, 16)
    }, "the prompts are those that steps in the order of the data have"


def test_a_step_that_is_begun_again_has_the_same_groups_and_one_that_has_taken_its_groups_only_these() -> None:
    journal = Journal(Path(":memory:"))
    journal.begin_attempt()
    draws = Draws(spec_of({"type": "partial"}), order_of(40), journal, random.Random(0))
    draws.step(1)
    again, second = draws.request(1), draws.request(2)
    assert [each.prompt_id for each in again.prompts] == [prompt_id for _, prompt_id in draws.taken[0]]
    assert len(second.prompts) == 6, "4 and the half of it ahead"
    assert draws.request(2) == second
    left = {prompt_id for begun, prompt_id in draws.length_of if (begun, prompt_id) not in draws.taken[0]}
    assert {each.prompt_id for each in second.prompts[:2]} == left, "the oldest come first"
    draws.step(2)
    draws.step(3)
    journal.forget(1)
    assert [each.prompt_id for each in draws.request(2).prompts] == [prompt_id for _, prompt_id in draws.taken[1]]
    assert [each.prompt_id for each in draws.request(3).prompts] == [prompt_id for _, prompt_id in draws.taken[2]]


def test_a_prompt_of_the_journal_that_is_gone_from_the_data_is_named() -> None:
    journal = Journal(Path(":memory:"))
    journal.begin_attempt()
    journal.begin_groups(1, ["gone"])
    with pytest.raises(InputError, match=r"(?s)started to generate responses to prompt 'gone'.*put it back"):
        Draws(spec_of({"type": "partial"}), order_of(9), journal, random.Random(0)).request(2)


def test_what_draws_beside_the_groups_of_a_step_is_refused() -> None:
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(MINIMAL | {"schedule": "partial", "algorithm": {"type": "dapo"}})
    for part in (
        "schedule.type is partial, which leaves groups to later steps",
        "replaces prompts without signal",
        "max_redraws to 0",
    ):
        assert part in str(refused.value)


def test_partial_needs_a_correction_and_no_devices_of_its_own() -> None:
    values = MINIMAL | {"schedule": "partial", "placement": {"turns": True}, "weights": {"transport": "cuda_ipc"}}
    assert RunSpec.model_validate(values).schedule.max_staleness == 2
    with pytest.raises(ValidationError, match=r"(?s)up to 2 versions old.*nothing corrects"):
        RunSpec.model_validate(values | {"algorithm": {"importance": None}})
