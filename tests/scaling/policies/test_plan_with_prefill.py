"""The plan of a step whose prompts are computed apart: the break-even's own figures, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.planning.prefill_break_even import AlikeEngines, StepShape, apart_s
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policies.contract import CheapestUnderDeadline
from rlhfless.scaling.policies.cost_aware.group_times import ActorType, Responses, responses
from rlhfless.scaling.policies.cost_aware.plan import FleetOptions, GenerationPlan, Standby, plan
from rlhfless.scaling.prefill_pool import PIECES, PrefillPool

ENGINE = LinearEngine(1.0, 0.0, 0.0, 0.01, 0.0)
"""An iteration takes 1 s whatever is in it, and a prompt token 0.01 s."""


def step_of(
    prompt_tokens: int, lengths: tuple[int, ...], prompts: int = 16, samples: int = 4
) -> tuple[StepShape, Responses]:
    """The same step for the break-even and for a plan: as many prompts of each length, the longest first."""
    each = np.repeat(lengths[::-1], prompts * samples // PIECES)
    step = responses(each, np.repeat(np.arange(prompts), samples), np.full(prompts, prompt_tokens))
    return StepShape(prompts, samples, prompt_tokens, lengths), step


def planned(
    step: Responses, pool: PrefillPool | None, actors: int = 1, engine: LinearEngine = ENGINE
) -> GenerationPlan:
    actor = ActorType("h100", engine, 10**9, 1000, 1.0)
    options = FleetOptions(actor, (Standby("warm", actors, 0.0),), actors, prefill=pool)
    return plan(step, options, CheapestUnderDeadline(1e9))


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [((100,) * 8, 228), ((200, *[50] * 7), 216), ((60, *[50] * 7), 178), ((130, *[50] * 7), 178)],
)
def test_the_break_evens_figures(lengths: tuple[int, ...], seconds: float) -> None:
    """16 prompts of 800 tokens come in pieces of 16 s: the end is that of the longest responses, which come first, or
    of the last piece, which comes after 128 s."""
    shape, step = step_of(800, lengths)
    alike = AlikeEngines(ENGINE, 2, 1000, kv_token_s=0.0, move_s=0.0)
    assert apart_s(shape, alike, 1) == pytest.approx(seconds)
    assert planned(step, alike.pool(1)).step_s == pytest.approx(seconds)


def test_the_actor_that_draws_reads_kv_and_computes_nothing() -> None:
    """16 prompts of 100 tokens: 2 s of the first piece by one actor, 0.5 s of a call, and 0.002 s for each of 1,600
    tokens; by the actor itself 16 s."""
    _, step = step_of(100, (50,) * 8)
    pool = PrefillPool(1, ENGINE, 0.002, 0.5)
    assert planned(step, None).step_s == pytest.approx(16 + 50)
    assert planned(step, replace(pool, actors=100)).step_s == pytest.approx(0.02 + 0.5 + 3.2 + 50, abs=0.2)
    last_s = planned(step, pool).step_s
    assert last_s == pytest.approx(16 + 0.5 + 0.4 + 50), "the last piece waits for all prompts"


def test_more_actors_do_not_help_where_prompts_come_too_late() -> None:
    """16 prompts of 800 tokens take one prefill actor 128 s; by themselves, four actors would take 32 s."""
    _, step = step_of(800, (10,) * 8)
    actor, warm = ActorType("h100", ENGINE, 10**9, 1000, 1.0), (Standby("warm", 4, 0.0),)
    pool = PrefillPool(1, ENGINE, 0.0, 0.0)
    chosen = plan(step, FleetOptions(actor, warm, 4, prefill=pool), CheapestUnderDeadline(60.0))
    assert not chosen.feasible
    assert chosen.step_s == pytest.approx(138, rel=0.01)
    assert plan(step, FleetOptions(actor, warm, 4), CheapestUnderDeadline(60.0)).feasible


@given(
    st.lists(st.integers(10, 300), min_size=8, max_size=8),
    st.integers(1, 1000),
    st.integers(1, 4),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.01),
)
def test_near_the_break_even(
    lengths: list[int], prompt_tokens: int, actors: int, slope_s: float, kv_token_s: float
) -> None:
    """Of one actor that draws: never above the walk over arrivals and ends, and at most some percent below it."""
    shape, step = step_of(prompt_tokens, tuple(sorted(lengths, reverse=True)))
    engine = LinearEngine(1.0, slope_s, 0.0, 0.01, 0.0)
    alike = AlikeEngines(engine, actors + 1, 1000, kv_token_s, 0.05)
    exact_s = apart_s(shape, alike, actors)
    assert 0.85 * exact_s < planned(step, alike.pool(actors), engine=engine).step_s < (1 + 1e-6) * exact_s
