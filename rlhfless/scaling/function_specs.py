"""What a function of a run is, declared once: what it does for a step, where it is, what it holds, how it is made.

A kind is all that the runtime knows of a function. Launch, recovery, bills, memory plan and simulator iterate over the
kinds of a run and ask for their roles; none of them knows a function by its name. The functions that come with the
package are declared in `rlhfless/functions/<name>/kind.py`; a function of the user's own is declared in a module that
the spec names (`functions`, see docs/extending.md). A declaration imports neither Ray nor torch: its deployment is
imported by whatever starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from rlhfless.records import FunctionRole
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import MemoryPhase
from rlhfless.scaling.placement import Node, Placement, ReplicaRequest, place
from rlhfless.spec import RewardModelSpec, RunSpec
from rlhfless.spec.extension import make
from rlhfless.spec.imports import load_target

BUILT_IN_FUNCTIONS = tuple(
    f"rlhfless.functions.{name}.kind:KIND"
    for name in ("generation", "prefill", "scoring", "reward_model", "reference", "critic", "learner")
)
"""The functions that come with the package, in the order in which they are placed, shown, and updated."""

Rewards = Sequence[tuple[RewardModelSpec, ModelShape]]
"""The reward models of a run whose sizes are known."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on every scaling policy: `scaling.generation.min_actors` and `scaling.hold_*` of the spec."""

    fewest: int = 0
    """The number of replicas that are never released."""
    reason: str = ""
    """The key of the spec that sets the limit."""
    idle: bool = True
    """Replicas may stay idle between two uses; if False, they are released after each use."""


def held(spec: RunSpec, key: str) -> Bounds:
    """The bounds that a key of `scaling`, such as `hold_scoring`, sets for a replica between two uses."""
    hold = getattr(spec.scaling, key)
    if hold == "auto" and spec.placement.tenants > 1:  # asleep it costs nothing, and released a cold start
        return Bounds(fewest=1, idle=True, reason="placement.tenants lends its devices while it sleeps")
    return Bounds(fewest=int(hold == "always"), idle=hold != "never", reason=f"scaling.{key} is {hold}")


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """What the bytes of a function follow from."""

    spec: RunSpec
    shape: ModelShape
    """The policy's sizes."""
    sheet: DeviceSheet
    sequence_tokens: int
    """The longest sequence."""
    rewards: Rewards = ()
    draft: ModelShape | None = None
    """The sizes of the draft model or head of engines, if they have one and its sizes are known."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a forward pass: a micro-batch holds at least one sequence, or a pair of them."""
        together = self.spec.sequences_per_prompt if self.spec.supervised else 1
        return max(self.spec.learner.pass_tokens, together * self.sequence_tokens)


def no_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:  # noqa: ARG001
    """The phases of a function that holds nothing on a device that the plan counts."""
    return ()


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """The declaration of a function."""

    name: str
    """Unique in a run: in records, metrics and messages."""
    role: FunctionRole
    deployment: str
    """Import path of the Serve deployment. Its `settings_of(launch, kind, allocation)` gives a replica its settings
    (rlhfless.functions.launching)."""
    wanted: Callable[[RunSpec], ReplicaRequest | None]
    """Its replicas in a run; None if the run has no use for it."""
    bounds: Callable[[RunSpec], Bounds]
    phases: Callable[[MemoryTerms], tuple[MemoryPhase, ...]] = no_phases
    """What one replica or rank holds on one device."""
    column: str = ""
    """The column of the batch that it computes: always with the role COLUMN, and with UPDATES from the weights before
    the step's update."""
    publishes: bool = False
    """Whether the weights that it learns are the ones that the engines load; one function with the role UPDATES does,
    and is updated after the others."""
    worker: str = ""
    """Import path of the class that computes the column (rlhfless.functions.per_token)."""
    settings: Any = None
    """The section of the spec, of a function of the user's own."""


@cache
def declared() -> Mapping[str, FunctionSpec]:
    """The functions that come with the package, by name."""
    kinds: list[FunctionSpec] = [load_target(path) for path in BUILT_IN_FUNCTIONS]
    return MappingProxyType({kind.name: kind for kind in kinds})


def kinds_of(spec: RunSpec) -> tuple[FunctionSpec, ...]:
    """The functions of a run: those of the package that it needs, then the user's own."""
    own: list[FunctionSpec] = [make(settings, {}).kind(name) for name, settings in spec.functions.items()]
    return tuple(kind for kind in (*declared().values(), *own) if kind.wanted(spec) is not None)


def replica_requests(spec: RunSpec) -> tuple[ReplicaRequest, ...]:
    """The replicas that a run may have."""
    return tuple(wanted for kind in kinds_of(spec) if (wanted := kind.wanted(spec)) is not None)


def name_of(spec: RunSpec, role: FunctionRole) -> str:
    """The name of the one function of a run with this role: of SAMPLES."""
    (kind,) = (kind for kind in kinds_of(spec) if kind.role is role)
    return kind.name


def publisher_of(spec: RunSpec) -> str:
    """The name of the function whose weights the engines load."""
    (kind,) = (kind for kind in kinds_of(spec) if kind.publishes)
    return kind.name


def place_run(spec: RunSpec, nodes: Sequence[Node]) -> Placement:
    """The placement of a run on a cluster of these nodes. Raises PlacementError as `place` does."""
    return place(spec.placement, nodes, replica_requests(spec))
