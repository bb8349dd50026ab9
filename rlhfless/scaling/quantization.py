"""Support of devices for engines in fp8. Pure."""

from __future__ import annotations

from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import DType, RunSpec
from rlhfless.spec.errors import Problem


def why_not(kind: str, dtype: DType, shape: ModelShape | None) -> tuple[str, str] | None:
    """Return the reason that vLLM cannot generate in fp8 on devices of a kind, and a hint; None if it can.

    `shape` is None for a model of unknown size.
    """
    if shape is not None and shape.experts:
        return (
            "the model has experts, and neither what an engine has of experts in 8 bits nor what it computes with them "
            "could be checked after a load",
            "set it to off",
        )
    if kind == CPU_KIND:
        return None
    if dtype == "float32":
        return f"model.dtype is float32, and the kernels of {kind} for 8 bits give 16", "set model.dtype to bfloat16"
    sheet = load_devices().get(kind)
    if sheet is not None and sheet.fp8_flops_per_s is None:
        return f"{kind} has no products of 8 bit floats", "set it to off"
    return None


def quantization_problems(spec: RunSpec, kind: str, shape: ModelShape | None) -> list[Problem]:
    """Return the reasons that a run cannot generate in its format on devices of a kind."""
    quantization = spec.generation.quantization
    if spec.supervised or quantization == "off":
        return []
    refused = why_not(kind, spec.model.dtype, shape)
    return (
        [] if refused is None else [Problem("generation.quantization", f"{quantization}, but {refused[0]}", refused[1])]
    )
