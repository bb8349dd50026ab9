"""The model of a scenario, and the engine that runs it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.engines import EngineName
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.roofline import RUNTIME_S
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec.base import SpecModel
from rlhfless.spec.explain import nearest


class ScenarioModelSpec(SpecModel):
    """A model by name, or by the values of its `config.json`."""

    name: str | None = None
    """Name of a built-in model, such as `qwen2.5-7b`."""

    config: dict[str, Any] | None = None
    """Values of a `config.json` of a decoder-only transformer, for a model that is not built in."""

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
    """Latency by the devices' data sheets."""

    type: Literal["roofline"] = "roofline"


class KernelsLatency(SpecModel):
    """Latency by the measured kernel tables of aiconfigurator-core, which must be installed."""

    type: Literal["kernels"] = "kernels"


class EngineLatency(SpecModel):
    """Latency of an engine as its published serving runs have it: by its kernel tables where aiconfigurator-core is
    installed and has them, else by the devices' data sheets."""

    type: Literal["engine"] = "engine"

    engine: EngineName
    """The engine."""

    measured: Annotated[float, Field(gt=0)] = 1.0
    """Seconds of a measurement of your own, as a multiple of those."""


class FittedLatency(SpecModel):
    """Latency by a file that `rlhfless simulate --calibrate` wrote."""

    type: Literal["fitted"] = "fitted"

    path: str
    """The file."""


LatencySpec = Annotated[RooflineLatency | KernelsLatency | EngineLatency | FittedLatency, Field(discriminator="type")]


Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioSpeculationSpec(SpecModel):
    """Drafts of an engine, by what was measured of them."""

    accepted: Annotated[tuple[Share, ...], Field(min_length=1)]
    """At each place of a pass: the drafts that are accepted, for each sequence and pass. A draft counts only where all
    before it are accepted."""

    drafted: tuple[Share, ...] | None = None
    """At each place: the drafts there are, for each sequence and pass. Left out: one."""

    depth: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Places that are drafted; `auto`: as many as save time at the current batch size."""

    draft_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds in which the drafts of one place are found, for all sequences of a pass."""

    standing_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of each pass that the engine loses because it could speculate."""

    source: Annotated[str, Field(min_length=1)]
    """Where the figures are from."""

    @model_validator(mode="after")
    def _as_many_places(self) -> ScenarioSpeculationSpec:
        places = len(self.accepted)
        if self.depth != "auto" and self.depth > places:
            raise ValueError(f"depth is {self.depth}, and accepted has {places} places; name one for each draft")
        if self.drafted is not None and len(self.drafted) != places:
            raise ValueError(f"drafted has {len(self.drafted)} places, and accepted {places}; give as many of both")
        return self


class ScenarioEngineSpec(SpecModel):
    """One generation actor."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices of a rank."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks per actor, which divide its sequences, and spread the experts of a model over all its devices."""

    max_sequences: Annotated[int, Field(ge=1)] = 256
    """Most sequences that run at once (vLLM's default for large devices is 256 or more)."""

    max_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens of one iteration, prefill and decode together."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a device's memory that the engine may use."""

    reserved_gb: Annotated[float, Field(ge=0)] | None = None
    """Memory of the engine's share that neither weights nor KV can use: CUDA graphs, activations, NCCL (aiconfigurator
    reserves 3.5 GB and 0.4 GB). By default 3.9, at most a tenth of the memory."""

    block_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens of one KV block."""

    weight_bits: Literal[4, 8, 16] = 16
    """Bits of a weight in the engine, which is read and held so. Weights still travel as the learner has them."""

    product_bits: Literal[4, 8, 16] = 16
    """Bits of matrix products: at the rate of fp8 or fp4 of the device. A quantised model has its own."""

    kv_bits: Literal[8, 16] = 16
    """Bits of a number of the KV cache."""

    runtime_s: Annotated[float, Field(ge=0)] = RUNTIME_S
    """Seconds of every iteration that no kernel accounts for. Added to `roofline` and `kernels`; a fit has it
    already."""

    step_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before the generation of each step starts, after the new weights: calls, wakes and copies of a framework.
    Published steps of seconds (verl, OpenRL) have 15 to 25 that nothing else in the model explains."""

    latency: LatencySpec = RooflineLatency()
    """The latency model, of passes without drafts if `speculation` is given."""

    speculation: ScenarioSpeculationSpec | None = None
    """Drafts; none if left out. A fit to a run that speculated has them already."""

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
