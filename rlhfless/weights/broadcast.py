"""Send one version to all actors at once: the learner's first rank broadcasts its file from GPU to GPU over NCCL.

The learner publishes to an HTTP store as usual (`http`). Each worker of each engine asks the server to join.
Once all members of the group have asked for a version, the learner reads its file in runs of tensors of PACK_BYTES
and broadcasts them. Workers that ask later, or for a version that not every member requests in time, pull it
instead; a replaced engine therefore needs no group, and nobody waits for a lost worker. A group is reused while its
members stay the same. When a broadcast fails, the engines hold half a version: their loads fail, and they are
replaced.

On CPUs, gloo replaces NCCL; the tests use it. Not yet run on GPUs. docs/weights.md explains why vLLM's own NCCL
engine is not used.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from rlhfless.spec import Transport
from rlhfless.weights.check import WeightFileError
from rlhfless.weights.digest import NO_HASHES, PieceHash, tensor_at
from rlhfless.weights.files import read_ahead, read_header, version_of
from rlhfless.weights.http import JOIN, MEMBER, STALL_TIMEOUT_S, HttpStore
from rlhfless.weights.parts import mapped
from rlhfless.weights.store import FolderStore

PACK_BYTES = 64 << 20
"""Bytes per broadcast: small tensors are sent together, a larger one alone."""

GATHER_S = 10.0
"""Seconds that members wait for the rest of the group."""

_WAIT_RAISES = "TORCH_NCCL_BLOCKING_WAIT"

log = logging.getLogger(__name__)

Tensors = Sequence[Sequence[Any]]
"""Name, dtype, shape, first byte and end of tensors, in file order."""


class Broadcaster:
    """The learner's side of broadcasts: gathers the members and sends."""

    def __init__(self, folder: str | Path, host: str, size: int) -> None:
        """`host`: address of this node; `size`: number of group members, not counting the learner."""
        self._store, self._host, self._size = FolderStore(folder), host, size
        self._changed = threading.Condition()
        self._asked: dict[str, list[str]] = {}
        self._answers: dict[str, Mapping[str, Any] | None] = {}
        self._sending = threading.Lock()
        self._group: _Group | None = None

    def join(self, name: str, member: str) -> Mapping[str, Any] | None:
        """Wait for the group and return how to receive the version, or None if the member must pull it.

        `name` is the file name of the version.
        """
        with self._changed:
            if name in self._answers:
                return None
            asked = self._asked.setdefault(name, [])
            asked += [member] if member not in asked else []
            if len(asked) == self._size:
                self._decide(name, self._start_broadcast(name, asked))
            elif not self._changed.wait_for(lambda: name in self._answers, GATHER_S):
                log.warning("%d of %d workers have asked for %s; they pull it", len(asked), self._size, name)
                self._decide(name, None)
            return self._answers[name]

    def _decide(self, name: str, answer: Mapping[str, Any] | None) -> None:
        """Answer all waiting members; the last two answers are kept for late members."""
        self._answers[name] = answer
        for old in list(self._answers)[:-2]:
            del self._answers[old], self._asked[old]
        self._changed.notify_all()

    def _start_broadcast(self, name: str, members: list[str]) -> Mapping[str, Any]:
        """Start a thread that sends a version, and return the members' instructions for receiving it."""
        group = self._group
        if group is None or group.failed or set(group.ranks) != set(members):
            group = self._group = _Group(self._host, members)
        memory = mapped(self._store.path(version_of(name)))
        begin, layout, _ = read_header(memory)
        packs = list(_packs(layout))
        data = torch.frombuffer(memory, dtype=torch.uint8)
        threading.Thread(
            target=self._send, args=(name, data[begin:], packs, group), name="broadcast", daemon=True
        ).start()
        return {"host": self._host, "port": group.store.port, "ranks": group.ranks, "packs": packs}

    def _send(self, name: str, data: torch.Tensor, packs: list[Tensors], group: _Group) -> None:
        try:
            with self._sending:
                device = _device()
                group.joined = group.joined or _form_group(group.store, 0, len(group.ranks) + 1, device)
                parts = ((pack[0][0], data[pack[0][3] : pack[-1][4]]) for pack in packs)
                for _, part in read_ahead(parts, device):
                    _broadcast(group.joined, part.to(device))
        except Exception:  # from any library; the members' receives fail as well
            group.failed, group.joined = True, None  # the members see closed connections
            log.exception("the broadcast of %s broke off", name)


class _Group:
    """Members of a broadcast and their rendezvous store."""

    def __init__(self, host: str, members: list[str]) -> None:
        self.ranks = {member: rank for rank, member in enumerate(members, 1)}
        listener = socket.create_server((host, 0), backlog=len(members))
        self.store = dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=STALL_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.joined: Any = None
        self.failed = False


class BroadcastReader:
    """A `WeightReader` that receives broadcast versions and pulls all others."""

    def __init__(self, pulled: HttpStore) -> None:
        self._pulled = pulled
        self._member = uuid4().hex
        self._answer: tuple[str, Mapping[str, Any] | None] = ("", None)
        self._group: tuple[int, Any] = (0, None)

    @property
    def transport(self) -> Transport:
        return self._pulled.transport if self._answer[1] is None else "nccl"

    @property
    def of_piece(self) -> PieceHash:
        return self._pulled.of_piece

    def read(self, location: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the version's tensors; raises WeightFileError also if a broadcast fails."""
        answer = self._ask_to_join(location)
        if answer is None:
            yield from self._pulled.read(location)
            return
        try:
            yield from self._receive(answer)
        except (RuntimeError, dist.DistError) as error:
            raise WeightFileError(f"the broadcast of weights {location} broke off: {error}") from error

    def hashes(self, location: str) -> Mapping[str, bytes]:
        """Return the hashes of a pulled version; none for a broadcast one."""
        return NO_HASHES if self._ask_to_join(location) else self._pulled.hashes(location)

    def release(self) -> None:
        """Reset the answer, so that the next load asks again."""
        self._answer = ("", None)

    def _ask_to_join(self, location: str) -> Mapping[str, Any] | None:
        """Return the server's answer, asking once per load."""
        if self._answer[0] != location:
            reply = None
            try:
                reply = self._pulled.query(location, JOIN, f"{MEMBER}{self._member}", GATHER_S + STALL_TIMEOUT_S)
            except OSError:
                log.warning("no broadcast of %s: the learner does not answer; pulled instead", location)
            self._answer = (location, json.loads(reply) if reply else None)
        return self._answer[1]

    def _receive(self, answer: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        device, port = _device(), answer["port"]
        if self._group[0] != port:
            timeout = timedelta(seconds=STALL_TIMEOUT_S)
            store = dist.TCPStore(answer["host"], port, is_master=False, timeout=timeout)
            ranks = answer["ranks"]
            self._group = (port, _form_group(store, ranks[self._member], len(ranks) + 1, device))
        for pack in answer["packs"]:
            first = pack[0][3]
            buffer = torch.empty(pack[-1][4] - first, dtype=torch.uint8, device=device)
            _broadcast(self._group[1], buffer)
            for name, dtype_named, shape, start, _ in pack:
                yield name, tensor_at(buffer, start - first, dtype_named, shape)


def _device() -> torch.device:
    """Return the CUDA device that this process is bound to, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _form_group(store: dist.TCPStore, rank: int, size: int, device: torch.device) -> Any:
    """Create a process group separate from torch's default one, blocking until all members join."""
    timeout = timedelta(seconds=STALL_TIMEOUT_S)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Make waits raise; otherwise torch ends the process when a member is lost. Read when a group is created.
    given = os.environ.get(_WAIT_RAISES)
    os.environ[_WAIT_RAISES] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_WAIT_RAISES]
        if given is not None:
            os.environ[_WAIT_RAISES] = given


def _broadcast(group: Any, data: torch.Tensor) -> None:
    """Broadcast `data` from the learner (rank 0) into the other members' `data`."""
    if data.numel():
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group.broadcast([data], options).wait()


def _packs(layout: Tensors) -> Iterator[Tensors]:
    """Yield runs of adjacent tensors that are sent together."""
    pack: list[Sequence[Any]] = []
    for tensor in layout:
        if pack and tensor[4] - pack[0][3] > PACK_BYTES:
            yield pack
            pack = []
        pack.append(tensor)
    if pack:
        yield pack
