"""Schedule settings: how generation and training steps are ordered.

The *staleness* of a sample is the number of versions the learner has published since the version that generated it,
counted when the learner takes the sample. It is 0 if the sample was generated with the newest weights and is learned
before the next version.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import PluginField, PluginSpec

MOST_STALENESS = 16
"""A version occupies memory in the store until no step generates with it, and no published run goes beyond 8."""


class SyncSpec(SpecModel):
    """One step at a time: each step generates with the weights published by the previous step."""

    type: Literal["sync"] = "sync"

    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0
    """Maximum steps that are generated while an earlier step is not yet learned."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a sample, in versions."""
        return 0


class PartialSpec(SpecModel):
    """One step at a time, with partial rollouts: a step stops generating when `prompts_per_step` groups are complete,
    and learns from these. Unfinished groups keep their tokens and continue in the next step with its weights. Each step
    learns from the same number of groups, and every started group is learned before the run ends; groups with long
    responses are learned a few steps after they were started."""

    type: Literal["partial"] = "partial"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0

    ahead: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Additional groups in progress, as a fraction of `prompts_per_step`. This many groups are unfinished when a step
    stops generating. The first step starts them; the last steps start fewer."""

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Maximum staleness of a token, in versions. A step waits for groups that were started this many steps ago."""


class OneStepOffSpec(SpecModel):
    """Short for `async` with `max_staleness: 1` and `in_flight: false`: while the learner trains on a step, the next
    one is generated with the weights from before that step. All steps except the first learn from samples that are one
    version old."""

    type: Literal["one_step_off"] = "one_step_off"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 1

    @property
    def max_staleness(self) -> int:
        """See SyncSpec."""
        return 1


class AsyncSpec(SpecModel):
    """Generate several steps at once, ahead of the learner, which processes them in order. No sample is dropped: a step
    starts only if it cannot exceed `max_staleness`."""

    type: Literal["async"] = "async"

    max_staleness: Annotated[int, Field(ge=1, le=MOST_STALENESS)] = 2
    """Maximum staleness of a sample, in versions. This many steps are generated ahead of the learner."""

    in_flight: bool = True
    """`true`: actors load each version as soon as it is published, during generation. Samples keep their tokens, their
    KV cache is recomputed, and they continue with the new weights. `false`: engines load weights only between rollouts,
    so that each sample comes from a single version; rollouts of later steps wait for the oldest."""

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


IN_TURN = frozenset({"sync", "partial"})
"""Types without overlap: a step is generated, then learned."""


class OwnScheduleSpec(PluginSpec):
    """Base class for the settings of your own schedule; see docs/extending.md."""

    in_flight: ClassVar[bool] = False
    """See AsyncSpec."""

    @property
    def max_staleness(self) -> int:
        """Maximum staleness of a sample, in versions; the learner keeps old versions for late actors accordingly.
        Override it if your schedule generates more than one step ahead, or none."""
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
