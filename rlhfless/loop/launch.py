"""From a spec to the pools of its functions: which devices each replica gets, and its settings."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhfless.fleet.blueprint import Blueprint, Bounds
from rlhfless.fleet.cluster import Cluster
from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import Recorder
from rlhfless.fleet.run_devices import RunDevices, Shown
from rlhfless.functions.base import Call, DeviceBinding
from rlhfless.functions.generation.deployment import GenerationFunction, GenerationSettings
from rlhfless.functions.generation.vllm.messages import EngineSettings
from rlhfless.functions.learner.deployment import LearnerFunction
from rlhfless.functions.learner.settings import LearnerSettings, StoreHome
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned
from rlhfless.functions.reference.deployment import ReferenceFunction
from rlhfless.functions.reference.settings import ReferenceSettings
from rlhfless.functions.reward_model.deployment import RewardModelFunction
from rlhfless.functions.reward_model.settings import RewardModelSettings
from rlhfless.functions.scoring.deployment import ScoringFunction, ScoringSettings
from rlhfless.loop.host import DevicesWanted
from rlhfless.prepare.memory.assumed import planned, shared_kv_bytes
from rlhfless.prepare.memory.room import store_base
from rlhfless.prepare.preflight import Prepared
from rlhfless.records import FunctionName, Prompt
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device, Placement, place_run, ranks_of
from rlhfless.spec import Hold, RunSpec
from rlhfless.spec.imports import import_paths
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import default_tolerance

PROBE_TOKENS = 128
"""Length of the probe: long enough for a steady mean over its tokens, short enough to cost one small prefill."""

PROBE_PROMPTS = 8
"""The probe is put together from the ends of this many prompts, if there are as many: prompts differ most at the
end."""

TOKEN_FILE = "store.token"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Builds the pools of one run."""

    spec: RunSpec
    prepared: Prepared
    call: Call
    cluster: Cluster
    recorder: Recorder
    placement: Placement
    devices: RunDevices
    run_folder: Path
    store_folder: Path
    store_token: str

    @classmethod
    async def of(
        cls,
        spec: RunSpec,
        prepared: Prepared,
        call: Call,
        cluster: Cluster,
        recorder: Recorder,
        folder: Path,
        shown: Shown,
    ) -> Launcher:
        """A launcher with a folder for the run's weights, and a plan of its devices; nothing is taken yet. `folder` is
        the run's own; `shown` tells the user what is waited for.

        Raises PlacementError if the cluster's devices do not suffice.
        """
        token = _store_token(folder) if serves_by_http(spec) else ""
        placement = place_run(spec, await cluster.nodes(spec.placement.kind))
        devices = RunDevices(cluster, placement, call, spec.timeouts, spec.recovery.lease_s, shown)
        home = store_folder(spec, call.run_id)
        return cls(spec, prepared, call, cluster, recorder, placement, devices, folder, home, token)

    def pools(self) -> tuple[Pool, Pool, Pool | None, Pool | None, Pool]:
        """Generation, scoring, reward model (if a reward is one), reference (None when KL is off) and learner.

        Nothing is started yet.
        """
        placement = self.placement
        return (
            self._pool(self._generation(placement)),
            self._pool(self._scoring(placement)),
            self._pool(self._reward_model(placement)) if self.spec.reward_models else None,
            self._pool(self._reference(placement)) if self.spec.algorithm.needs.reference else None,
            self._pool(self._learner(placement)),
        )

    def _pool(self, blueprint: Blueprint) -> Pool:
        return Pool(self.cluster, self.devices, blueprint, self.call, self.spec.timeouts, self.recorder)

    @property
    def _layers(self) -> int | None:
        return None if self.prepared.shape is None else self.prepared.shape.layers

    @property
    def _lease(self) -> LeaseTerms:
        lease_s = self.spec.recovery.lease_s
        return LeaseTerms(first_s=self.spec.timeouts.start_s + lease_s, renewed_s=lease_s)

    def _generation(self, placement: Placement) -> Blueprint:
        spec = self.spec

        def settings(allocation: Allocation) -> GenerationSettings:
            return GenerationSettings(
                run_id=self.call.run_id,
                lease=self._lease,
                engine=EngineSettings.of(
                    spec,
                    "cpu" if allocation.devices[0].kind == CPU_KIND else "cuda",
                    self._store_address(),
                    self.prepared.max_model_len,
                    shared_kv_bytes(spec, self.prepared.shape, allocation.devices[0].kind),
                ),
                probe_tolerance=spec.weights.probe_tolerance or default_tolerance(spec.model.dtype, self._layers),
                binding=binding(allocation.devices, exclusive=True, shared=is_shared(allocation)),
                run_folder=str(self.run_folder.absolute()),
                planned=self._planned(FunctionName.GENERATION, allocation),
            )

        bounds = Bounds(spec.scaling.generation.min_actors, reason="scaling.generation.min_actors are not released")
        return Blueprint(
            FunctionName.GENERATION,
            GenerationFunction,
            settings,
            placement.allocations[FunctionName.GENERATION],
            bounds,
        )

    def _scoring(self, placement: Placement) -> Blueprint:
        def settings(allocation: Allocation) -> ScoringSettings:
            return ScoringSettings(
                run_id=self.call.run_id,
                lease=self._lease,
                rewards=self.spec.rewards,
                scoring=self.spec.scoring,
                binding=binding(allocation.devices, exclusive=False),
                import_paths=import_paths(),
            )

        allocations, bounds = placement.allocations[FunctionName.SCORING], self._hold("hold_scoring")
        return Blueprint(FunctionName.SCORING, ScoringFunction, settings, allocations, bounds)

    def _reward_model(self, placement: Placement) -> Blueprint:
        spec = self.spec

        def settings(allocation: Allocation) -> RewardModelSettings:
            return RewardModelSettings(
                run_id=self.call.run_id,
                lease=self._lease,
                rewards=spec.reward_models,
                on_failure=spec.scoring.on_failure,
                rank_bindings=self._rank_bindings(FunctionName.REWARD_MODEL, allocation),
                call_timeout_s=spec.timeouts.call_s,
                planned=self._planned(FunctionName.REWARD_MODEL, allocation),
            )

        allocations = placement.allocations[FunctionName.REWARD_MODEL]
        return Blueprint(
            FunctionName.REWARD_MODEL, RewardModelFunction, settings, allocations, self._hold("hold_scoring")
        )

    def _reference(self, placement: Placement) -> Blueprint:
        spec = self.spec

        def settings(allocation: Allocation) -> ReferenceSettings:
            return ReferenceSettings(
                run_id=self.call.run_id,
                lease=self._lease,
                model=spec.model,
                dtype=spec.learner.dtype,
                micro_batch_tokens=spec.learner.micro_batch_tokens,
                share_prefixes=spec.learner.share_prefixes,
                logits_elements=spec.learner.logits_elements,
                temperature=spec.generation.temperature,
                rank_bindings=self._rank_bindings(FunctionName.REFERENCE, allocation),
                call_timeout_s=spec.timeouts.call_s,
                planned=self._planned(FunctionName.REFERENCE, allocation),
            )

        allocations, bounds = placement.allocations[FunctionName.REFERENCE], self._hold("hold_reference")
        return Blueprint(FunctionName.REFERENCE, ReferenceFunction, settings, allocations, bounds)

    def _learner(self, placement: Placement) -> Blueprint:
        spec = self.spec
        probe = probe_text(self.prepared.train, self.prepared.max_model_len - 1)

        def settings(allocation: Allocation) -> LearnerSettings:
            return LearnerSettings(
                run_id=self.call.run_id,
                lease=self._lease,
                model=spec.model,
                learner=spec.learner,
                optimizer=spec.optimizer,
                algorithm=spec.algorithm,
                temperature=spec.generation.temperature,
                probe_token_ids=probe,
                read_back=spec.weights.read_back,
                store=StoreHome(str(self.store_folder), self.store_token),
                rank_bindings=self._rank_bindings(FunctionName.LEARNER, allocation),
                call_timeout_s=spec.timeouts.call_s,
                planned=self._planned(FunctionName.LEARNER, allocation),
            )

        return Blueprint(
            FunctionName.LEARNER,
            LearnerFunction,
            settings,
            placement.allocations[FunctionName.LEARNER],
            Bounds(1, reason="the learner keeps the run's state"),
        )

    def _rank_bindings(self, function: FunctionName, allocation: Allocation) -> tuple[DeviceBinding, ...]:
        ranks = ranks_of(self.spec)[function]
        devices = (rank_devices(allocation.devices, rank, ranks) for rank in range(ranks))
        return tuple(binding(mine, exclusive=False, shared=is_shared(allocation, ranks)) for mine in devices)

    def _planned(self, function: FunctionName, allocation: Allocation) -> Planned:
        kind, tokens = allocation.devices[0].kind, self.prepared.max_model_len
        return planned(self.spec, self.prepared.shape, kind, tokens).get(function, {})

    def _hold(self, key: Literal["hold_scoring", "hold_reference"]) -> Bounds:
        """The bounds that the spec sets for replicas between two uses."""
        hold: Hold = getattr(self.spec.scaling, key)
        return Bounds(fewest=int(hold == "always"), idle=hold != "never", reason=f"scaling.{key} is {hold}")

    def _store_address(self) -> StoreAddress:
        """How actors reach the store: the folder itself, or from other nodes a cache of theirs beside it."""
        home = str(self.store_folder)
        if not self.store_token:
            return StoreAddress("folder", home)
        cache = store_folders(self.spec, self.call.run_id)[1]
        return StoreAddress("http", str(cache), self.store_token, home)


def probe_text(prompts: Sequence[Prompt], most_tokens: int) -> tuple[int, ...]:
    """Tokens of the probe `[probe]`: the ends of prompts spread over the data set, repeated until there are
    PROBE_TOKENS, or `most_tokens` if that is less."""
    chosen = random.Random(0).sample(range(len(prompts)), min(len(prompts), PROBE_TOKENS))
    ends = [prompts[index].token_ids[-(PROBE_TOKENS // PROBE_PROMPTS) :] for index in chosen]
    text = itertools.chain.from_iterable(itertools.cycle(ends))
    return tuple(itertools.islice(text, min(PROBE_TOKENS, most_tokens)))


def _store_token(folder: Path) -> str:
    """The secret of the run's store. It outlives the driver, so that a resumed driver can take over replicas that
    know it; only the run's owner may read it."""
    file = folder / TOKEN_FILE
    if not file.exists():
        new = file.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32))
        new.replace(file)
    return file.read_text()


def serves_by_http(spec: RunSpec) -> bool:
    """The weights travel by HTTP, and not by a folder that all functions share."""
    if spec.weights.store == "auto":
        return spec.placement.ray_address is not None
    return spec.weights.store == "http"


def store_folders(spec: RunSpec, run_id: str) -> tuple[Path, Path]:
    """The folder of the run's weights, and the folder of the node's cache of them."""
    folder = store_folder(spec, run_id)
    return folder, Path(f"{folder}-cache")


def remove_stores(spec: RunSpec, run_id: str) -> None:
    """Remove the run's weights from this machine; on the nodes of a joined cluster, `remove_everywhere` does."""
    if not spec.placement.ray_address:
        for folder in store_folders(spec, run_id):
            shutil.rmtree(folder, ignore_errors=True)


def store_folder(spec: RunSpec, run_id: str) -> Path:
    """The folder of the run's weights."""
    return store_base(spec) / (run_id if spec.weights.folder else f"rlhfless-{run_id}")


def binding(devices: Sequence[Device], *, exclusive: bool, shared: bool = False) -> DeviceBinding:
    """How a process finds its devices, which are held and on one node."""
    kind = "cpu" if devices[0].kind == CPU_KIND else "cuda"
    return DeviceBinding(kind, tuple(device.local_id for device in devices), exclusive, devices[0].node, shared)


def is_shared(allocation: Allocation, ranks: int = 1) -> bool:
    """Whether a device of a replica with so many ranks has several processes: other functions, or other ranks."""
    return min(allocation.shares) < 1 or ranks > len(allocation.devices)


def rank_devices(devices: Sequence[Device], rank: int, ranks: int) -> tuple[Device, ...]:
    """A rank's part of a function's devices: neighbours, on the node of the first of them. More ranks than devices
    share them."""
    each, more = divmod(len(devices), ranks)
    if not each:
        return (devices[rank % len(devices)],)
    first = rank * each + min(rank, more)
    part = devices[first : first + each + (rank < more)]
    return tuple(device for device in part if device.node == part[0].node)


def devices_wanted(spec: RunSpec, placement: Placement) -> DevicesWanted:
    """What a run needs to work, and what it could use at most, of its main kind of devices, which is the learner's."""
    kind = placement.allocation(FunctionName.LEARNER, 0).devices[0].kind
    actors = placement.allocations[FunctionName.GENERATION]
    fewest = actors[: spec.scaling.generation.min_actors]
    others = [allocation for name, all_of_it in placement.allocations.items() if name != FunctionName.GENERATION
              for allocation in all_of_it]  # fmt: skip
    needed = {group.name for allocation in (*fewest, *others) for group in placement.groups_of(allocation)}
    groups = [group for group in placement.groups if group.kind == kind]
    return DevicesWanted(
        kind,
        minimum=sum(len(group.devices) for group in groups if group.name in needed),
        maximum=sum(len(group.devices) for group in groups),
        unit=spec.generation.engine.tensor_parallel_size,
    )
