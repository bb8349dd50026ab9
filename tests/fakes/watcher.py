"""What a pool tells, kept."""

from __future__ import annotations
import asyncio
import time
from typing import Any
import pytest
from fakes.cluster import CALL, FakeCluster, pool_of
from fakes.stage import until
from rlhfless.fleet.cluster import FleetError
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica
from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.scaling.function_kinds import Bounds
from rlhfless.scaling.placement import Allocation, Device


class Watcher:
    """Work that hears of all replicas and has nothing to hand back."""

    over = False

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def joined(self, slot: int) -> None:
        self.heard.append(("joined", slot))

    def missed(self, slot: int) -> None:
        self.heard.append(("missed", slot))

    async def drain(self, replica: Replica) -> None:
        self.heard.append(("drain", replica.name))
