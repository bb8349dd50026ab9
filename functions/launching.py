"""The inputs for the settings of a function's replicas, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhfless.functions.base import DeviceBinding, LeaseTerms
from rlhfless.functions.devices import Planned
from rlhfless.records.routes import FOLDER
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device, rank_devices
from rlhfless.spec import ModelSpec, RunSpec

if TYPE_CHECKING:
    from rlhfless.scaling.function_specs import FunctionSpec
    from rlhfless.weights.address import StoreAddress


@dataclass(frozen=True, slots=True)
class Launch:
    """A run to launch functions for."""

    spec: RunSpec
    run_id: str
    run_folder: Path
    shape: ModelShape | None
    """The policy's sizes, if known."""
    max_model_len: int
    """Longest sequence, in tokens."""
    probe_token_ids: tuple[int, ...]
    """The text whose logprobs every published version carries."""
    store_folder: Path
    """The folder of the learner's weights."""
    store_token: str
    """If given, the weights are served over HTTP to requests that carry this token."""
    store: StoreAddress
    """How actors reach the weights."""
    planned_bytes: Callable[[str], Mapping[str, Planned]]
    """Maps a device kind to the planned bytes of a replica or rank of each function, by phase."""
    kv_bytes: Callable[[str], int | None]
    """Maps a device kind to the KV bytes of an engine that shares its GPU, or None if it does not share."""

    @property
    def lease(self) -> LeaseTerms:
        """The lease of every replica."""
        lease_s = self.spec.recovery.lease_s
        return LeaseTerms(first_s=self.spec.timeouts.start_s + lease_s, renewed_s=lease_s)

    @property
    def routes_folder(self) -> str:
        """The folder of the run's routes, which engines write and the learner reads."""
        return str((self.run_folder / FOLDER).absolute())

    def within_context(self, model: ModelSpec) -> ModelSpec:
        """Return the model spec with the run's longest sequence as its context; see choose_frequencies."""
        return model.model_copy(update={"max_context_tokens": self.max_model_len})

    def planned(self, kind: FunctionSpec, allocation: Allocation) -> Planned:
        """Return the planned bytes of a replica or rank in an allocation, by phase."""
        return self.planned_bytes(allocation.devices[0].kind).get(kind.name, {})

    def of_ranks(self, kind: FunctionSpec, allocation: Allocation) -> dict[str, Any]:
        """Return the fields of DistributedSettings for a replica."""
        return {
            "run_id": self.run_id,
            "lease": self.lease,
            "rank_bindings": self._rank_bindings(kind, allocation),
            "call_timeout_s": self.spec.timeouts.call_s,
            "planned": self.planned(kind, allocation),
        }

    def _rank_bindings(self, kind: FunctionSpec, allocation: Allocation) -> tuple[DeviceBinding, ...]:
        """Return the devices of each rank of a replica."""
        wanted = kind.wanted(self.spec)
        ranks = 1 if wanted is None else wanted.ranks
        devices = (rank_devices(allocation.devices, rank, ranks) for rank in range(ranks))
        return tuple(binding(each, exclusive=False, shared=is_shared(allocation, ranks)) for each in devices)


def binding(devices: Sequence[Device], *, exclusive: bool, shared: bool = False) -> DeviceBinding:
    """Return the binding of a process to its devices, which must be reserved and on one node."""
    kind: Literal["cpu", "cuda"] = "cpu" if devices[0].kind == CPU_KIND else "cuda"
    return DeviceBinding(kind, tuple(device.local_id for device in devices), exclusive, devices[0].node, shared)


def is_shared(allocation: Allocation, ranks: int = 1) -> bool:
    """Return whether several processes, of other functions or ranks, use a device of a replica with `ranks` ranks."""
    return min(allocation.shares) < 1 or ranks > len(allocation.devices)
