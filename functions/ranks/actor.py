"""The base class of a rank's Ray actor: devices, liveness, rendezvous, sleep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import ray

from rlhfless.functions.base import DistributedSettings
from rlhfless.functions.cuda import ALLOCATOR, EXPANDABLE, PINNED, require_cuda
from rlhfless.functions.loopback import (
    LOOPBACK,
    bind_rendezvous_to_loopback,
    free_port,
    interface_environment,
    loopback_environment,
    set_default_environment,
)
from rlhfless.functions.on_node import node_address
from rlhfless.functions.out_of_memory import naming_memory_errors
from rlhfless.records import SleepTier, Slept

if TYPE_CHECKING:
    import torch

    from rlhfless.functions.host_offload import HostOffload


class Asleep(RuntimeError):
    """Raised while the rank sleeps: its tensors are in host memory."""


S = TypeVar("S", bound=DistributedSettings)


class RankActor(Generic[S]):
    """Rank `rank` of a function."""

    named = ""
    """Name of the function in errors."""
    phases: ClassVar[Mapping[str, str]] = {}
    """Methods of `_rank` that `call` may call, with their phase in the memory plan."""
    _rank: Any
    """This rank's model; set by `_load`."""
    _offload: HostOffload | None = None
    """Created by the first sleep."""

    def __init__(self, settings: S, rank: int) -> None:
        settings.rank_bindings[rank].bind()
        self._settings = settings
        self._number = rank

    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="signs_of_life")
    def alive(self) -> None:
        """Answer, even while the rank computes."""

    def node(self) -> str:
        """Return the address of this rank's node."""
        return node_address()

    @property
    def shares_device_memory(self) -> bool:
        """Return whether other processes read this rank's GPU memory."""
        return False

    @property
    def reaches_other_nodes(self) -> bool:
        """Return whether the rank joins process groups across nodes, in addition to its ranks' group."""
        return False

    @property
    def _node_id(self) -> str:
        """Ray's ID of this rank's node."""
        return self._settings.rank_bindings[self._number].node

    def rendezvous(self, on_one_node: bool) -> str:
        """Return an address on this node for the ranks' rendezvous; loopback if all ranks are on this node."""
        host = LOOPBACK if on_one_node else self.node()
        return f"tcp://{host}:{free_port(host)}"

    def start(self, address: str, on_one_node: bool) -> None:
        """Join the other ranks and load the model. Raises NoCuda if the node's GPUs are unreachable. *Collective.*"""
        binding = self._settings.rank_bindings[self._number]
        binding.require_usable()
        if binding.kind == "cuda":
            settings = (PINNED,) if self.shares_device_memory else (PINNED, EXPANDABLE)
            set_default_environment({ALLOCATOR: ",".join(settings)})
            require_cuda()
        if on_one_node and not self.reaches_other_nodes:
            set_default_environment(loopback_environment())
        else:
            set_default_environment(interface_environment(self.node()))
        bind_rendezvous_to_loopback()
        self._load(address)

    def _load(self, address: str) -> None:
        raise NotImplementedError

    def call(self, method: str, *arguments: object, **keywords: object) -> Any:
        """Call a method of the rank's model in its memory phase. *Collective.*"""
        with self._at_work(self.phases[method]):
            return getattr(self._rank, method)(*arguments, **keywords)

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        """Return all tensors on the device between two calls. Empty: the rank cannot sleep."""
        return ()

    def sleep(self) -> Slept:
        """Offload the rank's tensors to host memory. Idempotent."""
        from rlhfless.functions.host_offload import HostOffload, held_bytes
        from rlhfless.functions.sharding import default_device

        device = default_device()
        before = held_bytes(device)
        if self._offload is None:  # the tensors stay the same for the life of the rank
            self._offload = HostOffload(self.kept_on_device())
        self._offload.offload()
        held = held_bytes(device)
        return Slept(SleepTier.HOST, max(before - held, 0), held)

    def wake(self) -> None:
        """Move the tensors back to the device. Idempotent."""
        if self._offload is not None:
            with self._naming_memory_errors("wake"):
                self._offload.restore()

    @property
    def _threads(self) -> int:
        """Threads of a rank with its own cores."""
        return len(self._settings.rank_bindings[self._number].ids)

    @contextlib.contextmanager
    def _at_work(self, phase: str) -> Iterator[None]:
        """Name the phase in out-of-memory errors. Raises Asleep while the rank sleeps."""
        if self._offload is not None and self._offload.offloaded:
            raise Asleep(f"{self.named} rank {self._number} sleeps, and cannot {phase}; wake it first")
        with self._naming_memory_errors(phase):
            yield

    def _naming_memory_errors(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return naming_memory_errors(f"{self.named} rank {self._number}", phase, self._settings.planned)
