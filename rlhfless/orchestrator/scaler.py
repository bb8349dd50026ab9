"""The scaling of a run: its policy, the events that the policy gets, and the actions that it may take.

The policy is the same code that the simulator runs (rlhfless.scaling.policies), and does not know where it runs. In a
resumed run it has seen all lengths of the trace, and the speeds of the run's engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.base import Call
from rlhfless.orchestrator.live_fleet import EngineStarts, FleetFigures, LiveFleet
from rlhfless.orchestrator.policy_runner import EvenSplit, PolicyRunner
from rlhfless.orchestrator.prefill import PrefillActors
from rlhfless.prepare.prepared import Prepared
from rlhfless.records import FunctionRole, StepRecord, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.engine_speeds import EngineSpeeds
from rlhfless.scaling.latency.startup import START_S
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.policies.contract import CheapestUnderDeadline, RunContract, contract_for_step
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasts import PredictedLengths
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policy import Idle, Policy, StepEnded
from rlhfless.spec import CheapestSpec, ContractSpec, CostAwareSpec, FastestSpec, RunSpec, WeightedSpec
from rlhfless.spec.imports import load_target
from rlhfless.spec.policies import StaticSpec


class StepDue:
    """When the step in progress should have ended, by a run's contract. Runs that share devices take turns by it."""

    def __init__(self, run: RunContract, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self._first_s = self._began_s = clock()
        self._steps = 0

    def end_step(self, end_s: float) -> None:
        """A step has ended, and the next one begins."""
        self._steps, self._began_s = self._steps + 1, end_s

    def left_s(self) -> float:
        """Seconds from now, less than 0 if it is late; infinite without a deadline."""
        spec, left = self._run.of_step(self._steps), self._run.steps_left(self._steps)
        contract = contract_for_step(spec, steps_left=left, spent_s=self._began_s - self._first_s)
        if not isinstance(contract, CheapestUnderDeadline):
            return math.inf
        return self._began_s + contract.deadline_s - self._clock()


class Scaler:
    """Runs the policy for training steps, and splits evaluations evenly."""

    def __init__(
        self,
        policy: Policy,
        fleet: LiveFleet,
        speeds: EngineSpeeds,
        ledger: FleetFigures,
        due: StepDue,
        prefill: PrefillActors | None = None,
    ) -> None:
        self.due = due
        self.prefill = prefill
        """The actors that compute prompts for the others, if the spec allows any."""
        self.runner = PolicyRunner(policy, fleet, ledger.add_decision)
        """The runner of training steps."""
        self.fleet = fleet
        self._speeds = speeds
        self._ledger = ledger

    def runner_of(self, step: int, work: Work) -> PolicyRunner:
        """The runner that decides about samples to be drawn. Evaluations are split evenly, so that the policy learns no
        lengths from them; so is a step that is already in the trace, because its lengths are known."""
        if work is Work.GENERATE and not self._ledger.has_rollouts_of(step):
            return self.runner
        return self.even_split()

    def even_split(self) -> PolicyRunner:
        """A runner without a plan: also for what a step draws again, because the policy plans a step once."""
        return PolicyRunner(EvenSplit(), self.fleet, self._ledger.add_decision)

    def idle(self, function: str, step: int) -> None:
        """Ask the policy about a function that has finished its work of a step."""
        self.runner.ask(Idle(self.fleet.slot_of(function)), step)
        self.fleet.idle(function, step)

    def learn_speeds(self, step: int) -> None:
        """Learn the speeds of the engines from a step whose rollouts are in the ledger."""
        if self.runner.figures(step):
            self._speeds.learn(*self._ledger.done_in_step(step), self.fleet.kinds())

    def end_step(self, record: StepRecord) -> None:
        """End a step; the policy gets the event once."""
        self.runner.end(StepEnded(record.resumed_s, record.end_s), record.step)
        self.due.end_step(record.end_s)


def scaler_of(
    spec: RunSpec,
    prepared: Prepared,
    call: Call,
    pools: Sequence[ReplicaPool],
    ledger: FleetFigures,
    lengths: LengthPredictor,
    earlier: Trace | None,
) -> Scaler:
    """The scaler that a spec asks for. `pools` are the pools of all functions, the actors' pool first. `lengths`: of
    the run's responses. `earlier`: the trace of its earlier attempts."""
    limits = spec.generation.engine
    shape = None if prepared.shape is None else prepared.shape.up_to(prepared.max_model_len)
    speeds = EngineSpeeds(shape, limits.devices_per_actor, limits.sequence_limit)
    if earlier is not None:
        speeds.learn_trace(earlier)
    starts = EngineStarts(spec, shape)
    fleet = LiveFleet(spec, call, pools, ledger, speeds, prepared.max_model_len, starts)
    spent_usd = ledger.cost_usd(())
    due = StepDue(_rest_of(spec, spec.scaling.contract, earlier, spent_usd))
    prefill = _prefill_of(spec, pools, ledger, speeds)
    return Scaler(policy_of(spec, lengths, earlier, spent_usd), fleet, speeds, ledger, due, prefill)


def _prefill_of(
    spec: RunSpec, pools: Sequence[ReplicaPool], ledger: FleetFigures, speeds: EngineSpeeds
) -> PrefillActors | None:
    """The actors that compute prompts. Before one was started a start is expected to take as long as an actor's."""
    pool = next((pool for pool in pools if pool.kind.role is FunctionRole.PREFILLS), None)
    if pool is None:
        return None
    functions = pool.function, pools[0].function

    def start_s() -> float:
        measured = (ledger.mean_start_s(function) for function in functions)
        return next((seconds for seconds in measured if seconds is not None), START_S)

    return PrefillActors(pool, speeds, start_s, spec.timeouts.sync_s)


def policy_of(spec: RunSpec, lengths: LengthPredictor, earlier: Trace | None, spent_usd: float = 0.0) -> Policy:
    """The policy of `scaling.policy`. In a resumed run the rest of a contract for the whole run applies to the
    remaining steps."""
    scaling = spec.scaling
    # Actors that never leave cost the same whatever is decided.
    contract = WeightedSpec(time_weight=1.0) if scaling.generation.fixed else scaling.contract
    run = _rest_of(spec, contract, earlier, spent_usd)
    if isinstance(scaling.policy, CostAwareSpec):
        return CostAware(scaling.policy, run, PredictedLengths(lengths))
    if isinstance(scaling.policy, StaticSpec):
        return Static(scaling.policy)
    own: Policy = load_target(scaling.policy.type)(scaling.policy, run)
    return own


def _rest_of(spec: RunSpec, contract: ContractSpec, earlier: Trace | None, spent_usd: float) -> RunContract:
    """What a contract leaves for the steps that are not in the trace."""
    done = () if earlier is None else earlier.steps
    if isinstance(contract, CheapestSpec) and contract.per == "run":
        left_s = contract.deadline_s - sum(step.end_s - step.start_s for step in done)
        contract = contract.model_copy(update={"deadline_s": max(left_s, 0.0)})
    if isinstance(contract, FastestSpec) and contract.per == "run":
        contract = contract.model_copy(update={"budget_usd": max(contract.budget_usd - spent_usd, 0.0)})
    return RunContract(contract, max(spec.steps - len(done), 1))
