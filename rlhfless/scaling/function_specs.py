"""Declaration of a run's functions: their work in a step, their placement, their memory, and their deployment.

A kind is everything that the runtime knows about a function. Launch, recovery, billing, memory plan and simulator
iterate over the kinds of a run and check their roles; none of them refers to a function by name. Built-in functions are
declared in `rlhfless/functions/kinds.py`; user-defined functions in a module named by the spec (`functions`, see
docs/extending.md). A declaration imports neither Ray nor torch: its deployment is imported when it is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from rlhfless.records import FunctionRole
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import MemoryPhase
from rlhfless.scaling.placement import HeldGroup, Node, Placement, ReplicaRequest, place
from rlhfless.spec import ModelSpec, RewardModelSpec, RunSpec
from rlhfless.spec.extension import make
from rlhfless.spec.imports import load_target

BUILT_IN_FUNCTIONS = tuple(
    f"rlhfless.functions.kinds:{name}"
    for name in ("GENERATION", "PREFILL", "ENVIRONMENT", "SCORING", "REWARD_MODEL", "REFERENCE", "CRITIC", "LEARNER")
)
"""The built-in functions, in the order in which they are placed, shown, and updated."""

FROM_LISTS = ("rlhfless.functions.kinds:judge_kinds", "rlhfless.functions.kinds:teacher_kinds")
"""Make the functions of a run's judges and teachers, one for each."""

Rewards = Sequence[tuple[RewardModelSpec, ModelShape]]
"""The reward models of a run whose sizes are known."""

FrozenShapes = Mapping[str, ModelShape]
"""The sizes of a run's teachers and judges, by function. Those without known sizes are counted with the policy's."""

NO_SHAPES: FrozenShapes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on every scaling policy: `scaling.generation.min_actors` and `scaling.hold_*` of the spec."""

    fewest: int = 0
    """Number of replicas that are never released."""
    reason: str = ""
    """The spec key that sets the limit."""
    idle: bool = True
    """Whether replicas may stay idle between two uses; if False, they are released after each use."""


def held(spec: RunSpec, key: str) -> Bounds:
    """Return the bounds that a key of `scaling`, such as `hold_scoring`, sets for a replica between two uses."""
    hold = getattr(spec.scaling, key)
    if hold == "auto" and spec.placement.tenants > 1:  # sleep costs nothing, a release costs a cold start
        return Bounds(fewest=1, idle=True, reason="placement.tenants lends its devices while it sleeps")
    return Bounds(fewest=int(hold == "always"), idle=hold != "never", reason=f"scaling.{key} is {hold}")


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The inputs that determine the memory of a function."""

    spec: RunSpec
    shape: ModelShape
    """Sizes of the policy model."""
    sheet: DeviceSheet
    sequence_tokens: int
    """Length of the longest sequence."""
    rewards: Rewards = ()
    frozen: FrozenShapes = field(default_factory=dict)
    draft: ModelShape | None = None
    """Sizes of the engines' draft model or head, if they have one and its sizes are known."""

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of a forward pass: a micro-batch holds at least one sequence, or a pair of them."""
        together = self.spec.sequences_per_prompt if self.spec.supervised else 1
        return max(self.spec.learner.pass_tokens, together * self.sequence_tokens)


def no_phases(terms: MemoryTerms) -> tuple[MemoryPhase, ...]:  # noqa: ARG001
    """Return the phases of a function without device memory that the plan counts."""
    return ()


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """The declaration of a function."""

    name: str
    """Unique in a run; used in records, metrics and messages."""
    role: FunctionRole
    deployment: str
    """Import path of the Serve deployment. Its `settings_of(launch, kind, allocation)` returns a replica's settings
    (rlhfless.functions.launching)."""
    wanted: Callable[[RunSpec], ReplicaRequest | None]
    """Its replicas in a run; None if the run does not need it."""
    bounds: Callable[[RunSpec], Bounds]
    phases: Callable[[MemoryTerms], tuple[MemoryPhase, ...]] = no_phases
    """Memory of one replica or rank on one device."""
    output: str = ""
    """The per-token output that it computes: always with the role ANNOTATES; with UPDATES, from the weights before the
    step's update."""
    width: int = 1
    """Values of the output per token: `[tokens]`, or `[tokens, width]` with more than one."""
    output_in: Callable[[RunSpec], str] | None = None
    """Returns the output in a run, if it depends on the run."""
    computes: Callable[[str], bool] = lambda source: True  # noqa: ARG005
    """Whether it computes its output for the prompts of a set; the output of others is 0."""
    publishes: bool = False
    """Whether the engines load the weights that it learns. Exactly one function with the role UPDATES does, and it
    is updated after the others."""
    shared: str = ""
    """Import path of the deployment whose replicas several runs share (`placement.share`); empty if none can."""
    worker: str = ""
    """Import path of the class that computes the per-token output (rlhfless.functions.per_token)."""
    model: Callable[[ModelSpec], ModelSpec] = lambda policy: policy
    """Returns the model that the worker loads, given the run's."""
    settings: Any = None
    """Spec section of a user-defined function."""


def fleet_functions(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the functions whose replicas a run shares with other runs at the same time."""
    return tuple(kind.name for kind in kinds_of(spec) if kind.shared and spec.placement.share is not None)


@cache
def declared() -> Mapping[str, FunctionSpec]:
    """Return the built-in functions, by name."""
    kinds: list[FunctionSpec] = [load_target(path) for path in BUILT_IN_FUNCTIONS]
    return MappingProxyType({kind.name: kind for kind in kinds})


def kinds_of(spec: RunSpec) -> tuple[FunctionSpec, ...]:
    """Return the functions of a run: built-in ones that it needs, judges, teachers, then user-defined ones."""
    listed: list[FunctionSpec] = [kind for target in FROM_LISTS for kind in load_target(target)(spec)]
    own: list[FunctionSpec] = [make(settings, {}).kind(name) for name, settings in spec.functions.items()]
    kinds = (kind for kind in (*declared().values(), *listed, *own) if kind.wanted(spec) is not None)
    return tuple(kind if kind.output_in is None else replace(kind, output=kind.output_in(spec)) for kind in kinds)


def replica_requests(spec: RunSpec) -> tuple[ReplicaRequest, ...]:
    """Return the replicas that a run may have."""
    return tuple(wanted for kind in kinds_of(spec) if (wanted := kind.wanted(spec)) is not None)


def name_of(spec: RunSpec, role: FunctionRole) -> str:
    """Return the name of a run's only function with this role, SAMPLES."""
    (kind,) = (kind for kind in kinds_of(spec) if kind.role is role)
    return kind.name


def publisher_of(spec: RunSpec) -> str:
    """Return the name of the function whose weights the engines load."""
    (kind,) = (kind for kind in kinds_of(spec) if kind.publishes)
    return kind.name


def place_run(spec: RunSpec, nodes: Sequence[Node], held: Sequence[HeldGroup] | None = None) -> Placement:
    """Return the placement of a run on a cluster of these nodes. `held` and errors are those of `place`."""
    return place(spec.placement, nodes, replica_requests(spec), held)
