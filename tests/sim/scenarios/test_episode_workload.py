"""Episodes of a scenario: public shapes of turns, limits, and the environment of the simulated fleet."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.repository import SCENARIOS
from fakes.tiny_scenario import batch_of
from rlhfless.records import FunctionName
from rlhfless.sim.scenarios import load_scenario
from rlhfless.sim.scenarios.build import ScenarioLayout, setup
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.workloads.episodes import EpisodeShape

AGENTS = SCENARIOS / "agents" / "agents-7b-h100.yaml"


def test_turns_have_the_published_quantiles() -> None:
    """Median 29, p90 56, p99 85, at least 5 and at most 99 (NeMo-RL #3663); a lognormal has a longer tail."""
    scenario = load_scenario(AGENTS)
    large = scenario.model_copy(
        update={
            "prompts_per_step": 512,
            "steps": 2,
            "workload": scenario.workload.model_copy(update={"prompts": 512}),
        }
    )
    turns = np.concatenate([batch.turns.count for batch in batches(large, 0) if batch.turns is not None])
    assert np.quantile(turns, [0.5, 0.9, 0.99]) == pytest.approx([29, 56, 85], rel=0.15)
    assert (turns.min(), turns.max()) == (5, 99)


def test_an_episode_ends_with_the_last_turn_that_fits() -> None:
    counted = batch_of([(7, [3, 40])])
    shape = EpisodeShape(turn_tokens=100, answer_tokens=20, wait_s=2.0)
    whole, cut = (shape.with_turns(counted, most, seed=0) for most in (100_000, 500))
    assert whole.turns is not None
    assert cut.turns is not None
    assert whole.turns.count.tolist() == [3, 40]
    assert not whole.truncated.any()
    assert cut.truncated.tolist() == (whole.response_tokens > 500).tolist() == [False, True]
    assert (cut.response_tokens <= 500).all()
    assert cut.turns.end[: cut.turns.count[0]].tolist() == whole.turns.end[:3].tolist()
    (tiny,) = (shape.with_turns(counted, 1, seed=0),)
    assert tiny.response_tokens.tolist() == [1, 1], "a first turn that does not fit is cut"


def test_waits_change_no_token() -> None:
    counted = batch_of([(7, [9] * 50)])
    short, long = (EpisodeShape(100, 20, wait_s).with_turns(counted, 10_000, seed=1) for wait_s in (1.0, 10.0))
    assert short.turns is not None
    assert long.turns is not None
    assert short.turns.end.tolist() == long.turns.end.tolist()
    assert (10 * short.turns.wait_s).tolist() == pytest.approx(long.turns.wait_s.tolist())
    assert short.turns.wait_s.mean() == pytest.approx(1.0, rel=0.1)


def test_the_fleet_has_an_environment_and_lets_episodes_wait_elsewhere() -> None:
    scenario = load_scenario(AGENTS)
    made = setup(scenario, ScenarioLayout(scenario, scenario.placement), seed=0)
    (environment,) = (each for each in made.services if each.function == FunctionName.ENVIRONMENT)
    assert len(environment.slot_setup.allocation.devices) == 64
    assert {actor.engine.park_s for actor in made.actors} == {5.0}
