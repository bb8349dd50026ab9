"""Build the scaler of a live run from its spec, its checked inputs and the trace of its earlier attempts."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.engine_starts import EngineStarts
from rlhfless.orchestrator.fleet_slots import FleetFigures
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.orchestrator.prompt_kv import PrefillActors
from rlhfless.orchestrator.scaler import Scaler, StepDue
from rlhfless.planning.preflight import Prepared
from rlhfless.records import FunctionRole
from rlhfless.records.traces import Trace
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.latency.roofline import START_S
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasts import PredictedLengths
from rlhfless.scaling.policies.static import Static
from rlhfless.scaling.policy import (
    Policy,
)
from rlhfless.spec import CheapestSpec, ContractSpec, CostAwareSpec, FastestSpec, RunSpec, WeightedSpec
from rlhfless.spec.fleet import StaticSpec
from rlhfless.spec.imports import load_target


def scaler_of(
    spec: RunSpec,
    prepared: Prepared,
    call: Call,
    pools: Sequence[ReplicaPool],
    ledger: FleetFigures,
    lengths: LengthPredictor,
    earlier: Trace | None,
) -> Scaler:
    """Build the scaler of a spec. `pools`: the pools of all functions, the actors' first. `lengths` predicts response
    lengths. `earlier`: the trace of the run's earlier attempts."""
    limits = spec.generation.engine
    shape = None if prepared.shape is None else prepared.shape.up_to(prepared.max_model_len)
    speeds = EngineSpeeds(shape, limits.devices_per_actor, limits.sequence_limit)
    if earlier is not None:
        speeds.learn_trace(earlier)
    fleet = LiveFleet(spec, call, pools, ledger, speeds, EngineStarts(spec, shape, prepared.max_model_len))
    spent_usd = ledger.cost_usd(())
    due = StepDue(_rest_of(spec, spec.scaling.contract, earlier, spent_usd))
    prefill = _prefill_of(spec, pools, ledger, speeds)
    return Scaler(policy_of(spec, lengths, earlier, spent_usd), fleet, speeds, ledger, due, prefill)


def _prefill_of(
    spec: RunSpec, pools: Sequence[ReplicaPool], ledger: FleetFigures, speeds: EngineSpeeds
) -> PrefillActors | None:
    """Return the prefill actors, if any. Until one has started, a start is expected to take as long as an actor's."""
    pool = next((pool for pool in pools if pool.kind.role is FunctionRole.PREFILLS), None)
    if pool is None:
        return None
    functions = pool.function, pools[0].function

    def start_s() -> float:
        measured = (ledger.mean_start_s(function) for function in functions)
        return next((seconds for seconds in measured if seconds is not None), START_S)

    return PrefillActors(pool, speeds, start_s, spec.timeouts.sync_s)


def policy_of(spec: RunSpec, lengths: LengthPredictor, earlier: Trace | None, spent_usd: float = 0.0) -> Policy:
    """Build the policy of `scaling.policy`. In a resumed run, the remainder of a per-run contract applies to the
    remaining steps."""
    scaling = spec.scaling
    # A fixed fleet costs the same under every plan, so only time matters.
    contract = WeightedSpec(time_weight=1.0) if scaling.generation.fixed else scaling.contract
    run = _rest_of(spec, contract, earlier, spent_usd)
    if isinstance(scaling.policy, CostAwareSpec):
        return CostAware(scaling.policy, run, PredictedLengths(lengths))
    if isinstance(scaling.policy, StaticSpec):
        return Static(scaling.policy)
    own: Policy = load_target(scaling.policy.type)(scaling.policy, run)
    return own


def _rest_of(spec: RunSpec, contract: ContractSpec, earlier: Trace | None, spent_usd: float) -> RunContract:
    """Return the contract for the steps that are not in the trace: the remaining deadline or budget of the run."""
    done = () if earlier is None else earlier.steps
    if isinstance(contract, CheapestSpec) and contract.per == "run":
        left_s = contract.deadline_s - sum(step.end_s - step.start_s for step in done)
        contract = contract.model_copy(update={"deadline_s": max(left_s, 0.0)})
    if isinstance(contract, FastestSpec) and contract.per == "run":
        contract = contract.model_copy(update={"budget_usd": max(contract.budget_usd - spent_usd, 0.0)})
    return RunContract(contract, max(spec.steps - len(done), 1))
