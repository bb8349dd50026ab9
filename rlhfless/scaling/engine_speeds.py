"""Speeds of the run's own engines, learned from its ledger while it runs: one fit per kind of device.

A fit starts with a prior: the device's data sheet plus the engine's own overhead. The prior determines the first step,
and terms that the run's batches cannot separate. On a CPU core the engine's scheduler and sampler share the core with
the model, and with a small model they take nearly all the time: `OVERHEAD_S` and `SEQUENCE_S`. A prior without them
would predict a step so short that a single actor suffices. An unknown accelerator is assumed to be the slowest in the
table rather than a CPU core, because a prior that is a thousand times too slow would start every actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlhfless.records import Invocation
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.fitted import BentEngine, LatencyFit, LinearEngine, prompt_calls
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND

STEPS_REPLAYED = 20
"""Number of trace steps that a resumed run learns from: the fit would weight older steps below 1 %."""

OVERHEAD_S = 0.009
"""Seconds per iteration of vLLM's CPU engine excluding the model: 6 to 12 ms on one server core, measured with a
model of 0.5 million parameters, whose own time is negligible (fits to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1.8e-4
"""Seconds per sequence of an iteration excluding the model: 0.2 ms by the same fits, including 0.02 ms of the model."""

SLOWEST = "l4"
"""The slowest accelerator in the table of devices."""


class EngineSpeeds:
    """A latency model for each kind of device. Until its first step, a kind uses the prior."""

    def __init__(self, shape: ModelShape | None, tensor_parallel: int, max_sequences: int) -> None:
        self._shape = shape
        self._tensor_parallel = tensor_parallel
        self._max_sequences = max_sequences
        self._fits: dict[str, LatencyFit] = {}

    def model(self, kind: str) -> BentEngine:
        """Return the best known model of the engines on a kind of device."""
        return self._fit(kind).model()

    def learn(
        self, invocations: Iterable[Invocation], rollouts: Iterable[TracedRollout], kinds: Mapping[str, str]
    ) -> None:
        """Learn from a step of the ledger.

        `kinds` maps actor names to device kinds, including actors that compute prompts for others. Other actors are
        ignored.
        """
        calls, rows = list(invocations), list(rollouts)
        for kind in sorted(set(kinds.values())):
            generated = [row for row in rows if kinds.get(row.actor) == kind]
            of_kind = [call for call in calls if kinds.get(call.replica) == kind]
            if generated or prompt_calls(of_kind):
                self._fit(kind).observe_step(of_kind, generated, self._max_sequences)

    def learn_trace(self, trace: Trace) -> None:
        """Learn from the trace of an earlier attempt."""
        kinds = {holding.replica: holding.device_kind for holding in trace.holdings}
        steps = sorted({row.step for row in trace.rollouts})[-STEPS_REPLAYED:]
        for step in steps:
            calls = [call for call in trace.invocations if call.step == step]
            self.learn(calls, [row for row in trace.rollouts if row.step == step], kinds)

    def _fit(self, kind: str) -> LatencyFit:
        if kind not in self._fits:
            self._fits[kind] = LatencyFit(prior_of(kind, self._shape, self._tensor_parallel))
        return self._fits[kind]


def prior_of(kind: str, shape: ModelShape | None, tensor_parallel: int = 1) -> EngineModel:
    """Return the prior of an engine on `tensor_parallel` devices of a kind.

    A model of unknown shape is assumed to have size 0 and to run on a CPU core.
    """
    own = LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, 0.0, 0.0)
    if shape is None:
        return own
    devices = load_devices()
    sheet = Roofline(shape, devices.get(kind, devices[SLOWEST]), tensor_parallel)
    if kind != CPU_KIND:
        return sheet
    line = LinearEngine.of(sheet)
    return replace(line, fixed_s=line.fixed_s + own.fixed_s, sequence_s=line.sequence_s + own.sequence_s)
