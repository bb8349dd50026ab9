"""The real step loop with fake functions, a generation stage over the fake pool, and a live fleet without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from fakes.fake_cluster import FakeCluster, FakePool, pool_of, prompt, runner
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.calls import Call, ReplicaInfo
from rlhfless.functions.kinds import teacher_kinds
from rlhfless.orchestrator.engine_starts import EngineStarts
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.orchestrator.rollout_request import RolloutRequest, sampling_of
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.orchestrator.step import rollout
from rlhfless.orchestrator.token_batches import TokenBatches
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import (
    Decision,
    FunctionName,
    Group,
    Invocation,
    Probe,
    Prompt,
    PublishedWeights,
    ReplicaState,
    Score,
    StepRecord,
    WeightVersion,
    Work,
)
from rlhfless.records.journal import Journal
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, declared
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.scaling.policy import StepEnded
from rlhfless.scaling.prices import PriceBook, load_price_book
from rlhfless.spec import RunSpec
from rlhfless.telemetry.sinks import MetricSinks

OLD_LOGPROB = -1.5
"""The old logprob that the learner evaluates for each token."""


def weights_of(step: int) -> PublishedWeights:
    return PublishedWeights(WeightVersion("run", 1, step, f"d{step}"), "here", 10, 2, Probe((1, 2), (-1.0,)))


class Function:
    """A pool of one fake replica that records its calls. With `gated`, the learner's calls wait for the test."""

    def __init__(
        self,
        function: str,
        ledger: Any,
        calls: list[tuple[str, str, int]],
        gated: bool = False,
        kind: FunctionSpec | None = None,
    ) -> None:
        self.function, self.kind, self.allocations = function, kind or declared()[function], ()
        self.computed_on: list[PackedBatch] = []
        self.asked: list[tuple[str, int]] = []
        self.learned: list[PackedBatch] = []
        self.computed = 0
        """Number of compute calls so far; each returns another value."""
        self.gate = asyncio.Event()
        self.dies: Exception | None = None
        """Raised by all calls."""
        self._ledger = ledger
        self.calls = calls
        if not gated:
            self.gate.set()

    def turn(self, call: Call) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def ready(self, call: Call) -> Function:
        return self

    def replicas(self) -> tuple[Any, ...]:
        return (self,)

    state: ClassVar[ReplicaState] = ReplicaState.SERVING
    must_move: ClassVar[bool] = False
    open_device_s: ClassVar[dict[str, float]] = {}

    def cut(self) -> None: ...

    async def call(self, method: str, call: Call, *arguments: Any, sent: Any = None, work: Work, **_: Any) -> Any:
        if sent is not None:
            sent.set()
        await self.gate.wait()
        if self.dies is not None:
            raise self.dies
        self.asked.append((method, call.step))
        self.calls.append((self.function, method, call.step))
        self._ledger.add_invocation(Invocation(self.function, "r", "i", work, call.step, 1.0, 2.0))
        match method:
            case "score":
                return scored(arguments[0])
            case "evaluate":
                return np.where(arguments[0].response_mask, OLD_LOGPROB, 0).astype(np.float32)
            case "learn":
                self.learned.append(arguments[0])
                return {"loss": 0.5} if self.kind.publishes else {"value_loss": 0.25}
            case "compute":
                self.computed += 1
                self.computed_on.append(arguments[0])
                return np.full(len(arguments[0].tokens), self.computed, np.float32)
            case "publish":
                return weights_of(call.step)
        raise AssertionError(method)


def scored(groups: Sequence[Group]) -> list[list[Score]]:
    return [[Score(float(index), {"r": float(index)}) for index in range(len(group.samples))] for group in groups]


class Weights:
    """Records the weights that the actors were synced to."""

    def __init__(self) -> None:
        self.synced: list[tuple[int, int]] = []

    async def sync(self, published: PublishedWeights, call: Call, asked: asyncio.Event | None = None) -> None:
        self.synced.append((call.step, published.version.step))
        if asked is not None:
            asked.set()


class Scene:
    """A run with one prompt per step."""

    def __init__(self, folder: Path, rows: Sequence[Prompt] = (), **changes: Any) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str, int]] = []
        """(function, method, step) of all calls, in order."""
        self.ledger, self.weights, self.actors = ledger_in(folder / "trace"), Weights(), FakePool("a")
        self.journal = Journal(folder / "journal.sqlite")
        self.journal.begin_attempt()
        self.learner = Function(FunctionName.LEARNER, self.ledger, self.calls, gated=True)
        self.critic = Function(FunctionName.CRITIC, self.ledger, self.calls)
        self.policy = runner(self.actors)
        values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
        spec = RunSpec.model_validate(values | {"prompts_per_step": 1, "samples_per_prompt": 2} | changes)
        self.teachers = [Function(kind.name, self.ledger, self.calls, kind=kind) for kind in teacher_kinds(spec)]
        functions = (
            *((Function(FunctionName.SCORING, self.ledger, self.calls),) if spec.rewards else ()),
            *self.teachers,
            *((Function(FunctionName.REFERENCE, self.ledger, self.calls),) if spec.needs_reference else ()),
            *((self.critic,) if spec.critic else ()),
            self.learner,
        )
        self.run = RLRun(
            run_id="run",
            attempt=1,
            spec=spec,
            order=PromptOrder(rows or [prompt("p"), prompt("q"), prompt("r")], 0, shuffle=False),
            held_out=(),
            pools={  # type: ignore[dict-item]
                pool.kind.name: pool for pool in (self.actors, *functions)
            },
            weights=self.weights,  # type: ignore[arg-type]
            scaler=self.scaler(),
            ledger=self.ledger,
            sinks=MetricSinks([]),
            journal=self.journal,
            checkpoints=None,  # type: ignore[arg-type]
            history=(history := PromptHistory(spec)),
            batches=TokenBatches(spec, history),
        )
        self.run.published = weights_of(0)

    def scaler(self) -> Any:
        def end_step(record: StepRecord) -> None:
            self.policy.end(StepEnded(record.start_s, record.end_s), record.step)

        return SimpleNamespace(
            prefill=None,
            runner_of=lambda step, work: self.policy,
            runner=self.policy,
            idle=lambda function, step: None,
            learn_speeds=lambda step: None,
            end_step=end_step,
        )

    async def rolled_out(self, step: int) -> Any:
        """Return (context, experience) of a step whose samples end at once."""
        context = self.run.begin(step)
        drawing = asyncio.create_task(rollout(self.run, context))
        await until(lambda: bool(self.actors["a"].running))
        self.actors["a"].finish(tokens=3 + step)
        return context, await drawing


SPEC = RunSpec.model_validate({"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]})


def draw(names: Sequence[str], samples: int = 2) -> RolloutRequest:
    return RolloutRequest(
        Call("run", 1, 3),
        tuple(prompt(name) for name in names),
        samples,
        sampling_of(SPEC),
        Work.GENERATE,
        seed=11,
        seed_step=3,
    )


def stage_of(
    pool: Any,
    request: RolloutRequest,
    journal: Journal | None = None,
    *,
    spec: RunSpec = SPEC,
    history: PromptHistory | None = None,
    policy: PolicyRunner | None = None,
    **options: Any,
) -> GenerationStage:
    """Return the generation stage of a request on a fake pool; `policy` assigns its samples, or an even split."""
    samples = InFlightSamples(request, spec, len(pool.allocations), journal, history)
    return GenerationStage(pool, samples, spec, policy or runner(pool), **options)


async def until(condition: Callable[[], bool]) -> None:
    """Let the stage work until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


class Reader:
    """Reads a stage's groups in the background."""

    def __init__(self, stage: GenerationStage) -> None:
        self.groups: list[Group] = []
        self.task = asyncio.create_task(self._read(stage))

    async def _read(self, stage: GenerationStage) -> None:
        async for group in stage.groups():
            self.groups.append(group)

    @property
    def names(self) -> list[str]:
        return [group.prompt.prompt_id for group in self.groups]


def ledger_in(folder: Path) -> Ledger:
    prices = load_price_book(None)
    return Ledger(TraceWriter(folder, TraceMeta("run", 1, prices.snapshot(), {}, {}), False), prices)


# -- a live fleet without processes


class Fleet:
    """A live fleet of two allocations for actors, with scoring and a learner on half a core each."""

    def __init__(
        self,
        folder: Path,
        fewest: int = 1,
        sequences: int = 256,
        hold: Bounds | None = None,
        actors: Any = None,
    ) -> None:
        """`actors`: their pool, if given."""
        self.spec = RunSpec.model_validate(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p"},
                "rewards": [{"type": "exact_match"}],
                "generation": {"max_tokens": 64, "engine": {"max_sequences": sequences}},
                "scaling": {"generation": {"min_actors": fewest, "max_actors": 2}},
            }
        )
        meta = TraceMeta("run", 1, PRICES.snapshot(), {}, {})
        self.folder = folder
        self.ledger = Ledger(TraceWriter(folder, meta, record_tokens=False), PRICES)
        self.cluster = FakeCluster()
        self.actors: Any = actors or pool_of(self.cluster, "a", slots=2, bounds=Bounds(fewest, "min_actors"))
        self.actors["a"].info = ReplicaInfo("a-1", 1, "here", kv_capacity_tokens=5000)
        self.scoring, learner = (
            pool_of(self.cluster, function, bounds=bounds, function=function, given=[HALF_A_CORE])
            for function, bounds in ((FunctionName.SCORING, hold or Bounds()), (FunctionName.LEARNER, Bounds(1)))
        )
        pools = [self.actors, self.scoring, learner]
        speeds, starts = EngineSpeeds(None, 1, 256), EngineStarts(self.spec, None, 100)
        self.fleet = LiveFleet(self.spec, Call("run", 1, 0), pools, self.ledger, speeds, starts)

    def decisions(self) -> list[Decision]:
        self.ledger.write([])
        return list(read_trace(self.folder).decisions)


PRICES = PriceBook.model_validate(
    {"devices": [{"kind": CPU_KIND, "usd_per_hour": 36.0, "rented_by": "device", "source": "a", "as_of": "2026-11-01"}]}
)


HALF_A_CORE = Allocation.of([Device("cpu-2", CPU_KIND, 2)], 0.5)
