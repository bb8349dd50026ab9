"""Two steps under way at once: the real loop, with stand-ins for the functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from fakes.fleet import FakePool, prompt, runner
from fakes.ledgers import ledger_in
from fakes.stage import until
from rlhfless.functions.base import Call
from rlhfless.loop.run import Run
from rlhfless.loop.step import rollout, train
from rlhfless.prepare.prompts import PromptOrder
from rlhfless.records import (
    FunctionName,
    Group,
    Invocation,
    Probe,
    PublishedWeights,
    Score,
    StepRecord,
    WeightVersion,
    Work,
)
from rlhfless.records.journal import Journal
from rlhfless.records.traces import read_trace
from rlhfless.scaling.function_kinds import declared
from rlhfless.scaling.policy import StepEnded
from rlhfless.spec import RunSpec
from rlhfless.tasks import gather_or_cancel
from rlhfless.telemetry.sinks import MetricSinks
from rlhfless.weights.monitor import RolloutMonitor


def weights_of(step: int) -> PublishedWeights:
    return PublishedWeights(WeightVersion("run", 1, step, f"d{step}"), "here", 10, 2, Probe((1, 2), (-1.0,)))


class Function:
    """A pool of one stand-in, which says what it did; with `gated` the learner learns when the test lets it."""

    def __init__(self, function: FunctionName, ledger: Any, gated: bool = False) -> None:
        self.function, self.kind, self.allocations = function, declared()[function], ()
        self.asked: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self._ledger = ledger
        if not gated:
            self.gate.set()

    def turn(self, call: Call) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def ready(self, call: Call) -> Function:
        return self

    def replicas(self) -> tuple[Any, ...]:
        return (self,)

    open_device_s: ClassVar[dict[str, float]] = {}

    def cut(self) -> None: ...

    async def call(self, method: str, call: Call, *arguments: Any, sent: Any = None, work: Work, **_: Any) -> Any:
        if sent is not None:
            sent.set()
        await self.gate.wait()
        self.asked.append((method, call.step))
        self._ledger.add_invocation(Invocation(self.function, "r", "i", work, call.step, 1.0, 2.0))
        match method:
            case "score":
                return scored(arguments[0])
            case "learn":
                return {"loss": 0.5}
            case "publish":
                return weights_of(call.step)
        raise AssertionError(method)


def scored(groups: Sequence[Group]) -> list[list[Score]]:
    return [[Score(float(index), {"r": float(index)}) for index in range(len(group.samples))] for group in groups]


class Weights:
    """Says which weights the actors were brought to."""

    def __init__(self) -> None:
        self.synced: list[tuple[int, int]] = []

    async def sync(self, published: PublishedWeights, call: Call) -> None:
        self.synced.append((call.step, published.version.step))


class Scene:
    """A run of one prompt a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger, self.weights, self.actors = ledger_in(folder / "trace"), Weights(), FakePool("a")
        self.journal = Journal(folder / "journal.sqlite")
        self.journal.begin_attempt()
        self.learner = Function(FunctionName.LEARNER, self.ledger, gated=True)
        self.policy = runner(self.actors)
        values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
        spec = RunSpec.model_validate(values | {"prompts_per_step": 1, "samples_per_prompt": 2})
        self.run = Run(
            run_id="run",
            attempt=1,
            spec=spec,
            order=PromptOrder([prompt("p"), prompt("q"), prompt("r")], 0, shuffle=False),
            held_out=(),
            pools={  # type: ignore[dict-item]
                pool.kind.name: pool
                for pool in (self.actors, Function(FunctionName.SCORING, self.ledger), self.learner)
            },
            weights=self.weights,  # type: ignore[arg-type]
            scaler=self.scaler(),
            ledger=self.ledger,
            sinks=MetricSinks([]),
            journal=self.journal,
            checkpoints=None,  # type: ignore[arg-type]
            monitor=RolloutMonitor("float32"),
        )
        self.run.published = weights_of(0)

    def scaler(self) -> Any:
        def end_step(record: StepRecord) -> None:
            self.policy.end(StepEnded(record.start_s, record.end_s), record.step)

        return SimpleNamespace(
            moves=None,
            runner_of=lambda step, work: self.policy,
            runner=self.policy,
            idle=lambda function, step: None,
            learn_speeds=lambda step: None,
            end_step=end_step,
        )

    async def rolled_out(self, step: int) -> Any:
        """(context, experience) of a step whose samples end at once."""
        context = self.run.begin(step)
        drawing = asyncio.create_task(rollout(self.run, context))
        await until(lambda: bool(self.actors["a"].running))
        self.actors["a"].finish(tokens=3 + step)
        return context, await drawing


async def test_a_step_is_drawn_while_the_learner_is_at_work_on_the_step_before_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first, learned_from = await scene.rolled_out(1)
    training = asyncio.create_task(train(scene.run, first, learned_from))
    second, drawn_meanwhile = await scene.rolled_out(2)
    assert sorted(scene.run.under_way) == [1, 2]
    assert scene.learner.asked == []
    scene.learner.gate.set()
    one = await training
    assert sorted(scene.run.under_way) == [2]
    two = await train(scene.run, second, drawn_meanwhile)
    assert scene.weights.synced == [(1, 0), (2, 0)]  # the second was drawn with weights one step older
    assert scene.learner.asked == [("learn", 1), ("publish", 1), ("learn", 2), ("publish", 2)]
    assert scene.run.published == weights_of(2)
    for record, tokens in ((one, 4.0), (two, 5.0)):  # each has the figures of its own samples
        assert record.metrics["response_tokens_mean"] == tokens
        assert record.metrics["actors_wanted"] == 1.0
        assert record.metrics["policy_faults"] == 0.0
    assert two.start_s < one.end_s < two.end_s
    scene.ledger.write([])
    trace = read_trace(tmp_path / "trace")
    assert [(row.step, row.prompt_id, row.response_tokens) for row in trace.rollouts] == [
        (1, "p", 4),
        (1, "p", 4),
        (2, "q", 5),
        (2, "q", 5),
    ]
    assert [step.step for step in trace.steps] == [1, 2]
    assert [rollout.prompt_id for rollout in scene.journal.rollouts(2)] == ["q", "q"]


async def test_two_steps_can_be_drawn_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    contexts = [scene.run.begin(step) for step in (1, 2)]
    drawing = asyncio.create_task(gather_or_cancel(*(rollout(scene.run, context) for context in contexts)))
    actor = scene.actors["a"]
    await until(lambda: {key[0] for key in actor.running} == {"p", "q"})
    actor.finish("q", tokens=7)
    actor.finish("p", tokens=4)
    experiences = await drawing
    drawn = [[(sample.key[0], sample.model_tokens) for sample in experience.samples] for experience in experiences]
    assert drawn == [[("p", 4), ("p", 4)], [("q", 7), ("q", 7)]]
