"""What a comparison tries on each choice of devices and placement: engines, and settings of the run. Pure.

Each is a key of the run's spec, so that a row is a run that can be started; engines that only publish their speed are
not. What is not named is as in the spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfless.planning.engine_choice import AS_IN_RUNS, Rollouts
from rlhfless.scaling.latency.engines import EngineName
from rlhfless.spec import RunSpec
from rlhfless.spec.base import SpecModel
from rlhfless.spec.generation import Quantization

QUANTIZATION, SHARE_PREFIXES = "generation.quantization", "learner.share_prefixes"
SPECULATION = "generation.speculation"

Drafter = Literal["off", "auto", "ngram", "suffix"]
"""Methods whose drafts need no weights of their own."""


class Dimensions(SpecModel):
    """What is tried on each choice of devices and placement."""

    engines: Annotated[tuple[EngineName, ...], Field(max_length=3)] = ()
    """Engines, each as its published serving runs have it; by default vLLM by the devices' data sheets."""

    quantization: Annotated[tuple[Quantization, ...], Field(max_length=3)] = ()
    """Values of `generation.quantization`."""

    speculation: Annotated[tuple[Drafter, ...], Field(max_length=4)] = ()
    """Values of `generation.speculation.method`. Drafts are those of the run of `lengths_of`."""

    share_prefixes: Annotated[tuple[bool, ...], Field(max_length=2)] = ()
    """Values of `learner.share_prefixes`."""

    def ways(self, spec: RunSpec) -> list[Way]:
        """Each of one with each of the others, once."""
        own_drafts = spec.generation.speculation.method
        settings = (
            [{QUANTIZATION: each} for each in dict.fromkeys(self.quantization)],
            [{SPECULATION: {"method": each}} if each != own_drafts else {} for each in dict.fromkeys(self.speculation)],
            [{SHARE_PREFIXES: each} for each in dict.fromkeys(self.share_prefixes)],
        )
        return list(_ways(list(dict.fromkeys(self.engines)), *settings))


@dataclass(frozen=True, slots=True)
class Way:
    """One engine with one value of each setting."""

    rollouts: Rollouts = AS_IN_RUNS
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of the spec, by dotted key."""


def _ways(engines: list[EngineName], *settings: list[dict[str, Any]]) -> Iterator[Way]:
    named: list[EngineName | None] = [*engines] or [None]
    for engine, each in product(named, product(*(one or [{}] for one in settings))):
        changes = {key: value for one in each for key, value in one.items()}
        yield Way(Rollouts(engine, changes.get(QUANTIZATION)), changes)


def like(spec: RunSpec, other: RunSpec) -> bool:
    """Whether latencies that were measured of one run are those of the other."""
    drafts = spec.generation.speculation == other.generation.speculation
    return drafts and spec.learner.share_prefixes == other.learner.share_prefixes


def undrafted(spec: RunSpec, accepted: tuple[float, ...]) -> str | None:
    """Why a run that is to speculate is not predicted beside one that does not; None if it can be."""
    method = spec.generation.speculation.method
    if method == "off" or accepted:
        return None
    return f"drafts of {method} are not known: name a run that speculated with it by lengths_of"
