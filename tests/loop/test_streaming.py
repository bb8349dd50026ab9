"""Learning begins while a step is drawn: what goes to the learner when, and what is done again."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fleet import group
from fakes.scene import Scene
from fakes.stage import until
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.passes import LastParts, Part
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.loop.step import rollout, train
from rlhfless.loop.streaming import Streaming
from rlhfless.records import Experience, Group, Score
from rlhfless.spec import RunSpec
from rlhfless.spec.streaming import PARTS, waits_for

STREAMED: dict[str, Any] = {
    "prompts_per_step": 3,
    "schedule": {"type": "sync", "streaming": True},
    "placement": {"mode": "disaggregated"},
}


async def drawn_in(scene: Scene, order: str) -> tuple[Any, Experience]:
    """A step whose groups end in this order, each once the learner has had time for the one before."""
    context = scene.run.begin(1)
    drawing = asyncio.create_task(rollout(scene.run, context))
    actor = scene.actors["a"]
    await until(lambda: len(actor.running) == 6)
    for number, name in enumerate(order):
        actor.finish(name, tokens=3 + number)
        if scene.learner.dies is None and number < len(order) - 1:
            await until(lambda expected=number + 1: len(scene.learner.parts) == expected)
    return context, await drawing


def lengths(batch: PackedBatch) -> list[int]:
    """Drawn tokens of its samples, which tell the groups of `drawn_in` apart."""
    return batch.response_lengths.tolist()


async def test_groups_are_learned_from_while_others_are_drawn(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **STREAMED)
    scene.learner.gate.set()
    context, experience = await drawn_in(scene, "qrp")
    assert [lengths(part.batch) for part in scene.learner.parts] == [[3, 3], [4, 4]]
    first = scene.learner.parts[0].batch
    assert first.advantages is not None
    assert first.advantages[first.response_mask].tolist() == pytest.approx(
        [-math.sqrt(0.5)] * 3 + [math.sqrt(0.5)] * 3, rel=1e-5
    )
    record = await train(scene.run, context, experience)
    (last,) = scene.learner.learned
    assert isinstance(last, LastParts)
    assert (last.sent, [lengths(batch) for batch in last.batches]) == (2, [[5, 5]])
    assert (last.whole.tokens, last.whole.sequences, last.whole.groups) == (24, 6, 3)
    assert {part.tried for part in scene.learner.parts} == {last.tried}
    assert [name for name, _ in scene.learner.asked] == ["accumulate", "accumulate", "finish", "publish"]
    assert record.metrics["loss"] == 0.5


async def test_a_learner_that_is_lost_takes_the_same_parts_again_from_the_journal(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **STREAMED)
    scene.learner.gate.set()
    scene.learner.dies = ReplicaLost("the learner was lost")
    context, experience = await drawn_in(scene, "rqp")
    assert len(experience.groups) == 3, "the step is drawn to its end"
    with pytest.raises(ReplicaLost, match="the learner was lost"):
        await train(scene.run, context, experience)
    scene.learner.dies = None
    context = scene.run.begin(1)
    again = await rollout(scene.run, context)
    assert len(scene.actors["a"].requests) == 1, "nothing was drawn twice"
    await train(scene.run, context, again)
    (last,) = scene.learner.learned
    batches = [*(part.batch for part in scene.learner.parts), *last.batches]
    assert [lengths(batch) for batch in batches] == [[3, 3], [4, 4], [5, 5]], "in the order in which they ended"


def streaming_of(prompts: int, **changes: Any) -> tuple[Streaming, list[Part], list[LastParts]]:
    """Parts that go to a learner which takes them at once."""
    values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    parts: list[Part] = []
    lasts: list[LastParts] = []

    async def accumulate(_: Call, part: Part) -> None:
        parts.append(part)

    async def finish(_: Call, last: LastParts, sent: asyncio.Event) -> dict[str, float]:
        lasts.append(last)
        return {}

    spec = RunSpec.model_validate(values | {"prompts_per_step": prompts} | changes)
    request: Any = SimpleNamespace(call=Call("run", 1, 1), groups=prompts)
    streaming = Streaming(spec, request, lambda groups: pack(groups.groups), accumulate, finish)
    return streaming, parts, lasts


def scored_group(name: str, *scores: Score) -> Group:
    return group(name, len(scores)).adding(score=list(scores))


@given(prompts=st.integers(1, 40), data=st.data())
def test_parts_follow_from_the_order_alone(prompts: int, data: Any) -> None:
    order = data.draw(st.permutations([f"{number:02}" for number in range(prompts)]))
    pauses = data.draw(st.lists(st.booleans(), min_size=prompts, max_size=prompts))
    streaming, parts, lasts = streaming_of(prompts)

    async def drawing() -> Experience:
        groups = []
        for name, pause in zip(order, pauses, strict=True):
            groups.append(scored_group(name, Score(0.0, {}), Score(1.0, {})))
            streaming.add(groups[-1])
            for _ in range(3 * pause):
                await asyncio.sleep(0)
        return Experience(tuple(groups))

    async def step() -> None:
        await streaming.finish(await streaming.beside(drawing()), asyncio.Event())

    asyncio.run(step())
    (last,) = lasts
    assert [part.number for part in parts] == list(range(last.sent))
    sizes = [part.batch.groups for part in parts] + [batch.groups for batch in last.batches]
    size = math.ceil(prompts / PARTS)
    assert sizes == [size] * (prompts // size) + [prompts % size] * (prompts % size > 0)
    assert len(sizes) <= PARTS
    assert last.whole.groups == prompts
    assert last.whole.tokens == sum(batch.denominators.tokens for batch in [p.batch for p in parts] + [*last.batches])


FAILED = Score(0.0, {}, {"exact_match": "no answer"})


async def test_only_what_is_learned_from_is_in_a_part() -> None:
    drawn = {
        "a": scored_group("a", Score(1.0, {}), Score(1.0, {})),
        "b": scored_group("b", Score(0.0, {}), Score(1.0, {}), FAILED),
        "c": scored_group("c", FAILED, FAILED),
        "d": scored_group("d", Score(0.0, {}), Score(1.0, {})),
    }
    streaming, _, lasts = streaming_of(4, algorithm={"type": "grpo", "leave_out_without_signal": True})
    for each in drawn.values():
        streaming.add(each)
    await streaming.finish(Experience((drawn["b"], drawn["d"])), asyncio.Event())
    assert [batch.sequences for batch in lasts[0].batches] == [2, 2], "b without its failed sample, and d"


async def test_where_no_group_has_a_signal_all_are_learned_from() -> None:
    drawn = [scored_group(name, Score(1.0, {}), Score(1.0, {})) for name in "ab"]
    streaming, parts, lasts = streaming_of(2, algorithm={"type": "grpo", "leave_out_without_signal": True})
    for each in drawn:
        streaming.add(each)
    await streaming.finish(Experience(tuple(drawn)), asyncio.Event())
    assert not parts
    assert [batch.sequences for batch in lasts[0].batches] == [2, 2]
    assert np.isfinite(lasts[0].batches[0].rollout_logprobs).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"algorithm": {"type": "dapo"}}, ""),
        ({"placement": {"mode": "disaggregated", "turns": True}}, "take turns"),
        ({"placement": {"mode": "colocated"}}, "share the devices"),
        ({"mini_batches": 2}, "a step has 2 updates"),
        ({"epochs": 3}, "a step has 3 updates"),
        ({"algorithm": "reinforce_plus_plus"}, "from the whole batch"),
        ({"algorithm": "ppo", "critic": {}}, "from the whole batch"),
    ],
)
async def test_what_needs_the_whole_batch_waits_for_it_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    with caplog.at_level("INFO", logger="rlhfless.loop.run"):
        scene = Scene(tmp_path, **STREAMED | changes)
    found = waits_for(scene.run.spec)
    assert (why in found) if why else not found
    assert scene.run.streams is not bool(why)
    assert ("the learner waits for all samples of a step" in caplog.text) is bool(why)
    assert not Scene(tmp_path / "off", **STREAMED | changes | {"schedule": "sync"}).run.streams
