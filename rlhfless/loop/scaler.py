"""The scaling of a run: its policy, what the policy is told, and what it may do.

The policy is of the same make as those that the simulator runs (rlhfless.scaling.policies), and knows nothing of where
it runs. A resumed run's has seen all lengths of its trace, and the speeds of its engines.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless.fleet.pool import Pool
from rlhfless.functions.base import Call
from rlhfless.loop.actors import Actors
from rlhfless.loop.draw import Draw
from rlhfless.loop.even_deal import EvenDeal
from rlhfless.loop.holds import Keeper
from rlhfless.loop.ledger import Ledger
from rlhfless.loop.preflight import Prepared
from rlhfless.loop.rooms import LiveFleet
from rlhfless.loop.speeds import EngineSpeeds
from rlhfless.loop.steering import Steering
from rlhfless.records import FunctionName, StepRecord, Work
from rlhfless.records.traces import Trace
from rlhfless.scaling.policies import POLICIES, make_policy
from rlhfless.scaling.policy import Idle, Policy, StepEnded
from rlhfless.spec import RunSpec


class Scaler:
    """Steers the training steps by the policy, and evaluations by none."""

    def __init__(self, policy: Policy, fleet: LiveFleet, speeds: EngineSpeeds, ledger: Ledger) -> None:
        self._steering = Steering(policy, fleet, ledger.add_decision)
        self._fleet = fleet
        self._speeds = speeds
        self._ledger = ledger
        self._ended = 0

    def steering_of(self, draw: Draw) -> Steering:
        """Who decides about a draw. Evaluations are dealt out evenly, so that the policy learns no lengths from them;
        so is a step that is in the trace already, because its lengths are known."""
        if draw.work is Work.GENERATE and not self._ledger.has_rollouts_of(draw.call.step):
            return self._steering
        return Steering(EvenDeal(), self._fleet, self._ledger.add_decision)

    def figures(self, step: int) -> Mapping[str, float]:
        """The metrics of a step; none if the policy did not steer it."""
        return self._steering.figures if self._steering.step == step else {}

    def idle(self, function: FunctionName, step: int) -> None:
        """A function has done its work of a step."""
        if self._steering.step == step:
            self._steering.ask(Idle(self._fleet.place_of(function)))

    def step_ended(self, record: StepRecord) -> None:
        """A step is done: its engines' speeds and its lengths are learned, once."""
        if record.step <= self._ended or self._steering.step != record.step:
            return
        self._ended = record.step
        self._speeds.learn(*self._ledger.done_in_step(), self._fleet.kinds())
        self._steering.ask(StepEnded(record.start_s, record.end_s))


def scaler_of(
    spec: RunSpec,
    prepared: Prepared,
    call: Call,
    actors: Actors,
    keepers: Mapping[FunctionName, Keeper],
    learner: Pool,
    ledger: Ledger,
    earlier: Trace | None,
) -> Scaler:
    """The scaler that a spec asks for. `earlier` is what earlier attempts of the run have left."""
    limits = spec.generation.engine
    speeds = EngineSpeeds(prepared.shape, limits.tensor_parallel_size, limits.max_sequences)
    if earlier is not None:
        speeds.learn_trace(earlier)
    fleet = LiveFleet(spec, call, actors, keepers, learner, ledger, speeds, prepared.max_model_len)
    return Scaler(policy_of(spec, earlier), fleet, speeds, ledger)


def policy_of(spec: RunSpec, earlier: Trace | None) -> Policy:
    """The policy of `scaling.policy`, with the run's contract."""
    scaling = spec.scaling
    settings = POLICIES[scaling.policy].settings(contract=scaling.contract, steps=spec.steps)
    return make_policy(scaling.policy, settings)
