"""The scaling of a run: its policy, the events that the policy gets, and the actions that it may take.

The policy is the same code that the simulator runs (rlhfless.scaling.policies), and does not know where it runs. In a
resumed run it has seen all lengths of the trace, and the speeds of the run's engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.autoscaling.engine_speeds import EngineSpeeds, PrefixMoves
from rlhfless.autoscaling.engine_starts import EngineStarts
from rlhfless.autoscaling.live_fleet import FleetFigures, LiveFleet
from rlhfless.autoscaling.policy_runner import EvenSplit, PolicyRunner
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.base import Call
from rlhfless.prepare.preflight import Prepared
from rlhfless.records import StepRecord, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.lengths import predictor_of
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies import make_policy
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasters import PredictedLengths
from rlhfless.scaling.policy import Idle, Policy, StepEnded
from rlhfless.spec import CheapestSpec, ContractSpec, CostAwareSpec, FastestSpec, RunSpec, ScalingSpec, WeightedSpec


class Scaler:
    """Runs the policy for training steps, and splits evaluations evenly."""

    def __init__(
        self,
        policy: Policy,
        fleet: LiveFleet,
        speeds: EngineSpeeds,
        ledger: FleetFigures,
        moves: PrefixMoves | None = None,
    ) -> None:
        self.moves = moves
        """Decides when actors get prefixes from each other."""
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


def scaler_of(
    spec: RunSpec,
    prepared: Prepared,
    call: Call,
    pools: Sequence[ReplicaPool],
    ledger: FleetFigures,
    earlier: Trace | None,
) -> Scaler:
    """The scaler that a spec asks for. `pools` are the pools of all functions, the actors' pool first; `earlier` is the
    trace of earlier attempts of the run."""
    limits = spec.generation.engine
    shape = None if prepared.shape is None else prepared.shape.up_to(prepared.max_model_len)
    speeds = EngineSpeeds(shape, limits.tensor_parallel_size, limits.max_sequences)
    if earlier is not None:
        speeds.learn_trace(earlier)
    kv_token_bytes = 0 if shape is None else shape.kv_bytes
    connector = spec.generation.engine.kv_connector if kv_token_bytes else None
    moves = PrefixMoves(connector, kv_token_bytes, speeds)
    starts = EngineStarts(spec, shape)
    fleet = LiveFleet(spec, call, pools, ledger, speeds, prepared.max_model_len, moves, starts)
    return Scaler(policy_of(spec, earlier, ledger.cost_usd(())), fleet, speeds, ledger, moves)


def policy_of(spec: RunSpec, earlier: Trace | None, spent_usd: float = 0.0) -> Policy:
    """The policy of `scaling.policy`. In a resumed run it has seen the lengths of the trace, and the rest of a
    contract for the whole run applies to the remaining steps."""
    scaling = spec.scaling
    done = () if earlier is None else earlier.steps
    contract = _contract(scaling, sum(step.end_s - step.start_s for step in done), spent_usd)
    run = RunContract(contract, max(spec.steps - len(done), 1))
    if isinstance(scaling.policy, CostAwareSpec) and earlier is not None:
        return CostAware(scaling.policy, run, PredictedLengths(predictor_of(earlier)))
    return make_policy(scaling.policy.type, scaling.policy, run)


def _contract(scaling: ScalingSpec, spent_s: float, spent_usd: float) -> ContractSpec:
    contract, bounds = scaling.contract, scaling.generation
    if bounds.fixed:
        return WeightedSpec(time_weight=1.0)  # it costs the same whatever is decided
    if isinstance(contract, CheapestSpec) and contract.per == "run":
        return contract.model_copy(update={"deadline_s": max(contract.deadline_s - spent_s, 0.0)})
    if isinstance(contract, FastestSpec) and contract.per == "run":
        return contract.model_copy(update={"budget_usd": max(contract.budget_usd - spent_usd, 0.0)})
    return contract
