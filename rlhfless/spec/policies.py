"""The scaling policies of a run and their keys. `type` selects one (rlhfless.spec.extension).

Policies of other systems run in the simulator only (sim/baselines). docs/policies.md describes all of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import Processes, SpecModel
from rlhfless.spec.extension import OwnSpec, Seam


class CostAwareSpec(SpecModel):
    """RLHFless's own policy: plans each step from forecasts of its response lengths, under the contract."""

    type: Literal["cost_aware"] = "cost_aware"

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """The probability with which a deadline is to be kept."""


class StaticSpec(SpecModel):
    """A fleet that never changes."""

    type: Literal["static"] = "static"

    actors: Processes | None = None
    """Number of generation actors; by default as many as the devices allow."""


POLICY_SEAM = Seam("scaling policy", built_in=(CostAwareSpec, StaticSpec), methods=("decide",))

PolicySpec = Annotated[CostAwareSpec | StaticSpec | OwnSpec, POLICY_SEAM]
