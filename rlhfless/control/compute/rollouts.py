"""What draws the responses of a planned run: an engine, and the format of its weights. Pure.

Runs draw with vLLM in 16 bits, and plans take its times from the devices' data sheets. A comparison may try other
engines, as their published serving runs have them, and weights in fp8: both can be planned for, and not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.engines import EngineName, load_engines, served
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import RunSpec
from rlhfless.spec.losses import PolicyLossSpec

RolloutFormat = Literal["bf16", "fp8"]

FP8_PLANNED = "rollouts in fp8 can only be planned for: the engines of a run hold the learner's 16 bits"


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What draws the responses."""

    engine: EngineName | None = None
    """An engine as its published runs have it; None for vLLM by the devices' data sheets, as plans have it that compare
    no engines."""
    format: RolloutFormat = "bf16"
    """Of weights and products; the KV cache keeps 16 bits."""
    measured: float = 1.0
    """The user's own measurement of the engine, as a multiple of what its published runs say."""

    @property
    def bits(self) -> Literal[8, 16]:
        return 8 if self.format == "fp8" else 16

    @property
    def as_in_runs(self) -> bool:
        """Whether runs draw so, whose measured latencies then count."""
        return self.engine in (None, "vllm") and self.format == "bf16"

    def settings(self) -> dict[str, Any]:
        """Keys of a scenario's engine."""
        latency = {"type": "engine", "engine": self.engine, "measured": self.measured}
        return {
            "latency": latency if self.engine else {"type": "roofline"},
            "weight_bits": self.bits,
            "product_bits": self.bits,
        }

    def source(self, shape: ModelShape, kind: str, tensor_parallel: int) -> str:
        """What the engine's seconds are taken from, in words. Raises UnknownShape."""
        if self.engine is None:
            return f"the data sheet of {kind}"
        published = served(self.engine, shape.in_bits(self.bits), device_of(kind), tensor_parallel).source
        return published + ("" if self.measured == 1.0 else f", times {self.measured:.2f} by a measurement of your own")

    def problem(self, spec: RunSpec, kind: str) -> str | None:
        """Why a run cannot draw so on a kind of device."""
        if spec.supervised and self != AS_IN_RUNS:
            return f"a run of type {spec.type} draws nothing"
        if self.format == "bf16":
            return None
        if device_of(kind).fp8_flops_per_s is None:
            return f"rollouts in fp8: {kind} has no products of 8 bits"
        loss = spec.algorithm
        if isinstance(loss, PolicyLossSpec) and loss.importance is None:
            return "rollouts in fp8 are off policy: leave algorithm.importance out for its default, truncated weights"
        return None

    def no_engine(self, kind: str) -> str | None:
        """Why no run can be started so, although one can be planned; None if one can."""
        engine = None if self.engine is None else load_engines()[self.engine].no_engine
        return device_of(kind).no_engine or engine or (FP8_PLANNED if self.format == "fp8" else None)


AS_IN_RUNS = Rollouts()


def rollouts_of(engines: Sequence[EngineName], formats: Sequence[RolloutFormat]) -> list[Rollouts]:
    """Each engine with each format; vLLM by the data sheets in 16 bits if none are named."""
    return [
        Rollouts(engine, each)
        for engine in dict.fromkeys(engines or (None,))
        for each in dict.fromkeys(formats or ("bf16",))
    ]
