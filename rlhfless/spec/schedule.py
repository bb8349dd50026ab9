"""The settings of schedules: the order in which steps draw and learn.

The *staleness* of a sample is the number of versions that the learner has published since the version which drew it,
counted when the learner takes the sample: 0 if it is drawn with the newest weights and learned from before others come.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel, Steps
from rlhfless.spec.extension import OwnSpec, Seam

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


class TailBatchingSpec(SpecModel):
    """One step after the other; a short step draws more prompts than it learns from, and learns from the groups that
    are complete first. The others are abandoned, and their prompts are put off. When `prompts_per_step` of them have
    been put off, a long step draws these, oldest first, and waits for all (RollPacker, arXiv 2509.21009). No prompt is
    lost, all tokens are of the newest weights, and groups are whole; what changes is the order: steps learn from
    prompts with short responses, and now and then from those with long ones."""

    type: Literal["tail_batching"] = "tail_batching"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 0

    over_sampling: Annotated[float, Field(gt=1, le=2)] = 1.25
    """Prompts that a short step draws, as a multiple of `prompts_per_step`."""

    @property
    def max_staleness(self) -> int:
        """See SyncSpec."""
        return 0


class OneStepOffSpec(SpecModel):
    """While the learner learns a step, the next one is drawn, with the weights from before that step: each step but the
    first learns from samples that are one version old. Weights are loaded between two steps."""

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
    """Actors load each version as soon as it is published, while they draw: samples keep their tokens, their KV is
    computed again, and they go on with the new weights. Without it, engines draw with one version at a time and load
    between two draws, so that each sample is of one version."""

    @property
    def steps_ahead(self) -> int:
        """See SyncSpec."""
        return self.max_staleness


class AutoSpec(SpecModel):
    """The run measures whether an overlap pays: it takes some steps as `sync`, as many as `one_step_off`, and goes on
    with what was faster. Where the longer of generation and learning takes nearly the whole step, nothing is tried."""

    type: Literal["auto"] = "auto"
    in_flight: ClassVar[bool] = False
    steps_ahead: ClassVar[int] = 1

    least_saving: Annotated[float, Field(gt=0, lt=1)] = 0.03
    """Share of a step that an overlap has to save, for samples that are one version older: less is within the error of
    a measurement."""

    again_after_steps: Steps = 100
    """Steps until both ways are tried again, because lengths change as a policy learns. A trial takes seven steps."""

    @property
    def max_staleness(self) -> int:
        """See SyncSpec."""
        return 1


IN_TURN = frozenset({"sync", "partial", "tail_batching"})
"""Types that draw a step, and then learn it: nothing overlaps."""


class OwnScheduleSpec(OwnSpec):
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
    SyncSpec | PartialSpec | TailBatchingSpec | OneStepOffSpec | AsyncSpec | AutoSpec | OwnScheduleSpec,
    Seam(
        "schedule",
        built_in=(SyncSpec, PartialSpec, TailBatchingSpec, OneStepOffSpec, AsyncSpec, AutoSpec),
        methods=("drive",),
        settings=OwnScheduleSpec,
    ),
]
