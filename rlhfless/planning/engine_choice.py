"""What draws the responses of a planned run: an engine, and the format of its weights. Pure.

Runs draw with vLLM, and plans take its times from the devices' data sheets. A comparison may try other engines, as
their published serving runs have them, which can be planned for and not run; and weights in fp8, which is
`generation.quantization` of the run that it plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.engines import EngineName, load_engines, served
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.quantization import why_not
from rlhfless.spec import RunSpec
from rlhfless.spec.generation import Quantization
from rlhfless.spec.losses import PolicyLossSpec


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What draws the responses."""

    engine: EngineName | None = None
    """An engine as its published runs have it; None for vLLM by the devices' data sheets, as plans have it that compare
    no engines."""
    quantization: Quantization | None = None
    """`generation.quantization`: of weights and products; the KV cache keeps 16 bits. None: as the spec says."""
    measured: float = 1.0
    """The user's own measurement of the engine, as a multiple of what its published runs say."""

    def quantization_of(self, spec: RunSpec) -> Quantization:
        """That of the run which draws so."""
        return spec.generation.quantization if self.quantization is None else self.quantization

    def as_in_runs(self, spec: RunSpec) -> bool:
        """Whether runs of a spec draw so, whose measured latencies then count."""
        return self.engine in (None, "vllm") and self.quantization_of(spec) == spec.generation.quantization

    def settings(self, spec: RunSpec, kind: str) -> dict[str, Any]:
        """Keys of a scenario's engine. Of products of integers, and of CPUs, no rate in 8 bits is known, so that of 16
        counts."""
        latency = {"type": "engine", "engine": self.engine, "measured": self.measured}
        quantization = self.quantization_of(spec)
        fast = quantization == "fp8" and device_of(kind).fp8_flops_per_s is not None
        return {
            "latency": latency if self.engine else {"type": "roofline"},
            "weight_bits": 16 if quantization == "off" else 8,
            "product_bits": 8 if fast else 16,
        }

    def source(self, spec: RunSpec, shape: ModelShape, kind: str) -> str:
        """What the engine's seconds are taken from, in words. Raises UnknownShape."""
        if self.engine is None:
            return f"the data sheet of {kind}"
        bits = 16 if self.quantization_of(spec) == "off" else 8
        tensor_parallel = spec.generation.engine.devices_per_actor
        published = served(self.engine, shape.in_bits(bits), device_of(kind), tensor_parallel).source
        return published + ("" if self.measured == 1.0 else f", times {self.measured:.2f} by a measurement of your own")

    def problem(self, spec: RunSpec, kind: str) -> str | None:
        """Why a run cannot draw so on a kind of device."""
        if spec.supervised and self != AS_IN_RUNS:
            return f"a run of type {spec.type} draws nothing"
        if self.quantization in (None, "off"):
            return None
        if self.quantization == "fp8" and kind != CPU_KIND and device_of(kind).fp8_flops_per_s is None:
            return f"generation.quantization is fp8: {kind} has no products of 8 bit floats"
        loss = spec.algorithm
        if isinstance(loss, PolicyLossSpec) and loss.importance is None:
            quantised = f"samples with generation.quantization {self.quantization} are off policy"
            return f"{quantised}: leave algorithm.importance out for its default, truncated weights"
        return None

    def no_engine(self, spec: RunSpec, kind: str, shape: ModelShape | None = None) -> str | None:
        """Why no run can be started so, although one can be planned; None if one can."""
        engine = None if self.engine is None else load_engines()[self.engine].no_engine
        if (reason := device_of(kind).no_engine or engine) is not None or spec.supervised:
            return reason
        quantization = self.quantization_of(spec)
        # Where the spec leaves it open, the devices decide, and GPUs get 16 bits.
        dtype = spec.model.dtype if "dtype" in spec.model.model_fields_set else "bfloat16"
        refused = None if quantization == "off" else why_not(quantization, kind, dtype, shape)
        return None if refused is None else f"generation.quantization is {quantization}: {refused[0]}"


AS_IN_RUNS = Rollouts()
