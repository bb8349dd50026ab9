"""Steps whose prompts are computed apart, by hand: who computes what, when it is drawn from, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fakes.simple_policies import Evenly, Scripted
from fakes.small_fleet import LINKS, MODEL, SERVING_S, actor, called, one_step, setup_of
from rlhfless.records import FunctionName, FunctionRole, Work
from rlhfless.scaling.policy import Action, Beat, Event, Move, StepView
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import ActorShape, Setup
from rlhfless.sim.view import prefill_pool

ROOMY = EngineShape(max_sequences=64, kv_blocks=10_000, block_tokens=4, chunk_tokens=None)
PRICED = PricedModel(MODEL, ROOMY.max_sequences)
PROMPT = 400


def engine(number: int, **changes: object) -> ActorShape:
    return actor(number, engine=ROOMY, prices=PRICED, **changes)


def batch_of(groups: int, siblings: int, tokens: int = 20) -> RolloutBatch:
    return RolloutBatch(
        1,
        tuple(f"p{number}" for number in range(groups)),
        np.full(groups, PROMPT),
        np.repeat(np.arange(groups), siblings),
        np.full(groups * siblings, tokens),
    )


def setup(actors: int, prefills: int, **changes: object) -> Setup:
    """The last actors compute prompts; each has a node of its own."""
    engines = (engine(number, prefills=number >= actors) for number in range(actors + prefills))
    return setup_of(*engines, **changes)


def test_one_actor_computes_and_one_draws() -> None:
    """Eight prompts are eight pieces. The first is there after its prefill; then the actor reads the KV of 399 tokens
    that fill 99 blocks, computes the last 4 tokens, and draws."""
    changed = setup(1, 1)
    simulation, _ = one_step(changed, Evenly(), batch_of(8, 2))
    computed = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.PREFILL]
    read = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.GENERATION]
    each_s = MODEL.prefill_s(PROMPT - 1)
    assert [call.start_s for call in computed] == pytest.approx([SERVING_S + k * each_s for k in range(8)])
    assert read[0].start_s == pytest.approx(SERVING_S + each_s)
    assert read[0].end_s - read[0].start_s == pytest.approx(LINKS.move_s + 396 * LINKS.prefix_token_s)
    assert [call.cached_tokens for call in read] == [PROMPT - 1] * 8
    metrics = simulation.close().steps[0].metrics
    assert metrics["prompt_tokens_computed/generation"] == 8 * (PROMPT - 1) + 16 * 4


def test_two_share_the_pieces() -> None:
    simulation, _ = one_step(setup(1, 2), Evenly(), batch_of(8, 1))
    computed = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.PREFILL]
    assert sorted(call.replica.split("-life")[0] for call in computed) == ["prefill-1"] * 4 + ["prefill-2"] * 4


def test_policies_see_a_pool_and_no_slot() -> None:
    """The devices of prefill actors are paid for whatever a policy decides."""
    changed = setup(2, 1)
    assert changed.roles[:3] == (FunctionRole.SAMPLES, FunctionRole.SAMPLES, FunctionRole.PREFILLS)
    pool = prefill_pool(changed)
    assert pool is not None
    assert (pool.actors, pool.kv_token_s, pool.move_s) == (1, LINKS.prefix_token_s, LINKS.move_s)
    assert prefill_pool(setup(2, 0)) is None


def test_weights_in_flight_are_refused() -> None:
    with pytest.raises(ValueError, match="old weights"):
        setup(1, 1, in_flight=True)


@pytest.mark.parametrize(("prefills", "own"), [(1, True), (2, False)])
def test_a_lost_prefill_actor_loses_nothing(prefills: int, own: bool) -> None:
    """It computes the first piece for 170 s, and its spot machine is taken away. Another one computes what it has not,
    or the actor that draws."""
    taken = engine(1, prefills=True, slowdown=10_000.0, spot_mean_s=20.0)
    other = engine(2, prefills=True)
    simulation, generation = one_step(setup_of(engine(0), *(taken, other)[:prefills]), Evenly(), batch_of(8, 2))
    assert generation.unfinished == 0
    assert simulation.now_s < 170
    read = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.GENERATION]
    assert len(read) == (0 if own else 8)
    assert {call.replica for call in called(simulation, Work.PRECOMPUTE)} <= {"generation-0", "prefill-2"}


def test_a_moved_sample_gets_its_prompt_again() -> None:
    """Half a second into the step the second actor takes all samples of the first; the prefill actor has their prompts
    in its cache, and gives them once more."""
    changed = setup(2, 1)

    def move(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        mine = view.samples_at(0)
        return (Move(0, 1, mine),) if isinstance(event, Beat) and len(mine) and view.tokens[mine].any() else ()

    simulation, generation = one_step(changed, Scripted(move), batch_of(8, 2, tokens=150))
    assert generation.unfinished == 0
    read = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.GENERATION]
    assert sum(call.sequences for call in read) == 12
    computed = [call for call in called(simulation, Work.PRECOMPUTE) if call.function == FunctionName.PREFILL]
    assert sum(call.input_tokens - call.cached_tokens for call in computed) == 8 * (PROMPT - 1)
