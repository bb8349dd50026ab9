"""The engines compared by plans, each modelled by its measured kernels or else by the devices' data sheets. Pure.

Both models miss a server's overhead beyond its kernels, and changes in newer versions. Each engine therefore has, by
kind of device, a scale and a constant that `benchmarks/serving.py --fit` has fitted to published serving runs:

    iteration = scale x (kernels or data sheet) + fixed_s

`engines.yaml` lists the versions, dates and sources of these runs, and the error of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import Field

from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.latency.aiconfigurator import MeasuredKernels
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.kernel_tables import NoTables, tables_folder
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec.base import SpecModel

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]

ANY_KIND = "any"
"""Key of the fit for device kinds without their own fit."""

PREFILL_TOKENS = 8192
"""Prompt tokens that a server prefills together."""

Basis = Literal["kernels", "roofline"]


class ServingFit(SpecModel):
    """Converts a model's seconds on a kind of device into those of the engine."""

    kind: str
    """A device kind, or ANY_KIND."""
    by: Basis
    scale: Annotated[float, Field(gt=0)]
    fixed_s: Annotated[float, Field(ge=0)]
    """Additional seconds per iteration."""
    rows: Annotated[int, Field(ge=1)]
    """Number of published runs in the fit."""
    error: Annotated[float, Field(ge=0)]
    """Median relative error of these runs' seconds per token."""


class ServingEngine(SpecModel):
    """An engine, and the fits to its published runs."""

    name: EngineName
    versions: Annotated[str, Field(min_length=1)]
    """Versions of the published runs."""
    as_of: date
    """Date of the last measurement."""
    source: Annotated[str, Field(min_length=1)]
    no_engine: str | None = None
    """Reason that no run can be started with it, although it can be planned for."""
    fits: tuple[ServingFit, ...]

    def fit(self, kind: str, by: Basis) -> ServingFit:
        """Return the fit of a kind of device, or of all kinds if it has no published runs."""
        known = {each.kind: each for each in self.fits if each.by == by}
        return known.get(kind, known[ANY_KIND])


@dataclass(frozen=True, slots=True)
class Served:
    """An `EngineModel` scaled to an engine's published runs."""

    model: EngineModel
    scale: float
    fixed_s: float
    source: str
    """The tables or data sheet, and the published runs."""

    @property
    def context_s(self) -> float:
        return self.scale * self.model.context_s

    def iteration_s(self, sequences: int) -> float:
        return self.scale * self.model.iteration_s(sequences) + self.fixed_s

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.scale * self.model.prefill_s(tokens, context_tokens)

    def times(self, factor: float) -> Served:
        """Return the engine with all times multiplied by a factor."""
        return replace(self, scale=self.scale * factor, fixed_s=self.fixed_s * factor)


def steady_token_s(model: EngineModel, in_flight: int, input_tokens: float, output_tokens: float) -> float:
    """Return the seconds per token of a server with `in_flight` requests.

    Each iteration decodes one token of every request, with contexts at their mean, and prefills its share of the next
    prompts.
    """
    contexts = in_flight * (input_tokens + output_tokens / 2)
    prompt_token_s = model.prefill_s(PREFILL_TOKENS) / PREFILL_TOKENS
    return decode_s(model, in_flight, contexts, 1) + prompt_token_s * in_flight * input_tokens / output_tokens


class _EngineTable(SpecModel):
    engines: tuple[ServingEngine, ...]


@cache
def load_engines() -> dict[EngineName, ServingEngine]:
    text = files(__package__).joinpath("engines.yaml").read_text("utf-8")
    return {engine.name: engine for engine in _EngineTable.model_validate(yaml.safe_load(text)).engines}


def kernels_or_sheet(
    name: EngineName, shape: ModelShape, sheet: DeviceSheet, tensor_parallel: int, data_parallel: int
) -> tuple[EngineModel, Basis]:
    """Return the model of an engine's measured kernels, if installed, else of the data sheet. Raises UnknownShape."""
    try:
        devices = (tensor_parallel, data_parallel)
        return MeasuredKernels.of(shape, sheet.kind, devices, tables_folder(), name), "kernels"
    except NoTables:
        return Roofline(shape, sheet, tensor_parallel, data_parallel), "roofline"


def served(
    name: EngineName, shape: ModelShape, sheet: DeviceSheet, tensor_parallel: int = 1, data_parallel: int = 1
) -> Served:
    """Return the engine's model, scaled to its published runs. Raises UnknownShape."""
    model, by = kernels_or_sheet(name, shape, sheet, tensor_parallel, data_parallel)
    engine = load_engines()[name]
    fit = engine.fit(sheet.kind, by)
    what = "its kernel tables" if by == "kernels" else "the data sheet"
    where = "other devices" if fit.kind == ANY_KIND else sheet.kind
    source = (
        f"{what}, scaled to {fit.rows} published runs on {where} ({engine.versions}, until {engine.as_of}; "
        f"median error {fit.error:.0%})"
    )
    return Served(model, fit.scale, fit.fixed_s, source)
