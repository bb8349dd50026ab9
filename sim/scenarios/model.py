"""The model of a scenario and the engine that runs it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.roofline import RUNTIME_S
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec.base import SpecModel
from rlhfless.spec.explain import nearest


class ScenarioModelSpec(SpecModel):
    """The model, by name or by the values of its `config.json`. Give either."""

    name: str | None = None
    """Name of a built-in model, such as `qwen2.5-7b`."""

    config: dict[str, Any] | None = None
    """Values of the `config.json` of a decoder-only transformer, for a model that is not built in."""

    @model_validator(mode="after")
    def _known(self) -> ScenarioModelSpec:
        if (self.name is None) == (self.config is None):
            raise ValueError(f"give `name` ({', '.join(BUILT_IN)}) or `config`, one of the two")
        if self.name is not None and self.name not in BUILT_IN:
            raise ValueError(
                f"name is {self.name!r}; {nearest(self.name, BUILT_IN)}Built in are {', '.join(BUILT_IN)}; "
                "give others by `config`"
            )
        try:
            self.shape  # noqa: B018 (checks it)
        except UnknownShape as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of_config(self.config if self.config is not None else BUILT_IN[str(self.name)])


class RooflineLatency(SpecModel):
    """Latency from the devices' data sheets."""

    type: Literal["roofline"] = "roofline"


class KernelsLatency(SpecModel):
    """Latency from the measured kernel tables of aiconfigurator-core, which must be installed."""

    type: Literal["kernels"] = "kernels"


class FittedLatency(SpecModel):
    """Latency from a file written by `rlhfless simulate --calibrate`."""

    type: Literal["fitted"] = "fitted"

    path: str
    """Path of the file."""


LatencySpec = Annotated[RooflineLatency | KernelsLatency | FittedLatency, Field(discriminator="type")]


Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioSpeculationSpec(SpecModel):
    """Speculative decoding, from measured acceptance."""

    accepted: Annotated[tuple[Share, ...], Field(min_length=1)]
    """For each draft position: mean number of accepted drafts per sequence and pass. A draft is accepted only if all
    drafts before it are."""

    drafted: tuple[Share, ...] | None = None
    """For each draft position: mean number of drafts per sequence and pass. `null`: 1."""

    depth: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of draft positions. `auto`: the number that saves the most time at the current batch size."""

    draft_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to draft one position for all sequences of a pass."""

    standing_s: Annotated[float, Field(ge=0)] = 0.0
    """Overhead in seconds that speculation adds to each pass, even without drafts."""

    source: Annotated[str, Field(min_length=1)]
    """Source of the figures."""

    @model_validator(mode="after")
    def _as_many_places(self) -> ScenarioSpeculationSpec:
        places = len(self.accepted)
        if self.depth != "auto" and self.depth > places:
            raise ValueError(f"depth is {self.depth}, and accepted has {places} places; name one for each draft")
        if self.drafted is not None and len(self.drafted) != places:
            raise ValueError(f"drafted has {len(self.drafted)} places, and accepted {places}; give as many of both")
        return self


class ScenarioEngineSpec(SpecModel):
    """The engine of one generation actor."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices per rank."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks per actor. They divide its sequences, and the experts of a mixture-of-experts model are spread over all its
    devices."""

    max_sequences: Annotated[int, Field(ge=1)] = 256
    """Maximum sequences that run at once (vLLM's default for large devices is 256 or more)."""

    max_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Maximum tokens per iteration, prefill and decode combined. Must be at least `max_sequences`."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of a device's memory that the engine may use."""

    reserved_gb: Annotated[float, Field(ge=0)] | None = None
    """Part of the engine's memory, in GB, that is not available for weights and KV cache: activations, logits, CUDA
    graphs, CUDA and NCCL. `null`: as the memory plan of a run counts them, 2 to 4 GB."""

    block_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens per KV cache block."""

    weight_bits: Literal[4, 8, 16] = 16
    """Bits per weight in the engine, in memory and when read. Weights are always transferred in the learner's
    format."""

    product_bits: Literal[4, 8, 16] = 16
    """Bits of matrix products; 8 and 4 use the device's fp8 and fp4 rates. A quantized model defines its own."""

    kv_bits: Literal[8, 16] = 16
    """Bits per number in the KV cache."""

    runtime_s: Annotated[float, Field(ge=0)] = RUNTIME_S
    """Overhead in seconds of every iteration that no kernel accounts for. Added to `roofline` and `kernels`; a fit
    already includes it."""

    step_s: Annotated[float, Field(ge=0)] = 0.0
    """Overhead in seconds before the generation of each step, after the new weights: calls, wakes and copies of a
    framework. In published runs with steps of seconds (verl, OpenRL), 15 to 25 s are not explained by anything else in
    the model."""

    latency: LatencySpec = RooflineLatency()
    """Latency model. With `speculation`, it applies to passes without drafts."""

    speculation: ScenarioSpeculationSpec | None = None
    """Speculative decoding. A fit to a run with speculation already includes it. `null`: none."""

    @property
    def devices(self) -> int:
        """Devices per actor."""
        return self.tensor_parallel * self.data_parallel

    @model_validator(mode="after")
    def _everyone_decodes(self) -> ScenarioEngineSpec:
        if self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_sequences ({self.max_sequences}): with all "
                "of them decoding no prompt would ever be prefilled; raise it"
            )
        return self
