"""The settings of schedules: the order in which steps draw and learn.

The *staleness* of a sample is the number of versions that the learner has published since the version which drew it,
counted when the learner takes the sample: 0 if it is drawn with the newest weights and learned from before others come.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import OwnSpec, Seam

MOST_STALENESS = 16
"""A version takes the store's memory until no step draws with it, and nobody has reported runs beyond 8."""


class SyncSpec(SpecModel):
    """One step after the other: each step draws with the weights that the previous step published."""

    type: Literal["sync"] = "sync"
    in_flight: ClassVar[bool] = False

    @property
    def max_staleness(self) -> int:
        """Most versions that the weights of a sample may be behind."""
        return 0


class OneStepOffSpec(SpecModel):
    """While the learner learns a step, the next one is drawn, with the weights from before that step: each step but the
    first learns from samples that are one version old. Weights are loaded between two steps."""

    type: Literal["one_step_off"] = "one_step_off"
    in_flight: ClassVar[bool] = False

    @property
    def max_staleness(self) -> int:
        """See SyncSpec."""
        return 1


class AsyncSpec(SpecModel):
    """Several steps are drawn at once, ahead of the learner, which takes them in their order. No sample is dropped: a
    step is only begun when it cannot become too old."""

    type: Literal["async"] = "async"

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Most versions that the weights of a sample may be behind: so many steps are drawn ahead of the learner."""

    in_flight: bool = True
    """Actors load each version as soon as it is published, while they draw: samples keep their tokens, their KV is
    computed again, and they go on with the new weights. Without it, engines draw with one version at a time and load
    between two draws, so that each sample is of one version."""


class OwnScheduleSpec(OwnSpec):
    """Base of the settings of a schedule of your own; see docs/extending.md."""

    in_flight: ClassVar[bool] = False
    """See AsyncSpec."""

    @property
    def max_staleness(self) -> int:
        """Most versions that the weights of a sample may be behind, which the learner keeps for actors that come late.
        Override it if your schedule draws more than one step ahead, or none."""
        return 1


ScheduleSpec = Annotated[
    SyncSpec | OneStepOffSpec | AsyncSpec | OwnScheduleSpec,
    Seam(
        "schedule",
        built_in=(SyncSpec, OneStepOffSpec, AsyncSpec),
        methods=("drive",),
        settings=OwnScheduleSpec,
    ),
]
