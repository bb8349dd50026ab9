"""A run of the orchestrator on a virtual clock, over a simulated cluster."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replicas import Blueprint
from rlhfless.fleet.turns import take_turns
from rlhfless.functions.calls import Call
from rlhfless.orchestrator import step as rlhf
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.orchestrator.run import RLRun, StepContext
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.scaler import Scaler, StepDue
from rlhfless.orchestrator.start_run import stop_functions
from rlhfless.orchestrator.weight_sync import ActorWeights
from rlhfless.records import Experience, FunctionName, StepRecord
from rlhfless.records.traces import Trace
from rlhfless.scaling.function_specs import Bounds, FunctionSpec, declared
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policy import Policy
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.batches import CountedBatches
from rlhfless.sim.billing import MemoryTrace
from rlhfless.sim.cluster import SimulatedCluster, version_of
from rlhfless.sim.counted import CountedSamples
from rlhfless.sim.counted_prompts import CountedJournal, CountedPrompts, largest_step
from rlhfless.sim.devices import SimulatedDevices
from rlhfless.sim.engines import StepEngines
from rlhfless.sim.faults import NO_FAULTS, SimulatedFaults
from rlhfless.sim.known import SetupEngines, SetupLedger
from rlhfless.sim.samples import RolloutBatch, StepProgress
from rlhfless.sim.setup import Setup
from rlhfless.sim.storage import SimulatedDisk, StoredCheckpoints
from rlhfless.sim.strict import StrictRunner
from rlhfless.sim.trained import TrainedState
from rlhfless.sim.virtual_loop import VirtualLoop, run_virtual, waiting
from rlhfless.spec import RunSpec
from rlhfless.spec.rewards import JUDGE_PREFIX
from rlhfless.util.tasks import gather_or_cancel

SPEC = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
LONG_S = 1e7


class NoEnd(RuntimeError):
    """A run has not ended by the virtual time at which it must."""


def spec_of(setup: Setup, last: RolloutBatch, *, times_out: bool = False) -> RunSpec:
    """Return the spec of a run, whose last step has the batch `last`. `times_out`: whether calls and heartbeats time
    out, as live."""
    spec = RunSpec.model_validate(SPEC | {"steps": last.step, "prompts_per_step": last.groups})
    timeouts, recovery = spec.timeouts, spec.recovery
    if not times_out:
        endless = dict.fromkeys(("start_s", "drain_s", "generate_s", "call_s", "sync_s"), LONG_S)
        timeouts = timeouts.model_copy(update=endless)
        recovery = recovery.model_copy(update={"heartbeat_s": LONG_S})
    generation = spec.generation.model_copy(
        update={"max_tokens": setup.max_tokens, "progress_interval_s": setup.heartbeat_s}
    )
    engine = generation.engine.model_copy(update={"max_sequences": setup.actors[0].engine.max_sequences})
    actors = {"min_actors": setup.fewest_actors, "max_actors": len(setup.actors)}
    scaling = spec.scaling.model_copy(update={"generation": spec.scaling.generation.model_copy(update=actors)})
    return spec.model_copy(
        update={
            "timeouts": timeouts,
            "generation": generation.model_copy(update={"engine": engine}),
            "recovery": recovery,
            "checkpoint": spec.checkpoint.model_copy(update={"every_steps": None}),
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


OnRollout = Callable[[RolloutBatch], None]
OnStep = Callable[[LearnedStep], None]


@dataclass(kw_only=True)
class SimulatedRun(RLRun):
    """A run whose samples are counted, and whose batches hold no tokens."""

    engines: StepEngines
    setup: Setup
    on_rollout: OnRollout
    on_step: OnStep
    repeats: bool
    """Whether steps may be learned again, from the journal, because the learner can be lost."""

    def generate(self, request: Any, *, again: bool = False) -> Any:
        stage: Any = super().generate(request, again=again)
        stage.samples.receive = stage.receive
        return stage

    def samples_of(self, request: Any) -> Any:
        """See RLRun."""
        self.engines.keep(self.under_way)
        journal: Any = self.journal
        slots, planned = len(self.generation.allocations), self.setup.prefixes.planned
        samples = CountedSamples(request, self.engines, journal, slots, planned=planned)
        self.on_rollout(samples.progress.batch)
        return samples

    def close_step(self, record: StepRecord, batch: Any) -> None:
        """See RLRun."""
        stage: Any = self.under_way[record.step].stage
        progress = stage.samples.progress
        super().close_step(record, batch)
        if not self.repeats:
            self.journal.forget(record.step)
        self.on_step(LearnedStep(record, batch.packed.batch, tuple(batch.packed.groups), progress))
        self.engines.end(record.step)


class Unseen:
    """Shows and emits nothing: what happens in a simulation is in its trace (RunProgress and MetricSinks)."""

    def emit(self, step: int, values: Any, samples: Any = None) -> None: ...

    def responses(self, step: int, rows: Any) -> None: ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def resumed(self, step: int, attempt: int, earlier_s: float) -> None: ...

    def show(self, content: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    """See rlhfless.orchestrator.run_steps.RunSession."""

    spec: RunSpec
    console: Unseen = field(default_factory=Unseen)
    sinks: Any = field(default_factory=Unseen)
    host: Host = field(default_factory=Host)


class SimulatedStages:
    """The stages of a step. Trained functions start at their first work."""

    rollout = staticmethod(rlhf.rollout)
    evaluate_held_out = staticmethod(rlhf.evaluate_held_out)

    def __init__(self, run: SimulatedRun) -> None:
        self._to_start = list(run.trainers.pools)

    async def train(self, run: SimulatedRun, context: StepContext, experience: Experience) -> StepRecord:
        for pool in self._to_start:
            await pool.ready(context.call)
        self._to_start = []
        return await rlhf.train(run, context, experience)


@dataclass(kw_only=True)
class SimulatedWorld:
    """What a run finds and leaves outside of its driver: the cluster, its devices, the disk and the trace."""

    setup: Setup
    prices: PriceBook
    batches: Sequence[RolloutBatch]
    faults: SimulatedFaults = NO_FAULTS
    full_at: Collection[int] = ()
    """Numbers of writes at which the disk is full."""
    engines: StepEngines = field(init=False)
    devices: SimulatedDevices = field(init=False)
    journal: CountedJournal = field(init=False)
    prompts: CountedPrompts = field(init=False)
    checkpoints: StoredCheckpoints = field(init=False)
    cluster: SimulatedCluster = field(init=False)
    rows: MemoryTrace = field(default_factory=MemoryTrace)

    def __post_init__(self) -> None:
        setup, disk = self.setup, SimulatedDisk(self.full_at)
        steps = 1 + 2 * setup.schedule.steps_ahead  # rollouts ahead outlive faults of earlier steps, which are repeated
        self.engines = StepEngines(setup.actors, *largest_step(setup.schedule, self.batches), steps)
        self.devices = SimulatedDevices(setup)
        self.journal, self.checkpoints = CountedJournal(disk), StoredCheckpoints(disk)
        self.prompts = CountedPrompts(self.batches)
        self.cluster = SimulatedCluster(setup, self.engines, self.devices, self.checkpoints, self.faults)

    def run(
        self,
        policy: Policy,
        spec: RunSpec,
        on_step: OnStep,
        *,
        strict: bool,
        on_rollout: OnRollout = lambda _: None,
    ) -> SimulatedRun:
        """Return the run of the next attempt."""
        setup, call = self.setup, Call("simulated", self.journal.begin_attempt(), 0)
        ledger = SetupLedger(self.rows, self.prices, setup, self.trace() if call.attempt > 1 else None)
        pools = _pools(setup, spec, self.cluster, self.devices, call, ledger)
        beside = {function for function, at in zip(setup.functions, setup.slot_setups, strict=True) if at.beside}
        take_turns(pool for function, pool in pools.items() if function not in beside)
        known = SetupEngines(setup)
        fleet = LiveFleet(spec, call, [*pools.values()], ledger, known, known)
        scaler = Scaler(policy, fleet, None, ledger, StepDue(RunContract()))
        if strict:
            done = lambda: ledger.calls + self.engines.tokens  # noqa: E731
            scaler.runner = StrictRunner(policy, fleet, ledger.add_decision, done)
        # These count what their live forms hold.
        prompts: Any = self.prompts
        journal: Any = self.journal
        sinks: Any = Unseen()
        return SimulatedRun(
            run_id=call.run_id, attempt=call.attempt, spec=spec, order=prompts, held_out=(), pools=pools, ledger=ledger,
            sinks=sinks, journal=journal, checkpoints=self.checkpoints,
            weights=ActorWeights(pools[FunctionName.GENERATION], spec), scaler=scaler, history=prompts, busy_cores=None,
            engines=self.engines, setup=setup, on_rollout=on_rollout, on_step=on_step, batches=CountedBatches(setup),
            repeats=self.faults is not NO_FAULTS,
        )  # fmt: skip

    def trace(self) -> Trace:
        """Return the trace so far."""
        beside = {name for name, slot in self.cluster.slots.items() if self.setup.slot_setups[slot].beside}
        return self.rows.trace(self.prices, beside, self.setup.learner.paid_around)


def simulate(
    setup: Setup,
    policy: Policy,
    prices: PriceBook,
    batches: Sequence[RolloutBatch],
    *,
    on_step: OnStep = lambda _: None,
    on_rollout: OnRollout = lambda _: None,
    strict: bool = True,
) -> Trace:
    """Run all steps of a run, and return its trace.

    `on_step` is called at the end of each step. `on_rollout` is called at the start of each rollout with the samples
    that it will generate, without those that earlier steps have completed.

    `strict`: whether a fault of the policy ends the run; otherwise the run goes on, as live.

    Raises SimulationError for a fault of the policy, ValueError for a response beyond `max_tokens`, and the last fault
    after too many in one step (`recovery.per_step`), as a live run does.
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
    with _unlogged():
        return run_virtual(_simulate(setup, policy, prices, batches, on_step, on_rollout, strict))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Hide what a run logs within the block: in a simulation, losses are expected, and in the trace."""
    loggers = [logging.getLogger(f"rlhfless.{room}") for room in ("fleet", "orchestrator")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


async def _simulate(
    setup: Setup,
    policy: Policy,
    prices: PriceBook,
    batches: Sequence[RolloutBatch],
    on_step: OnStep,
    on_rollout: OnRollout,
    strict: bool,
) -> Trace:
    world = SimulatedWorld(setup=setup, prices=prices, batches=batches)
    advance_engines(world.engines)
    session, first = SimulatedSession(spec_of(setup, batches[-1])), batches[0].step
    run = world.run(policy, session.spec, on_step, strict=strict, on_rollout=on_rollout)
    run.published = version_of(run.call(first - 1), TrainedState())
    world.cluster.published.add(run.published.version.label)
    await _start_under_way(run)
    await drive_steps(session, run, first, SimulatedStages(run))
    await stop_functions([*run.pools.values()])
    world.checkpoints.close()
    return world.trace()


async def _start_under_way(run: SimulatedRun) -> None:
    """Start the replicas that a run has before its first step, if the setup says that the run is under way."""
    generation = run.generation
    by_function = Counter(run.setup.functions[slot] for slot in run.setup.under_way)
    actors = by_function.pop(FunctionName.GENERATION, 0)
    ready = (run.pools[function].ready(run.call(0)) for function in by_function)
    await gather_or_cancel(generation.fill(actors), *ready)


def advance_engines(engines: StepEngines, limit_s: float = math.inf) -> None:
    """Let the engines advance before the clock of the running loop jumps.

    The loop raises NoEnd instead of a jump beyond `limit_s`.
    """
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
        blueprint = Blueprint(_kind_of(function), object, _slot_among(slot_of), allocations, bounds)
        pools[function] = ReplicaPool(cluster, devices, blueprint, call, spec.timeouts, ledger)
    return pools


def _kind_of(function: str) -> FunctionSpec:
    """Return the declaration of a function.

    Judges work like reward models, teachers and users' own functions like the reference.
    """
    if function.startswith(JUDGE_PREFIX):
        return replace(declared()[FunctionName.REWARD_MODEL], name=function)
    reference = declared()[FunctionName.REFERENCE]
    return declared().get(function) or replace(reference, name=function, output=function)


def _slot_among(slot_of: Mapping[int, int]) -> Callable[[Allocation], int]:
    """Return the settings of a replica in a simulated cluster: its slot, by identity of its allocation."""
    return lambda bound: slot_of[id(bound)]


def _of_its_own(allocation: Allocation) -> Allocation:
    """Return an allocation that is not the same object as another slot's."""
    return replace(allocation)
