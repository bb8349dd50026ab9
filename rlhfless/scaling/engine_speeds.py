"""The speeds of the run's own engines, learned from its ledger while it runs: one fit per kind of device.

A fit starts with a prior: the device's data sheet, and the engine's own overhead. It decides one step, and terms that
the run's batches cannot tell apart. On a CPU core the engine's scheduler and sampler share the core with the model, and
with a small model they take nearly all the time: `OVERHEAD_S` and `SEQUENCE_S`. A prior without them would predict so
short a step that one actor suffices. An unknown accelerator is assumed to be the slowest of the table and not a CPU
core, because a prior that is a thousand times too slow starts every actor.
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
"""A resumed run learns from this many steps of its trace: the fit would give older steps a weight below 1 %."""

OVERHEAD_S = 0.009
"""Seconds of an iteration of vLLM's CPU engine without the model: 6 to 12 ms on one core of a server, with a model of
0.5 million parameters, whose own time is negligible (fits to the ledger of the bundled demo, 2026-11)."""

SEQUENCE_S = 1.8e-4
"""Seconds of each sequence in it without the model: by the same fits 0.2 ms, including 0.02 ms of the model."""

SLOWEST = "l4"
"""The slowest accelerator of the table of devices."""


class EngineSpeeds:
    """A latency model for each kind of device; before its first step a kind has the model of the prior."""

    def __init__(self, shape: ModelShape | None, tensor_parallel: int, max_sequences: int) -> None:
        self._shape = shape
        self._tensor_parallel = tensor_parallel
        self._max_sequences = max_sequences
        self._fits: dict[str, LatencyFit] = {}

    def model(self, kind: str) -> BentEngine:
        """The best known model of the engines on a kind of device."""
        return self._fit(kind).model()

    def learn(
        self, invocations: Iterable[Invocation], rollouts: Iterable[TracedRollout], kinds: Mapping[str, str]
    ) -> None:
        """Learns from a step of the ledger. `kinds`: the device kind of each actor, by name, those that compute prompts
        for others included; what other actors did is ignored."""
        calls, rows = list(invocations), list(rollouts)
        for kind in sorted(set(kinds.values())):
            generated = [row for row in rows if kinds.get(row.actor) == kind]
            of_kind = [call for call in calls if kinds.get(call.replica) == kind]
            if generated or prompt_calls(of_kind):
                self._fit(kind).observe_step(of_kind, generated, self._max_sequences)

    def learn_trace(self, trace: Trace) -> None:
        """Learns from the trace of an earlier attempt."""
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
    """The prior of an engine on `tensor_parallel` devices of a kind. A model of unknown shape is assumed to have
    no size, in an engine on a CPU core."""
    own = LinearEngine(OVERHEAD_S, SEQUENCE_S, 0.0, 0.0, 0.0)
    if shape is None:
        return own
    devices = load_devices()
    sheet = Roofline(shape, devices.get(kind, devices[SLOWEST]), tensor_parallel)
    if kind != CPU_KIND:
        return sheet
    line = LinearEngine.of(sheet)
    return replace(line, fixed_s=line.fixed_s + own.fixed_s, sequence_s=line.sequence_s + own.sequence_s)
