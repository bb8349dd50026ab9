"""The base of a rank's Ray actor: devices, signs of life, rendezvous, sleep."""

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
    """The rank sleeps: its tensors are in the host's memory."""


S = TypeVar("S", bound=DistributedSettings)


class RankActor(Generic[S]):
    """Rank `rank` of a function."""

    named = ""
    """Name of the function in errors."""
    phases: ClassVar[Mapping[str, str]] = {}
    """The methods of `_rank` that `call` may call, with their phase of the memory plan."""
    _rank: Any
    """The model of this rank; set by `_load`."""
    _offload: HostOffload | None = None
    """Made by the first sleep."""

    def __init__(self, settings: S, rank: int) -> None:
        settings.rank_bindings[rank].bind()
        self._settings = settings
        self._number = rank

    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="signs_of_life")
    def alive(self) -> None:
        """Answer also while the rank computes."""

    def node(self) -> str:
        """Return the address of this rank's node."""
        return node_address()

    @property
    def shares_device_memory(self) -> bool:
        """Whether other processes read this rank's GPU memory."""
        return False

    @property
    def reaches_other_nodes(self) -> bool:
        """Whether the rank joins process groups with other nodes, apart from the group of its ranks."""
        return False

    @property
    def _node_id(self) -> str:
        """Ray's id of this rank's node."""
        return self._settings.rank_bindings[self._number].node

    def rendezvous(self, on_one_node: bool) -> str:
        """Return an address for the ranks' rendezvous on this node: on loopback if no other node has a rank."""
        host = LOOPBACK if on_one_node else self.node()
        return f"tcp://{host}:{free_port(host)}"

    def start(self, address: str, on_one_node: bool) -> None:
        """Join the other ranks and load the model. Raises NoCuda on a node whose GPUs it does not reach.
        *Collective.*"""
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
        """Call a method of the rank's model in its phase. *Collective.*"""
        with self._at_work(self.phases[method]):
            return getattr(self._rank, method)(*arguments, **keywords)

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        """Return all tensors on the device between two calls. None: the rank cannot sleep."""
        return ()

    def sleep(self) -> Slept:
        """Offload the rank's tensors to the host's memory. Idempotent."""
        from rlhfless.functions.host_offload import HostOffload, held_bytes
        from rlhfless.functions.sharding import default_device

        device = default_device()
        before = held_bytes(device)
        if self._offload is None:  # the tensors are the same ones for the life of the rank
            self._offload = HostOffload(self.kept_on_device())
        self._offload.offload()
        held = held_bytes(device)
        return Slept(SleepTier.HOST, max(before - held, 0), held)

    def wake(self) -> None:
        """Move the tensors back. Idempotent."""
        if self._offload is not None:
            with self._naming_memory_errors("wake"):
                self._offload.restore()

    @property
    def _threads(self) -> int:
        """Threads of a rank with cores of its own."""
        return len(self._settings.rank_bindings[self._number].ids)

    @contextlib.contextmanager
    def _at_work(self, phase: str) -> Iterator[None]:
        """Report a lack of memory with its phase. Raises Asleep while the rank sleeps."""
        if self._offload is not None and self._offload.offloaded:
            raise Asleep(f"{self.named} rank {self._number} sleeps, and cannot {phase}; wake it first")
        with self._naming_memory_errors(phase):
            yield

    def _naming_memory_errors(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return naming_memory_errors(f"{self.named} rank {self._number}", phase, self._settings.planned)
