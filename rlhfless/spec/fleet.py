"""Where functions run, how many replicas they have, and how weights reach them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhfless.spec.base import MOST_PROCESSES, Duration, FilePath, KeptPath, Processes, SpecModel
from rlhfless.spec.extension import PluginField, PluginSpec


class CostAwareSpec(SpecModel):
    """RLHFless's own policy. Plans each step under the contract from a forecast of its response lengths."""

    type: Literal["cost_aware"] = "cost_aware"

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Probability with which a deadline should be met."""


class StaticSpec(SpecModel):
    """A fixed fleet."""

    type: Literal["static"] = "static"

    actors: Processes | None = None
    """Number of generation actors. `null`: the maximum that the devices and `scaling.generation` allow."""


POLICY_SEAM = PluginField("scaling policy", built_in=(CostAwareSpec, StaticSpec), methods=("decide",))

PolicySpec = Annotated[CostAwareSpec | StaticSpec | PluginSpec, POLICY_SEAM]


MOST_TENANTS = 8
"""With more runs, turns would be longer than a user waits for. Eight sleeping 7B runs already fill a host's memory."""


Devices = Processes | Literal["auto"]


class DeviceRange(SpecModel):
    """The sizes that a run may have (docs/elastic.md)."""

    min: Devices = "auto"
    """The run waits until it gets this many, and never has fewer. `auto`: the fewest on which the memory plan fits."""

    max: Devices = "auto"
    """Maximum. `auto`: where more devices no longer pay, by the run's own time per step and its contract; from the
    command line, all devices that are there."""

    @model_validator(mode="after")
    def _ordered(self) -> DeviceRange:
        if self.min != "auto" and self.max != "auto" and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max}); swap them, or give one number for both")
        return self

    def within(self, present: int) -> int:
        """Return the number of devices of a run that has the cluster to itself: at most `present`, at least `min`."""
        most = present if self.max == "auto" else min(self.max, present)
        return max(most, 1 if self.min == "auto" else self.min)


def _member(value: Any) -> str | None:
    """Return the member of the union below that a value is for; None if it is for none."""
    if isinstance(value, Mapping | DeviceRange):
        return "range"
    if value is None or value == "auto":
        return "word"
    is_number = isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())
    return "number" if is_number and not isinstance(value, bool) else None


DeviceCounts = Annotated[
    Annotated[Processes, Tag("number")]
    | Annotated[Literal["auto"] | None, Tag("word")]
    | Annotated[DeviceRange, Tag("range")],
    Discriminator(
        _member,
        custom_error_type="device_counts",
        custom_error_message="should be a number of devices, auto, or a range {min, max}",
    ),
]


class PlacementSpec(SpecModel):
    """Which functions share devices."""

    mode: Literal["auto", "colocated", "disaggregated"] = "auto"
    """`colocated`: all functions share all devices. `disaggregated`: the learner, reference and scoring functions have
    their own devices (`learner_devices`). `auto`: `colocated` on CPU cores; on GPUs, the mode that fits the memory
    plan, `colocated` first."""

    turns: bool = False
    """Let functions that share devices take turns: only one is awake. The others sleep with their state in host memory;
    actors sleep without weights and reload them in each step. A device then needs memory only for the largest function,
    not for all of them. Each step pays for two switches, and nothing else runs on the generation devices during
    generation."""

    tenants: Annotated[int, Field(ge=1, le=MOST_TENANTS)] = 1
    """Maximum number of runs that share the devices, including this one. Above 1, runs of the same service or cluster
    take turns phase by phase: while one run generates, another learns, and the functions of a run sleep while another
    run uses their devices. Each of these runs must set `tenants`. Free devices are used first. A sleeping run keeps its
    state in host memory, plus 0.8 GiB per function on the device, which the memory plan reserves."""

    share: Literal["adapters"] | None = None
    """`adapters`: a run with `model.lora` shares its generation actors with the other such runs of the same service or
    cluster whose base model and engine settings are equal: one engine generates for all of them at the same time
    (docs/lora.md). Requires mode `disaggregated`, which is then the default; the learners take turns on their devices,
    see `tenants`, which is then 8 by default."""

    float32_on_gpus: bool = False
    """Allow `float32` for `model.dtype` and `learner.dtype` on GPUs. It is refused otherwise, because it takes twice
    the memory and several times the time of bfloat16."""

    devices: DeviceCounts = None
    """Number of devices (GPUs or CPU cores) for the run, or `{min, max}` for a run that can have
    several sizes; `auto` is `{min: auto, max: auto}`. `null`: all devices of the cluster. A run that joins a cluster
    may request more than the cluster has: a cluster autoscaler sees the demand, and the run reports what it is waiting
    for."""

    kind: Annotated[str, Field(min_length=1)] | None = None
    """Device kind, as named in the price book, such as `h100` or `cpu-core`. `null`: the cluster's GPUs, which must
    then be of one kind, or CPU cores if it has no GPUs."""

    learner_devices: Processes = 1
    """Devices reserved for the learner side in mode `disaggregated`. They are part of `devices`, or in addition to them
    if `learner_kind` is set."""

    learner_kind: Annotated[str, Field(min_length=1)] | None = None
    """Device kind of the learner side, if it differs from that of generation. `kind` and `devices` then apply to
    generation only. Requires mode `disaggregated`. `null`: the same kind."""

    ray_address: str | None = None
    """Address of a running Ray cluster. `null`: start a private Ray that only this machine can reach."""

    trusted_network: bool = False
    """Join a cluster on other machines even if RAY_AUTH_MODE is `disabled`. Anyone who can reach the cluster's ports
    can then run code there; use it only on a network closed to strangers."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_a_fleet(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("share") != "adapters":
            return values
        mode = "disaggregated" if values.get("mode", "auto") == "auto" else values["mode"]
        return {"tenants": MOST_TENANTS, **values, "mode": mode}

    @model_validator(mode="after")
    def _shares_engines_alone(self) -> PlacementSpec:
        if self.share is None:
            return self
        if self.mode != "disaggregated":
            raise ValueError(
                f"share is adapters, but mode is {self.mode}: the engines of a fleet never sleep, so learners need "
                "devices of their own; set mode to disaggregated"
            )
        if self.tenants == 1:
            raise ValueError("share is adapters, but tenants is 1: raise it to the most runs of the fleet")
        if self.turns:
            raise ValueError(
                "share is adapters, but turns is true: the engines of a fleet never sleep; set it to false"
            )
        return self

    @model_validator(mode="after")
    def _another_kind_is_apart(self) -> PlacementSpec:
        kind = self.learner_kind
        if kind is None:
            return self
        if self.mode != "disaggregated":
            raise ValueError(
                f"learner_kind is {kind}, but mode is {self.mode}, in which the learner may be on generation's "
                "devices; set mode to disaggregated, or leave learner_kind out"
            )
        if self.tenants > 1:
            raise ValueError(
                f"learner_kind is {kind}, but tenants is {self.tenants}: runs that share devices take turns on devices "
                "of one kind; leave learner_kind out, or set tenants to 1"
            )
        if kind == self.kind:
            raise ValueError(
                f"learner_kind is {kind}, and so is kind: leave learner_kind out, and count its devices in devices"
            )
        return self

    @model_validator(mode="after")
    def _elastic_alone(self) -> PlacementSpec:
        if self.size_range is not None and self.tenants > 1:
            raise ValueError(
                f"devices is a range, but tenants is {self.tenants}: runs that share devices take turns on the same "
                "ones; give a number of devices, or set tenants to 1"
            )
        return self

    @property
    def size_range(self) -> DeviceRange | None:
        """The sizes of an elastic run; None for a run of one size."""
        if self.devices == "auto":
            return DeviceRange()
        return self.devices if isinstance(self.devices, DeviceRange) else None

    @property
    def device_count(self) -> int | None:
        """`devices` as a number; None if the cluster or the service decides it."""
        return self.devices if isinstance(self.devices, int) else None

    def kind_of_learner(self, kind: str) -> str:
        """Return the device kind of the learner side, given that of generation."""
        return self.learner_kind or kind

    @property
    def in_turns(self) -> bool:
        """Whether functions take turns on their devices, with each other or with other runs."""
        return self.turns or self.tenants > 1

    @property
    def engines_in_turns(self) -> bool:
        """Whether generation actors take turns, too. Those that several runs share do not."""
        return self.in_turns and self.share is None


class GenerationScalingSpec(SpecModel):
    """Limits on the number of generation actors. Set both to the same value for a fixed fleet."""

    min_actors: Processes = 1
    """Minimum generation actors."""
    max_actors: Processes | Literal["auto"] = "auto"
    """Maximum generation actors. `auto`: on GPUs, all that fit next to the other functions; on CPU cores,
    `min_actors`."""

    @model_validator(mode="after")
    def _ordered(self) -> GenerationScalingSpec:
        if self.max_actors != "auto" and self.max_actors < self.min_actors:
            raise ValueError(f"max_actors ({self.max_actors}) is below min_actors ({self.min_actors})")
        return self

    @property
    def most_actors(self) -> int:
        """`max_actors` as a number; `min_actors` until `auto` is decided."""
        return self.min_actors if self.max_actors == "auto" else self.max_actors

    @property
    def fixed(self) -> bool:
        """Whether the number of actors is fixed, so that no policy decides it."""
        return self.min_actors == self.most_actors


KvConnector = Literal["folder", "nixl"]


class PrefillScalingSpec(SpecModel):
    """Limits on the number of prefill actors, which compute prompts for the generation actors; these then only decode
    (docs/prefill.md)."""

    min_actors: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """Prefill actors that are never released. More are started when prompts wait longer than a start takes, and
    released when no prompt waits."""
    max_actors: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """Maximum prefill actors. 0: generation actors compute the prompts themselves."""
    kv_connector: KvConnector = "nixl"
    """How the KV cache reaches the generation actors. `nixl`: NIXL, between any nodes; its package must be installed.
    `folder`: files in the weights folder, for tests and actors on one node. With prefill actors, models with several
    kinds of attention layers need a larger KV cache, because vLLM's connectors treat all layers alike."""

    @model_validator(mode="after")
    def _ordered(self) -> PrefillScalingSpec:
        if self.max_actors < self.min_actors:
            raise ValueError(f"max_actors ({self.max_actors}) is below min_actors ({self.min_actors})")
        return self

    @property
    def on(self) -> bool:
        """Whether prefill actors may be used."""
        return self.max_actors > 0

    @property
    def connector(self) -> KvConnector | None:
        """`kv_connector`; None without prefill actors."""
        return self.kv_connector if self.on else None


Hold = Literal["auto", "always", "never"]
"""Whether a replica stays warm between two uses (`always`), is released (`never`), or the scaling policy decides
(`auto`)."""


Per = Literal["step", "run"]
"""Scope of a limit: each step, or all steps of the run together."""


class CheapestSpec(SpecModel):
    """Minimize cost under a deadline."""

    type: Literal["cheapest"] = "cheapest"

    deadline_s: Duration
    """Deadline in wall-clock seconds."""

    per: Per = "step"
    """Whether the deadline applies to each step or to the whole run."""


class FastestSpec(SpecModel):
    """Minimize time under a budget."""

    type: Literal["fastest"] = "fastest"

    budget_usd: Annotated[float, Field(gt=0)]
    """Budget in US dollars, from the price book."""

    per: Per = "step"
    """Whether the budget applies to each step or to the whole run."""


class WeightedSpec(SpecModel):
    """Trade off time and cost, without a limit on either."""

    type: Literal["weighted"] = "weighted"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1: as fast as the devices allow. 0: as cheap as possible. Time is measured relative to the fastest plan of the
    step and cost relative to the cheapest, so the same weight suits any workload."""


ContractSpec = Annotated[CheapestSpec | FastestSpec | WeightedSpec, Field(discriminator="type")]


class ScalingSpec(SpecModel):
    """How many replicas run, which samples each one generates, and when replicas release their devices."""

    policy: PolicySpec = CostAwareSpec()
    """Scaling policy that decides during the run, within the limits below: a name, or `{type: ...}` with the policy's
    own keys. `cost_aware` plans each step under the contract from a forecast of its response lengths. `static` always
    runs the same number of actors, by default `max_actors`. See docs/policies.md for both and docs/extending.md for
    your own. Policies of other systems are only available in scenarios of `rlhfless simulate`."""

    contract: ContractSpec = WeightedSpec()
    """Goal for time and cost. By default, one percent of time counts as much as one percent of cost. With `min_actors`
    = `max_actors`, cost does not depend on any decision, so only time counts. Only `cost_aware` uses the contract."""

    generation: GenerationScalingSpec = GenerationScalingSpec()
    prefill: PrefillScalingSpec = PrefillScalingSpec()
    hold_scoring: Hold = "auto"
    """Whether the scoring replica stays warm between uses. `always`: it does. `never`: it is released. `auto`: the
    policy decides."""
    hold_reference: Hold = "auto"
    """Whether the replicas of the reference and of teachers stay warm between uses. `always`: they do. `never`: they
    are released. `auto`: the policy decides."""

    prices: FilePath | None = None
    """Price book (YAML). `null`: the bundled one."""


Transport = Literal["file", "shared_memory", "http", "nccl", "cuda_ipc"]
"""How weights get from the learner to an actor."""


class WeightsSpec(SpecModel):
    """How the learner's weights reach the actors (docs/weights.md)."""

    transport: Literal["auto"] | Transport = "auto"
    """`shared_memory`: files in memory that actors on the learner's node map. `http`: the same, and other nodes pull
    the weights from the learner's node into their own cache. `file`: files in a folder shared by all nodes. `nccl`: as
    `http`, but a fixed number of actors receives each version by one GPU-to-GPU broadcast. `cuda_ipc`: actors on the
    GPUs of the learner's ranks, all on one node, copy the weights that the ranks gather for them, even while the ranks
    sleep. `auto`: `shared_memory` or `http`, depending on each actor's node. `nccl` and `cuda_ipc` have not yet run on
    a GPU, so they must be selected explicitly."""

    folder: KeptPath | None = None
    """Folder of the weight files or the node cache. `null`: a folder in shared memory."""

    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference allowed between engine and learner logprobs of the probe tokens, for logprobs of magnitude up
    to 10; it grows proportionally above that. The mean difference may be an eighth of it. `null`: chosen by dtype."""

    read_back: bool = True
    """After each load, read elements of every tensor back from the engine's layers and require them to equal the
    learner's bit for bit. Disable it for an engine that intentionally changes weights as it loads them."""


class TimeoutsSpec(SpecModel):
    """Timeouts in seconds. When a wait exceeds its timeout, the error names the timeout and what the run was waiting
    for."""

    devices_s: Duration = 1800.0
    """Waiting for the devices of a replica, until another run releases them or an autoscaler adds a node. The run
    reports what it is waiting for after 5 s, and again until the wait ends."""
    start_s: Duration = 600.0
    """Starting a replica: process, model and engine, without downloading the model."""
    download_s: Duration = 3600.0
    """Downloading models from the hub at the start of the run, once per node."""
    generate_s: Duration = 3600.0
    """Generation of one step on one actor."""
    call_s: Duration = 600.0
    """One scoring, reference or learner call."""
    sync_s: Duration = 120.0
    """Loading and checking weights on one actor."""
    drain_s: Duration = 30.0
    """Orderly stop of a replica; then it is killed."""
    stop_s: Duration = 25.0
    """Orderly stop of the whole run after Ctrl-C or SIGTERM; then all its processes are killed. By default, Kubernetes
    and Slurm kill remaining processes 30 s after SIGTERM, and `docker stop` after 10 s."""


class RecoverySpec(SpecModel):
    """Dead replicas are detected and replaced without losing finished samples (docs/faults.md)."""

    lease_s: Duration = 60.0
    """Lease in seconds. A replica that receives no message from the run for this long releases its devices; a replica
    that does not answer the run for this long is replaced."""

    heartbeat_s: Duration = 60.0
    """Heartbeat timeout in seconds. A generation engine that has work but is silent for this long is replaced. One
    engine iteration must take less."""

    per_step: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 3
    """Maximum recoveries per step; the next fault stops the run, which can then be resumed."""
