"""A scenario: all inputs of a simulated run, except its seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhfless.sim.policies import POLICIES
from rlhfless.sim.scenarios.cluster import (
    ClusterSpec,
    Count,
    DeclaredTimes,
    FleetTimesSpec,
    Positive,
    TransportSpec,
    uncounted_nodes,
)
from rlhfless.sim.scenarios.model import ScenarioEngineSpec, ScenarioModelSpec
from rlhfless.sim.scenarios.work import (
    CriticTimingSpec,
    LearnerTimingSpec,
    PrefixesSpec,
    RecordedWorkload,
    ReferenceTimingSpec,
    ScenarioPlacementSpec,
    ScoringTimingSpec,
    WorkloadSpec,
)
from rlhfless.spec.base import SpecModel
from rlhfless.spec.removed import REMOVED_FROM_SCENARIOS
from rlhfless.spec.schedule import IN_TURN, PartialSpec, ScheduleSpec, SyncSpec

BEST_STATIC = "best_static"
"""The best static fleet in hindsight; not a policy."""

CLAIRVOYANT = "clairvoyant"
"""The bound: a policy that knows each length."""


ScenarioPer = Literal["step", "epoch", "run"]
"""The steps that share a limit."""


class MultipleOf(SpecModel):
    """A limit measured by another policy of the scenario, with the same seed."""

    times: Positive
    """Factor on the policy's time or cost."""

    policy: str
    """Label of the policy; it need not be among the policies compared."""


class CheapestContract(SpecModel):
    """The least cost under a deadline."""

    type: Literal["cheapest"] = "cheapest"

    deadline_s: Positive | None = None
    """Wall-clock seconds."""

    deadline: MultipleOf | None = None
    """Or a multiple of another policy's time; per step, of its time in the same step."""

    per: ScenarioPer = "step"
    """Whether the deadline applies to each step, to the steps of each epoch together, or to the whole run."""

    @model_validator(mode="after")
    def _one(self) -> CheapestContract:
        if (self.deadline_s is None) == (self.deadline is None):
            raise ValueError("give `deadline_s` or `deadline`, one of the two")
        return self


class FastestContract(SpecModel):
    """The shortest time under a budget."""

    type: Literal["fastest"] = "fastest"

    budget_usd: Positive | None = None
    """US dollars, by the price book."""

    budget: MultipleOf | None = None
    """Or a multiple of another policy's cost; per step, of its cost in the same step."""

    per: ScenarioPer = "step"
    """Whether the budget applies to each step, to the steps of each epoch together, or to the whole run."""

    @model_validator(mode="after")
    def _one(self) -> FastestContract:
        if (self.budget_usd is None) == (self.budget is None):
            raise ValueError("give `budget_usd` or `budget`, one of the two")
        return self


class WeightedContract(SpecModel):
    """A compromise between time and cost."""

    type: Literal["weighted"] = "weighted"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1: as fast as the devices allow; 0: as cheap as they allow."""


ScenarioContract = Annotated[CheapestContract | FastestContract | WeightedContract, Field(discriminator="type")]


class PolicyEntry(SpecModel):
    """One policy to compare."""

    name: Annotated[str, Field(min_length=1)]
    """Its name in docs/policies.md."""

    label: str | None = None
    """Its name in the report; by default the policy's name. Needed if a policy occurs twice."""

    placement: ScenarioPlacementSpec | None = None
    """Devices of its functions; by default the placement of the policy's kind, or else the scenario's."""

    contract: ScenarioContract | None = None
    """Its contract; by default the scenario's."""

    settings: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Keys of the policy itself: below, and for the policies of runs in docs/spec.md."""

    @property
    def shown(self) -> str:
        """Its name in the report."""
        return self.label or self.name


class Scenario(SpecModel):
    """A cluster, a model, a workload, a contract, and the policies to compare."""

    removed: ClassVar[Mapping[str, str]] = REMOVED_FROM_SCENARIOS
    """See RunSpec."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """Names the folder of the report."""

    description: str = ""
    """One or two sentences for the report."""

    cluster: ClusterSpec
    model: ScenarioModelSpec
    engine: ScenarioEngineSpec = ScenarioEngineSpec()
    workload: WorkloadSpec
    """Where prompts and response lengths come from."""

    prefixes: PrefixesSpec | None = None
    """Shared prefixes of prompts; by default there are none. Not for a recorded run, whose trace has it."""

    prompts_per_step: Count
    """Prompts of a step. It must equal the number in a recorded run."""

    samples_per_prompt: Count
    """Responses to each prompt."""

    max_tokens: Count
    """Length at which responses are cut off."""

    steps: Annotated[int, Field(ge=2)]
    """Steps of a run."""

    seeds: Count = 5
    """Runs of each policy; the policies share their seeds, so that they can be compared in pairs."""

    schedule: ScheduleSpec = SyncSpec()
    """As in the spec of a run. One of your own is simulated by the versions that its samples may be behind."""

    placement: ScenarioPlacementSpec = ScenarioPlacementSpec()
    transport: TransportSpec = TransportSpec()
    fleet: FleetTimesSpec = DeclaredTimes()
    """How long the fleet's replicas take to start, to fall asleep, to wake, and to have new weights."""

    learner: LearnerTimingSpec = LearnerTimingSpec()
    scoring: ScoringTimingSpec = ScoringTimingSpec()
    reference: ReferenceTimingSpec | None = None
    critic: CriticTimingSpec | None = None

    heartbeat_s: Positive = 0.5
    """Seconds between two heartbeats of a step in progress, as in the live fleet."""

    contract: ScenarioContract = WeightedContract()
    """The contract of all policies that take one."""

    policies: Annotated[tuple[PolicyEntry, ...], Field(min_length=1)] = ()
    """The policies to compare; by default all. Times and costs are shown relative to the first one."""

    @model_validator(mode="before")
    @classmethod
    def _all_policies(cls, data: Any) -> Any:
        """Fill in missing `policies`: all in their own settings, the best static fleet, and the clairvoyant."""
        if not isinstance(data, dict) or "policies" in data:
            return data
        # The best static fleet tries fleets under `static`.
        names = (*(name for name in POLICIES if name != "static"), BEST_STATIC, CLAIRVOYANT)
        schedule = data.get("schedule", "sync")
        named = schedule.get("type", "sync") if isinstance(schedule, dict) else getattr(schedule, "type", schedule)
        cluster = data.get("cluster")
        kinds = len(cluster.get("machines") or ()) if isinstance(cluster, dict) else 1
        if named not in IN_TURN or kinds > 1:  # a co-located policy does everything in turn, on one kind of device
            names = tuple(name for name in names if name not in POLICIES or POLICIES[name].placement != "colocated")
        return {**data, "policies": [{"name": name} for name in names]}

    @model_validator(mode="before")
    @classmethod
    def _containers_have_no_count(cls, data: Any) -> Any:
        """Count the machines of a seller of containers where `nodes` is missing."""
        cluster = data.get("cluster") if isinstance(data, dict) else None
        if not isinstance(cluster, dict) or cluster.get("serverless") is None or "prompts_per_step" not in data:
            return data
        engine, placement = (data.get(key) or {} for key in ("engine", "placement"))
        if not (isinstance(engine, dict) and isinstance(placement, dict)):
            return data
        try:
            sizes = [int(engine.get(key) or 1) for key in ("tensor_parallel", "data_parallel")]
            counted = [
                each
                if "nodes" in each
                else {
                    **each,
                    "nodes": uncounted_nodes(
                        int(each["devices_per_node"]),
                        int(data["prompts_per_step"]),
                        math.prod(sizes),
                        placement.get("learner_devices"),
                    ),
                }
                for each in cluster["machines"]
            ]
        except (KeyError, TypeError, ValueError):
            return data  # the fields' own types report the problem
        return {**data, "cluster": {**cluster, "machines": counted}}

    @model_validator(mode="after")
    def _prefixes_are_recorded(self) -> Scenario:
        if self.prefixes is not None and isinstance(self.workload, RecordedWorkload):
            raise ValueError("prefixes: a recorded run has its own; leave the key out")
        if self.prefixes is not None and self.prefixes.levels and isinstance(self.schedule, PartialSpec):
            raise ValueError(
                "prefixes: schedule partial mixes the prompts of steps, and is simulated without shared "
                "prefixes; leave the levels out"
            )
        return self

    @model_validator(mode="after")
    def _labels_differ(self) -> Scenario:
        labels = [entry.shown for entry in self.policies]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"policy {twice[0]!r} is there twice; give one of them a `label` of its own")
        return self

    @property
    def steps_ahead(self) -> int:
        """Steps that may be generated before they are learned from."""
        return self.schedule.steps_ahead

    @property
    def epoch_steps(self) -> int:
        """Steps that visit each prompt once; all steps, if the workload does not define it."""
        prompts = getattr(self.workload, "prompts", None)
        return self.steps if prompts is None else max(prompts // self.prompts_per_step, 1)
