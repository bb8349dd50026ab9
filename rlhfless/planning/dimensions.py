"""Settings of the run that a comparison varies for each choice of devices and placement. Pure.

Each is a key of the run's spec, so each row is a run that can be started; other keys are as in the spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfless.planning.resolve import why_not
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec
from rlhfless.spec.algorithm import PolicyLossSpec
from rlhfless.spec.base import SpecModel
from rlhfless.spec.generation import Quantization

QUANTIZATION, SHARE_PREFIXES = "generation.quantization", "learner.share_prefixes"
SPECULATION = "generation.speculation"

Drafter = Literal["off", "auto", "ngram", "suffix"]
"""Methods whose drafts need no weights of their own."""


class Dimensions(SpecModel):
    """What is tried on each choice of devices and placement."""

    quantization: Annotated[tuple[Quantization, ...], Field(max_length=3)] = ()
    """Values of `generation.quantization`."""

    speculation: Annotated[tuple[Drafter, ...], Field(max_length=4)] = ()
    """Values of `generation.speculation.method`. Drafts are those of the run of `lengths_of`."""

    share_prefixes: Annotated[tuple[bool, ...], Field(max_length=2)] = ()
    """Values of `learner.share_prefixes`."""

    def ways(self, spec: RunSpec) -> list[dict[str, Any]]:
        """Return the changes of the spec by dotted key, for every combination of the values."""
        own_drafts = spec.generation.speculation.method
        settings = (
            [{QUANTIZATION: each} for each in dict.fromkeys(self.quantization)],
            [{SPECULATION: {"method": each}} if each != own_drafts else {} for each in dict.fromkeys(self.speculation)],
            [{SHARE_PREFIXES: each} for each in dict.fromkeys(self.share_prefixes)],
        )
        every: Iterator[tuple[dict[str, Any], ...]] = product(*(values or [{}] for values in settings))
        return [{key: value for each in way for key, value in each.items()} for way in every]


def like(spec: RunSpec, other: RunSpec) -> bool:
    """Return whether latencies measured on one run apply to the other."""
    ours, theirs = ((each.generation.speculation, each.generation.quantization) for each in (spec, other))
    return ours == theirs and spec.learner.share_prefixes == other.learner.share_prefixes


def undrafted(spec: RunSpec, accepted: tuple[float, ...]) -> str | None:
    """Return the reason that a run with speculation cannot be predicted, or None if it can."""
    method = spec.generation.speculation.method
    if method == "off" or accepted:
        return None
    return f"drafts of {method} are not known: name a run that speculated with it by lengths_of"


def quantization_problem(spec: RunSpec, changes: Mapping[str, Any], kind: str) -> str | None:
    """Return the reason that a run cannot generate in the format in `changes` on a kind of device, or None."""
    quantization = changes.get(QUANTIZATION)
    if quantization is not None and spec.supervised:
        return f"a run of type {spec.type} generates nothing"
    if quantization in (None, "off"):
        return None
    if quantization == "fp8" and kind != CPU_KIND and device_of(kind).fp8_flops_per_s is None:
        return f"{QUANTIZATION} is fp8: {kind} has no products of 8 bit floats"
    loss = spec.algorithm
    if isinstance(loss, PolicyLossSpec) and loss.importance is None:
        quantised = f"samples with {QUANTIZATION} {quantization} are off policy"
        return f"{quantised}: leave algorithm.importance out for its default, truncated weights"
    return None


def no_engine(spec: RunSpec, quantization: Quantization, kind: str, shape: ModelShape | None = None) -> str | None:
    """Return the reason that no run can be started on a kind of device, although it can be planned for, or None."""
    if (reason := device_of(kind).no_engine) is not None or spec.supervised or quantization == "off":
        return reason
    # If the spec leaves it open, the devices determine it, and GPUs get 16 bits.
    dtype = spec.model.dtype if "dtype" in spec.model.model_fields_set else "bfloat16"
    refused = why_not(kind, dtype, shape)
    return None if refused is None else f"{QUANTIZATION} is {quantization}: {refused[0]}"
