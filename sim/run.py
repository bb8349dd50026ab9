"""A run of the orchestrator on a virtual clock, over a simulated cluster."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replicas import Blueprint
from rlhfless.fleet.turns import take_turns
from rlhfless.functions.calls import Call
from rlhfless.orchestrator import step as rlhf
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.scaler import Scaler, StepDue
from rlhfless.orchestrator.schedules import schedule_of
from rlhfless.orchestrator.weight_sync import ActorWeights
from rlhfless.records import FunctionName, StepRecord
from rlhfless.records.traces import Trace
from rlhfless.scaling.function_specs import Bounds, declared
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.batches import CountedBatches
from rlhfless.sim.billing import MemoryTrace
from rlhfless.sim.cluster import NO_FAULTS, SimulatedCluster, SimulatedFaults, version_of
from rlhfless.sim.counted import CountedSamples
from rlhfless.sim.counted_prompts import CountedJournal, CountedPrompts, largest_step
from rlhfless.sim.devices import SimulatedDevices
from rlhfless.sim.engines import StepEngines
from rlhfless.sim.known import SetupEngines, SetupLedger
from rlhfless.sim.samples import RolloutBatch, StepProgress
from rlhfless.sim.setup import Setup
from rlhfless.sim.strict import StrictRunner
from rlhfless.sim.virtual_loop import VirtualLoop, run_virtual, waiting
from rlhfless.spec import RunSpec
from rlhfless.util.tasks import gather_or_cancel

SPEC = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
LONG_S = 1e7


class NoEnd(RuntimeError):
    """A run has not ended by the virtual time at which it must."""


def spec_of(setup: Setup, last: RolloutBatch, call_limit_s: float = LONG_S) -> RunSpec:
    """Return the spec of a run, whose last step has the batch `last`. `call_limit_s`: after which a call that is not
    generation times out."""
    spec = RunSpec.model_validate(SPEC | {"steps": last.step, "prompts_per_step": last.groups})
    timeouts = spec.timeouts.model_copy(
        update=dict.fromkeys(("start_s", "drain_s", "generate_s"), LONG_S)
        | dict.fromkeys(("call_s", "sync_s"), call_limit_s)
    )
    generation = spec.generation.model_copy(
        update={"max_tokens": setup.max_tokens, "progress_interval_s": setup.links.heartbeat_s}
    )
    engine = generation.engine.model_copy(update={"max_sequences": setup.actors[0].engine.max_sequences})
    actors = {"min_actors": setup.fewest_actors, "max_actors": len(setup.actors)}
    scaling = spec.scaling.model_copy(update={"generation": spec.scaling.generation.model_copy(update=actors)})
    return spec.model_copy(
        update={
            "timeouts": timeouts,
            "generation": generation.model_copy(update={"engine": engine}),
            "recovery": spec.recovery.model_copy(update={"heartbeat_s": LONG_S}),
            "scaling": scaling,
            "schedule": setup.schedule,
        }
    )


@dataclass(frozen=True, slots=True)
class LearnedStep:
    """A step that has ended. Its arrays may be used again by later steps."""

    record: StepRecord
    batch: RolloutBatch
    """Its groups with all their samples, including those that earlier steps have generated."""
    groups: tuple[int, ...]
    """The groups of `batch` that it has learned from."""
    progress: StepProgress
    """Of the samples that it has generated."""


OnStep = Callable[[LearnedStep], None]


@dataclass(kw_only=True)
class SimulatedRun(RLRun):
    """A run whose samples are counted, and whose batches hold no tokens."""

    engines: StepEngines
    setup: Setup
    on_step: OnStep

    def generate(self, request: Any, *, again: bool = False) -> Any:
        stage: Any = super().generate(request, again=again)
        stage.samples.receive = stage.receive
        return stage

    def samples_of(self, request: Any) -> Any:
        journal: Any = self.journal
        slots, planned = len(self.generation.allocations), self.setup.prefixes.planned
        return CountedSamples(request, self.engines, journal, slots, planned=planned)

    def close_step(self, record: StepRecord, batch: Any) -> None:
        """See RLRun."""
        stage: Any = self.under_way[record.step].stage
        progress = stage.samples.progress
        super().close_step(record, batch)
        self.journal.forget(record.step)
        self.on_step(LearnedStep(record, batch.packed.batch, tuple(batch.packed.groups), progress))
        self.engines.end(record.step)


class NoSinks:
    """Emits no metrics: those of a simulation are in its trace."""

    def emit(self, step: int, values: Any, samples: Any = None) -> None: ...


class SimulatedSteps:
    """The steps of a run, for its schedule (implements rlhfless.orchestrator.schedules.Steps, without Recovery)."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run

    async def rollout(self, step: int) -> Any:
        return await rlhf.rollout(self._run, self._run.begin(step))

    async def train(self, step: int, experience: Any) -> None:
        for pool in self._run.trainers.pools:  # they start at their first work
            await pool.ready(self._run.call(step))
        await rlhf.train(self._run, self._run.under_way[step], experience)


def simulate(
    setup: Setup,
    policy: Policy,
    prices: PriceBook,
    batches: Sequence[RolloutBatch],
    *,
    on_step: OnStep = lambda _: None,
    strict: bool = True,
    faults: SimulatedFaults = NO_FAULTS,
    call_limit_s: float = LONG_S,
    limit_s: float = math.inf,
) -> Trace:
    """Run all steps of a run, and return its trace. `on_step` is called at the end of each step.

    `strict`: whether a fault of the policy ends the run; otherwise the run goes on, as live.

    Raises SimulationError for a fault of the policy, NoEnd for a run that has not ended after `limit_s` virtual
    seconds, ValueError for a response beyond `max_tokens`, and the errors from which a live run would recover.
    """
    first = batches[0].step
    for number, batch in enumerate(batches, first):
        if batch.step != number:
            raise ValueError(
                f"a batch of step {batch.step} follows step {number - 1}; the steps of a run are consecutive"
            )
        longest = int(batch.response_tokens.max(initial=0))
        if longest > setup.max_tokens:
            raise ValueError(
                f"step {batch.step} has a response of {longest} tokens, above max_tokens ({setup.max_tokens})"
            )
    return run_virtual(_simulate(setup, policy, prices, batches, on_step, strict, faults, call_limit_s, limit_s))


async def _simulate(
    setup: Setup,
    policy: Policy,
    prices: PriceBook,
    batches: Sequence[RolloutBatch],
    on_step: OnStep,
    strict: bool,
    faults: SimulatedFaults,
    call_limit_s: float,
    limit_s: float,
) -> Trace:
    engines = StepEngines(setup.actors, *largest_step(setup.schedule, batches), 1 + setup.schedule.steps_ahead)
    _advance_engines(engines, limit_s)
    spec = spec_of(setup, batches[-1], call_limit_s)
    writer = MemoryTrace()
    ledger = SetupLedger(writer, prices, setup)
    devices, call = SimulatedDevices(setup), Call("simulated", 1, 0)
    cluster = SimulatedCluster(setup, engines, devices, faults)
    pools = _pools(setup, spec, cluster, devices, call, ledger)
    beside = {function for function, at in zip(setup.functions, setup.slot_setups, strict=True) if at.beside}
    take_turns(pool for function, pool in pools.items() if function not in beside)
    known = SetupEngines(setup)
    fleet = LiveFleet(spec, call, [*pools.values()], ledger, known, known)
    scaler = Scaler(policy, fleet, None, ledger, StepDue(RunContract()))
    if strict:
        scaler.runner = StrictRunner(policy, fleet, ledger.add_decision, lambda: ledger.calls + engines.tokens)
    prompts: Any = CountedPrompts(batches)
    run = SimulatedRun(
        run_id="simulated", attempt=1, spec=spec, order=prompts, held_out=(), pools=pools, ledger=ledger,
        sinks=NoSinks(), journal=CountedJournal(), checkpoints=None,
        weights=ActorWeights(pools[FunctionName.GENERATION], spec),
        scaler=scaler, history=prompts, busy_cores=None, engines=engines, setup=setup, on_step=on_step,
        batches=CountedBatches(setup),
    )  # fmt: skip
    run.published = version_of(0)
    await _start_under_way(run)
    await schedule_of(spec.schedule).drive(SimulatedSteps(run), batches[0].step, batches[-1].step)
    for pool in pools.values():
        for replica in pool.replicas():
            replica.drain()
            replica.mark_ended()
    names = {name for name, slot in cluster.slots.items() if setup.slot_setups[slot].beside}
    return writer.trace(prices, names, setup.learner.paid_around)


async def _start_under_way(run: SimulatedRun) -> None:
    """Start the replicas that a run has before its first step, if the setup says that the run is under way."""
    generation = run.generation
    by_function = Counter(run.setup.functions[slot] for slot in run.setup.under_way)
    actors = by_function.pop(FunctionName.GENERATION, 0)
    ready = (run.pools[function].ready(run.call(0)) for function in by_function)
    await gather_or_cancel(generation.fill(actors), *ready)


def _advance_engines(engines: StepEngines, limit_s: float) -> None:
    """Let the engines advance before the clock of the running loop jumps. The clock stops at `limit_s`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    def before_jump(at_s: float) -> float:
        at_s = engines.run_until(at_s)
        if limit_s < at_s < math.inf:
            loop.before_jump = lambda at_s: at_s  # tasks end when they are cancelled
            raise NoEnd(f"the run has not ended after {limit_s:g} s, and {waiting(loop)}")
        return at_s

    loop.before_jump = before_jump


def _pools(
    setup: Setup, spec: RunSpec, cluster: Any, devices: Any, call: Call, ledger: Ledger
) -> dict[str, ReplicaPool]:
    """Return a pool for each function of the setup."""
    slots: dict[str, list[int]] = {}
    for slot, function in enumerate(setup.functions):
        slots.setdefault(function, []).append(slot)
    pools = {}
    for function, mine in slots.items():
        allocations = tuple(_of_its_own(setup.slot_setups[slot].allocation) for slot in mine)
        slot_of = {id(allocation): slot for allocation, slot in zip(allocations, mine, strict=True)}
        fewest = setup.fewest_actors if function == FunctionName.GENERATION else 0
        by_use = function == FunctionName.LEARNER and setup.learner.paid_around is not None
        bounds = Bounds(fewest, "simulated", idle=not by_use)
        blueprint = Blueprint(
            declared()[function], object, lambda bound, slot_of=slot_of: slot_of[id(bound)], allocations, bounds
        )
        pools[function] = ReplicaPool(cluster, devices, blueprint, call, spec.timeouts, ledger)
    return pools


def _of_its_own(allocation: Any) -> Any:
    """Return an allocation that is not the same object as another slot's."""
    return replace(allocation)
