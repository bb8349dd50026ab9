"""The settings of schedules: the order in which steps draw and learn.

The *staleness* of a sample is the number of versions that the learner has published since the version which drew it,
counted when the learner takes the sample: 0 if it is drawn with the newest weights and learned from before others come.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import PluginField, PluginSpec

MOST_STALENESS = 16
"""A version takes the store's memory until no step draws with it, and nobody has reported runs beyond 8."""


class SyncSpec(SpecModel):
    """One step after the other: each step draws with the weights that the previous step published."""

    type: Literal["sync"] = "sync"

    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0
    """Most steps that are drawn while an earlier one is still to be learned from."""

    @property
    def max_staleness(self) -> int:
        """Most versions that the weights of a sample may be behind."""
        return 0


class PartialSpec(SpecModel):
    """One step after the other; each ends its generation when `prompts_per_step` groups are complete, and learns from
    these. The unfinished groups keep their tokens, and are continued in the next step with its weights. All groups that
    are begun are learned from, before the run ends, and each step learns from as many groups as ever: what changes is
    that groups of long responses are learned from some steps after they were begun."""

    type: Literal["partial"] = "partial"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0

    ahead: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Groups under way beyond those that a step learns from, as a share of `prompts_per_step`: so many are unfinished
    when a step ends its generation. The first step begins them, the last ones begin fewer."""

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Most versions that the weights of a token may be behind: a group that was begun so many steps ago is waited
    for."""


class OneStepOffSpec(SpecModel):
    """Short for `async` with `max_staleness: 1` and `in_flight: false`: while the learner learns a step, the next one
    is generated, with the weights from before that step. Each step but the first learns from samples that are one
    version old."""

    type: Literal["one_step_off"] = "one_step_off"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 1

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
    """Actors load each version as soon as it is published, while they generate: samples keep their tokens, their KV is
    computed again, and they continue with the new weights. Without it, engines generate with one version at a time and
    load between rollouts, so that each sample is of one version; and rollouts of later steps wait for the oldest."""

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


IN_TURN = frozenset({"sync", "partial"})
"""Types that generate a step, and then learn it: nothing overlaps."""


class OwnScheduleSpec(PluginSpec):
    """Base of the settings of a schedule of your own; see docs/extending.md."""

    in_flight: ClassVar[bool] = False
    """See AsyncSpec."""

    @property
    def max_staleness(self) -> int:
        """Most versions that the weights of a sample may be behind, which the learner keeps for actors that come late.
        Override it if your schedule draws more than one step ahead, or none."""
        return 1

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


ScheduleSpec = Annotated[
    SyncSpec | PartialSpec | OneStepOffSpec | AsyncSpec | OwnScheduleSpec,
    PluginField(
        "schedule",
        built_in=(SyncSpec, PartialSpec, OneStepOffSpec, AsyncSpec),
        methods=("drive",),
        settings=OwnScheduleSpec,
    ),
]
