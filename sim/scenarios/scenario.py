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
    JudgeTimingSpec,
    LearnerTimingSpec,
    PrefixesSpec,
    RecordedWorkload,
    ReferenceTimingSpec,
    ScenarioPlacementSpec,
    ScoringTimingSpec,
    TeacherTimingSpec,
    WorkloadSpec,
)
from rlhfless.spec.base import SpecModel
from rlhfless.spec.generation import IN_TURN, PartialSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.removed import REMOVED_FROM_SCENARIOS

BEST_STATIC = "best_static"
"""The best static fleet in hindsight; not an actual policy."""

CLAIRVOYANT = "clairvoyant"
"""The upper bound: a policy that knows every response length in advance."""


ScenarioPer = Literal["step", "epoch", "run"]
"""Scope of a limit."""


class MultipleOf(SpecModel):
    """A limit relative to another policy of the scenario, simulated with the same seed."""

    times: Positive
    """Factor applied to the policy's time or cost."""

    policy: str
    """Label of the policy. It does not have to be among the compared policies."""


class CheapestContract(SpecModel):
    """Minimize cost under a deadline."""

    type: Literal["cheapest"] = "cheapest"

    deadline_s: Positive | None = None
    """Deadline in wall-clock seconds. Give either this or `deadline`."""

    deadline: MultipleOf | None = None
    """Deadline as a multiple of another policy's time; with `per: step`, of its time in the same step."""

    per: ScenarioPer = "step"
    """Whether the deadline applies to each step, to the steps of each epoch together, or to the whole run."""

    @model_validator(mode="after")
    def _one(self) -> CheapestContract:
        if (self.deadline_s is None) == (self.deadline is None):
            raise ValueError("give `deadline_s` or `deadline`, one of the two")
        return self


class FastestContract(SpecModel):
    """Minimize time under a budget."""

    type: Literal["fastest"] = "fastest"

    budget_usd: Positive | None = None
    """Budget in US dollars, from the price book. Give either this or `budget`."""

    budget: MultipleOf | None = None
    """Budget as a multiple of another policy's cost; with `per: step`, of its cost in the same step."""

    per: ScenarioPer = "step"
    """Whether the budget applies to each step, to the steps of each epoch together, or to the whole run."""

    @model_validator(mode="after")
    def _one(self) -> FastestContract:
        if (self.budget_usd is None) == (self.budget is None):
            raise ValueError("give `budget_usd` or `budget`, one of the two")
        return self


class WeightedContract(SpecModel):
    """Trade off time and cost."""

    type: Literal["weighted"] = "weighted"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1: as fast as the devices allow. 0: as cheap as possible."""


ScenarioContract = Annotated[CheapestContract | FastestContract | WeightedContract, Field(discriminator="type")]


class PolicyEntry(SpecModel):
    """A policy to compare."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the policy in docs/policies.md."""

    label: str | None = None
    """Name in the report. Required if a policy is listed twice. `null`: the policy's name."""

    placement: ScenarioPlacementSpec | None = None
    """Placement of the policy's functions. `null`: the placement that the policy requires, otherwise the scenario's."""

    contract: ScenarioContract | None = None
    """Contract of the policy. `null`: the scenario's."""

    settings: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Keys of the policy itself: see below, or docs/spec.md for policies of runs."""

    @property
    def shown(self) -> str:
        """The name in the report."""
        return self.label or self.name


class Scenario(SpecModel):
    """A cluster, a model, a workload, a contract, and the policies to compare."""

    removed: ClassVar[Mapping[str, str]] = REMOVED_FROM_SCENARIOS
    """See RunSpec."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """Name of the scenario and of its report folder."""

    description: str = ""
    """Description for the report, in one or two sentences."""

    cluster: ClusterSpec
    model: ScenarioModelSpec
    engine: ScenarioEngineSpec = ScenarioEngineSpec()
    workload: WorkloadSpec
    """Source of prompts and response lengths."""

    prefixes: PrefixesSpec | None = None
    """Shared prefixes of prompts. Not allowed for a recorded run, whose trace includes them. `null`: none."""

    prompts_per_step: Count
    """Prompts per step. Must equal the number in a recorded run."""

    samples_per_prompt: Count
    """Responses per prompt."""

    max_tokens: Count
    """Maximum response length in tokens; longer responses are truncated."""

    steps: Annotated[int, Field(ge=2)]
    """Steps per run."""

    seeds: Count = 5
    """Number of runs per policy. All policies use the same seeds, so that runs can be compared in pairs."""

    schedule: ScheduleSpec = SyncSpec()
    """Schedule, as in the spec of a run. Your own schedule runs as it does in a run."""

    placement: ScenarioPlacementSpec = ScenarioPlacementSpec()
    transport: TransportSpec = TransportSpec()
    fleet: FleetTimesSpec = DeclaredTimes()
    """Source of the times replicas take to start, sleep, wake and load weights."""

    learner: LearnerTimingSpec = LearnerTimingSpec()
    scoring: ScoringTimingSpec | None = ScoringTimingSpec()
    """Scoring on CPU cores, with the samples of a group in parallel. `null`: none, as in runs without rewards."""

    reference: ReferenceTimingSpec | None = None

    teachers: tuple[TeacherTimingSpec, ...] = ()
    """Teachers, which compute logprobs like the reference."""

    judges: tuple[JudgeTimingSpec, ...] = ()
    """Judges with models of their own."""

    critic: CriticTimingSpec | None = None

    heartbeat_s: Positive = 0.5
    """Seconds between two heartbeats during a step, as in a real fleet."""

    contract: ScenarioContract = WeightedContract()
    """Contract of all policies that use one."""

    policies: Annotated[tuple[PolicyEntry, ...], Field(min_length=1)] = ()
    """Policies to compare; by default, all. Times and costs are shown relative to the first one."""

    @model_validator(mode="before")
    @classmethod
    def _all_policies(cls, data: Any) -> Any:
        """Fill in missing `policies`: all with their own settings, the best static fleet, and the clairvoyant
        policy."""
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
        """Fill in missing `nodes` of serverless containers."""
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
            raise ValueError(f"policy {twice[0]!r} appears twice; give one of them its own `label`")
        return self

    @property
    def steps_ahead(self) -> int:
        """Maximum steps that are generated before they are learned."""
        return self.schedule.steps_ahead

    @property
    def epoch_steps(self) -> int:
        """Steps that visit each prompt once; all steps if the workload has no fixed number of prompts."""
        prompts = getattr(self.workload, "prompts", None)
        return self.steps if prompts is None else max(prompts // self.prompts_per_step, 1)
