"""The learner of a recorded run. Pure.

A run whose learner lost ranks and got them back is replayed with all of its ranks; the fit has the calls of every size.
"""

from __future__ import annotations

from rlhfless.records import FunctionName
from rlhfless.records.traces import Trace
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.placement import Allocation
from rlhfless.sim.replay.fleet import RecordedFleet, slot_setup_of
from rlhfless.sim.replay.latency_file import LatencyFile
from rlhfless.sim.setup import LearnerShape


def with_learner(trace: Trace, latency: LatencyFile, ranks: int, kind: str) -> LatencyFile:
    """Scale a run's fit to a learner with another number of ranks, or on another kind of device by data sheets.

    Raises UnknownDevice for a kind without a data sheet.
    """
    recorded_kind = RecordedFleet(trace).allocation(FunctionName.LEARNER).devices[0].kind
    factor = _ranks(trace, ranks) / ranks
    if kind != recorded_kind:
        recorded, other = (device_of(each) for each in (recorded_kind, kind))
        factor *= recorded.flops_per_s.value * recorded.matmul_efficiency.value
        factor /= other.flops_per_s.value * other.matmul_efficiency.value
    evaluate = None if latency.evaluate is None else latency.evaluate.times(factor)
    return latency.model_copy(update={"evaluate": evaluate, "learn": latency.learn.times(factor)})


def learner_of(trace: Trace, latency: LatencyFile, allocation: Allocation) -> LearnerShape:
    """Return the learner of a replay, on these devices."""
    evaluate = latency.evaluate
    return LearnerShape(
        slot_setup_of(allocation, 0.0),
        latency.learn.fixed_s + (evaluate.fixed_s if evaluate else 0.0),
        evaluate.token_s if evaluate else 0.0,
        latency.learn.token_s,
        latency.publish_s,
        int(trace.meta.spec.get("mini_batches", 1)) * _ranks(trace, 1),
        epochs_of(trace, FunctionName.LEARNER),
    )


def epochs_of(trace: Trace, function: str) -> int:
    """Return the passes of a function that learns over the batch of a step."""
    own = (trace.meta.spec.get(function) or {}).get("epochs")
    return int(own or trace.meta.spec.get("epochs", 1))


def _ranks(trace: Trace, default: int) -> int:
    ranks = trace.meta.spec.get("learner", {}).get("ranks")
    return ranks if isinstance(ranks, int) else default
