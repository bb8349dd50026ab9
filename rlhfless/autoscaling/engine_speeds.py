"""How fast the run's own engines are, learned from its ledger while it runs: one fit per kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlhfless.records import Invocation
from rlhfless.records.traces import Trace, TracedRollout
from rlhfless.scaling.latency.fitted import BentEngine, LatencyFit
from rlhfless.scaling.latency.prior import prior_of
from rlhfless.scaling.latency.shape import ModelShape

STEPS_REPLAYED = 20
"""A resumed run learns from this many steps of its trace: the fit would give older steps a weight below 1 %."""


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
        """Learns from a step of the ledger. `kinds`: the device kind of each actor, by name; rollouts of other
        actors are ignored."""
        calls, rows = list(invocations), list(rollouts)
        for kind in sorted(set(kinds.values())):
            mine = [row for row in rows if kinds.get(row.actor) == kind]
            if mine:
                self._fit(kind).observe_step(calls, mine, self._max_sequences)

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
