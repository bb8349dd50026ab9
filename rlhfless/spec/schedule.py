"""The settings of each schedule: the order in which the steps of a run draw and learn."""

from __future__ import annotations

from typing import Annotated, Literal

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import OwnSpec, Seam


class SyncSpec(SpecModel):
    """One step after the other: each step draws with the weights that the previous step published."""

    type: Literal["sync"] = "sync"


ScheduleSpec = Annotated[SyncSpec | OwnSpec, Seam("schedule", built_in=(SyncSpec,), methods=("drive",))]
