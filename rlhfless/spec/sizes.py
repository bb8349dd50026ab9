"""Bounds on the size of a run, which is computed from the spec before anything is allocated.

Before its first sample, a driver needs at most `driver_bytes` in addition to its program and the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlhfless.spec.base import MOST_STEPS, SpecModel
from rlhfless.spec.errors import Problem

SAMPLE_BYTES = 2048
"""Most memory that the driver needs for a sample before it is drawn: its item, its entries in tables, its part of the
request to an actor."""

ROW_BYTES = 4096
"""Most memory for a row of the data, in addition to its content."""

DATA_FACTOR = 64
"""Most memory for a byte of the data: a token takes up to 44 bytes, an empty list in JSON 22 per character."""


class SizesSpec(SpecModel):
    """Bounds on the size of a run, so that a number with a digit too many is refused and does not fill the driver's
    memory. Raise one where a run is meant to be larger; a service may have lower ones, which a spec cannot raise."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100_000
    """Bounds `steps`: each keeps its metrics, some 2 KiB."""

    step_samples: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 16
    """Samples of a step: `prompts_per_step` x `samples_per_prompt`, at 2 KiB each in the driver before they are
    drawn."""

    held_out_samples: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 16
    """Samples of an evaluation: `prompts.held_out.max_prompts` x `evaluation.samples_per_prompt`."""

    step_tokens: Annotated[int, Field(ge=1, le=1 << 32)] = 1 << 28
    """Response tokens of a step or an evaluation: its samples x `generation.max_tokens`, some 40 bytes each in the
    driver once they are drawn."""

    prompts: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000_000
    """Rows of each data set, at 4 KiB each, and what they contain."""

    data_mib: Annotated[int, Field(ge=1, le=1 << 16)] = 256
    """Size of each data set as JSONL, or uncompressed, in MiB. In memory a byte takes 5 to 15, at most 64."""

    def at_most(self, bounds: SizesSpec) -> SizesSpec:
        """The lower of both, key by key."""
        return SizesSpec(**{name: min(value, getattr(bounds, name)) for name, value in self})


MOST_SIZES = SizesSpec.model_construct(
    **{name: field.metadata[-1].le for name, field in SizesSpec.model_fields.items()}
)
"""The largest bounds that a spec may have."""


@dataclass(frozen=True, slots=True)
class Size:
    """One figure of a spec, and the key that bounds it."""

    bound: str
    """Key of SizesSpec."""
    where: str
    """The field to lower."""
    figure: int
    text: str
    """How the figure is computed."""


def size_problems(sizes: Iterable[Size], bounds: SizesSpec, owner: str = "") -> list[Problem]:
    """Figures above the bounds, which `owner` has set; by default the spec itself."""
    return [
        Problem(size.where, *too_large(size.text, size.figure, size.bound, bounds, owner))
        for size in sizes
        if size.figure > getattr(bounds, size.bound)
    ]


def too_large(text: str, figure: int, bound: str, bounds: SizesSpec, owner: str = "") -> tuple[str, str]:
    """What is wrong with a figure above a bound, and the hint."""
    most, ceiling = getattr(bounds, bound), getattr(MOST_SIZES, bound)
    made = f"{text} is {figure:,}" if not text.endswith(str(figure)) else text
    if owner:
        return f"{made}, and {owner} allows at most {most:,}", "ask for less"
    raised = f", or raise sizes.{bound}" if figure <= ceiling else ""
    return f"{made}, above sizes.{bound} ({most:,})", f"ask for less{raised}; it can be {ceiling:,} at most"


def driver_bytes(samples: int, bounds: SizesSpec) -> int:
    """Most memory that a driver needs before its first sample: for `samples` of a step or an evaluation, and for the
    largest data that the bounds allow for training and evaluation."""
    data = bounds.prompts * ROW_BYTES + bounds.data_mib * DATA_FACTOR * 2**20
    return samples * SAMPLE_BYTES + 2 * data
