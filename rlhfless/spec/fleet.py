"""Where functions run, how many of them, and how weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless.spec.base import MOST_PROCESSES, Duration, FilePath, KeptPath, Processes, SpecModel
from rlhfless.spec.extension import PluginField, PluginSpec


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


POLICY_SEAM = PluginField("scaling policy", built_in=(CostAwareSpec, StaticSpec), methods=("decide",))

PolicySpec = Annotated[CostAwareSpec | StaticSpec | PluginSpec, POLICY_SEAM]


MOST_TENANTS = 8
"""More runs than this take longer turns than a user waits for, and eight sleeping 7B runs fill a host's memory."""


class PlacementSpec(SpecModel):
    """Which functions share devices."""

    mode: Literal["auto", "colocated", "disaggregated"] = "auto"
    """`colocated`: all functions share all devices. `disaggregated`: the learner (and the reference and scoring
    functions) have devices of their own, named by `learner_devices`. `auto`: co-located on CPU cores; on GPUs what the
    memory plan says that fits, co-located first."""

    turns: bool = False
    """Functions that share devices take turns in their memory: one is awake, and the others sleep with their state in
    the host's memory, or for actors without weights, which are loaded anew in each step. So a device holds the largest
    function instead of all of them; each step pays for two changes of turn, and nothing is computed beside
    generation on the devices that it uses."""

    tenants: Annotated[int, Field(ge=1, le=MOST_TENANTS)] = 1
    """Most runs that share the devices, this one included. Above 1 the run's functions sleep while another run of the
    same service or cluster works on their devices (it says so, too), and all runs there take turns, phase by phase:
    while one run generates, another learns. Devices that are free are used first. Each run that sleeps keeps its state
    in the host's memory, and 0.8 GiB per function on the device, which the memory plan sets aside."""

    float32_on_gpus: bool = False
    """Allow `float32` in `model.dtype` or `learner.dtype` on GPUs, which is refused otherwise: it takes twice the
    memory and several times the time of bfloat16."""

    devices: Processes | None = None
    """Devices of the run (GPUs, or CPU cores); by default all devices of the cluster. A run that joins a cluster may
    ask for more than there are: a cluster autoscaler sees the demand, and the run says what it waits for."""

    kind: Annotated[str, Field(min_length=1)] | None = None
    """Kind of the devices, as the price book names it, such as `h100` or `cpu-core`. By default the GPUs of the
    cluster, which must be of one kind then, or CPU cores where it has no GPU."""

    learner_devices: Processes = 1
    """Devices set aside for the learner side when disaggregated: of those of the run, or beside them where they are of
    another kind."""

    learner_kind: Annotated[str, Field(min_length=1)] | None = None
    """Kind of the devices of the learner side, where it is not that of generation. `kind` and `devices` are
    generation's then. Needs `disaggregated`."""

    ray_address: str | None = None
    """Address of a running Ray cluster. By default a private Ray is started, which only this machine can reach."""

    trusted_network: bool = False
    """Join a cluster on other machines although RAY_AUTH_MODE is `disabled`: anyone who reaches its ports can run code
    there. Only for a network that no stranger can reach."""

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

    def kind_of_learner(self, kind: str) -> str:
        """The kind of the learner side's devices, where generation's are of this one."""
        return self.learner_kind or kind

    @property
    def in_turns(self) -> bool:
        """Functions take turns on their devices, with each other or with other runs."""
        return self.turns or self.tenants > 1


class GenerationScalingSpec(SpecModel):
    """Bounds on the number of generation actors. A static fleet is min = max."""

    min_actors: Processes = 1
    max_actors: Processes | Literal["auto"] = "auto"
    """`auto`: on GPUs as many as the devices hold beside what else is on them, on CPU cores `min_actors`."""

    @model_validator(mode="after")
    def _ordered(self) -> GenerationScalingSpec:
        if self.max_actors != "auto" and self.max_actors < self.min_actors:
            raise ValueError(f"max_actors ({self.max_actors}) is below min_actors ({self.min_actors})")
        return self

    @property
    def most_actors(self) -> int:
        """`max_actors` as a number: `min_actors` where `auto` is still to be decided."""
        return self.min_actors if self.max_actors == "auto" else self.max_actors

    @property
    def fixed(self) -> bool:
        """Whether the number of actors is fixed, so that no policy decides it."""
        return self.min_actors == self.most_actors


KvConnector = Literal["folder", "nixl"]


class PrefillScalingSpec(SpecModel):
    """Bounds on the number of actors that compute prompts for the generation actors, which then only decode
    (docs/prefill.md)."""

    min_actors: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """Actors that are never released. Others start when prompts wait for longer than a start takes, and are released
    when no prompt waits."""
    max_actors: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """0: generation actors compute the prompts themselves."""
    kv_connector: KvConnector = "nixl"
    """How KV reaches the generation actors: NIXL (any nodes; its package must be installed), or `folder`: files in the
    folder of the weights, for tests and actors of one node. With prefill actors, models with several kinds of attention
    layers hold more KV: vLLM's connectors treat all alike."""

    @model_validator(mode="after")
    def _ordered(self) -> PrefillScalingSpec:
        if self.max_actors < self.min_actors:
            raise ValueError(f"max_actors ({self.max_actors}) is below min_actors ({self.min_actors})")
        return self

    @property
    def on(self) -> bool:
        """Whether prompts may be computed apart."""
        return self.max_actors > 0

    @property
    def connector(self) -> KvConnector | None:
        """`kv_connector`; None without prefill actors."""
        return self.kv_connector if self.on else None


Hold = Literal["auto", "always", "never"]
"""What happens between two uses: the replica stays warm, it is released, or the scaling policy decides."""


Per = Literal["step", "run"]
"""The span of a limit: each step, or all steps of the run together."""


class CheapestSpec(SpecModel):
    """The least cost under a deadline."""

    type: Literal["cheapest"] = "cheapest"

    deadline_s: Duration
    """Wall-clock seconds."""

    per: Per = "step"
    """Whether the deadline applies to each step or to the whole run."""


class FastestSpec(SpecModel):
    """The shortest time under a budget."""

    type: Literal["fastest"] = "fastest"

    budget_usd: Annotated[float, Field(gt=0)]
    """US dollars, by the price book."""

    per: Per = "step"
    """Whether the budget applies to each step or to the whole run."""


class WeightedSpec(SpecModel):
    """A compromise between time and cost, without a limit on either."""

    type: Literal["weighted"] = "weighted"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1: as fast as the devices allow; 0: as cheap as they allow. Time counts relative to the fastest plan of the step
    and cost relative to the cheapest, so the same weight suits any workload."""


ContractSpec = Annotated[CheapestSpec | FastestSpec | WeightedSpec, Field(discriminator="type")]


class ScalingSpec(SpecModel):
    """How many replicas there are, which samples each one draws, and when replicas give their devices back."""

    policy: PolicySpec = CostAwareSpec()
    """The policy that decides during a run, within the bounds below: a name, or `{type: ...}` with keys of its own.
    `cost_aware` plans each step from forecasts of its response lengths, under the contract. `static` has `max_actors`
    at all times; the others are policies of other systems. docs/policies.md describes all of them, and
    docs/extending.md a policy of your own."""

    contract: ContractSpec = WeightedSpec()
    """The goal of the run in time and cost. By default both count alike: one percent of time as much as one percent of
    cost. A fleet with `min_actors` = `max_actors` costs the same whatever is decided, so only time counts there.
    Policies other than `cost_aware` ignore the contract."""

    generation: GenerationScalingSpec = GenerationScalingSpec()
    prefill: PrefillScalingSpec = PrefillScalingSpec()
    hold_scoring: Hold = "auto"
    """Between its uses. With `auto` the policy decides; the others are bounds on it, as `min_actors` is."""
    hold_reference: Hold = "auto"
    """Between its uses. With `auto` the policy decides; the others are bounds on it, as `min_actors` is."""

    prices: FilePath | None = None
    """Price book (YAML); by default the bundled one."""


Transport = Literal["file", "shared_memory", "http", "nccl", "cuda_ipc"]
"""A way of the weights from the learner to an actor."""


class WeightsSpec(SpecModel):
    """How the learner's weights reach the actors (docs/weights.md)."""

    transport: Literal["auto"] | Transport = "auto"
    """`shared_memory`: files in memory, which actors on the learner's node map. `http`: that, and other nodes pull
    from the learner's into a cache of their own. `file`: files in a folder that all nodes share. `nccl`: as `http`, and
    a fixed number of actors gets each version by one broadcast from GPU to GPU. `cuda_ipc`: actors on the
    GPUs of the learner's ranks, all on one node, copy what the ranks gather for them, also while these sleep. `auto`:
    by where each actor is, `shared_memory` or `http`; `nccl` and `cuda_ipc`, which have not yet run on a GPU, only by
    name."""

    folder: KeptPath | None = None
    """Folder of the files, or of the node cache; in shared memory by default."""

    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference between the engine's and the learner's logprobs of the probe tokens, for logprobs of up to
    10; it grows in proportion for larger ones. The mean over the tokens may be an eighth of it. By default it is chosen
    by dtype."""

    read_back: bool = True
    """After each load, elements of every tensor are read back from the engine's layers and must equal the learner's,
    bit for bit. Switch it off for an engine that is meant to change weights as it loads them."""


class TimeoutsSpec(SpecModel):
    """Limits of every wait. When a wait exceeds its limit, the error names the limit and what was waited for."""

    devices_s: Duration = 1800.0
    """Until the devices of a replica are there: another run has to give them back, or an autoscaler has to bring a
    node. What is waited for is said after 5 s, and again until it ends."""
    start_s: Duration = 600.0
    """A replica's start: process, model, engine; without fetching the model from the hub."""
    download_s: Duration = 3600.0
    """Fetching models from the hub, at the start of the run, once on each node."""
    generate_s: Duration = 3600.0
    """One step's generation on one actor."""
    call_s: Duration = 600.0
    """One scoring, reference or learner call."""
    sync_s: Duration = 120.0
    """One actor's weight load with its checks."""
    drain_s: Duration = 30.0
    """A replica's orderly stop; after that it is killed."""
    stop_s: Duration = 25.0
    """The orderly stop of the whole run after Ctrl-C or SIGTERM; after that all its processes are killed. Kubernetes
    and Slurm kill the remaining processes 30 s after SIGTERM, and `docker stop` after 10 s unless told otherwise."""


class RecoverySpec(SpecModel):
    """Replicas that die are noticed and replaced, and no finished sample is lost (docs/faults.md)."""

    lease_s: Duration = 60.0
    """A replica that gets no message from the run for this long gives its device back; a replica that does not answer
    the run for this long is replaced."""

    heartbeat_s: Duration = 60.0
    """A generation engine that has work and is silent for this long is replaced. One iteration must take less."""

    per_step: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 3
    """Most recoveries of one step; the next fault stops the run. The run can then be resumed."""
