"""Ledgers of a run."""

from __future__ import annotations
import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from rlhfless.fleet.replica import Replica
from rlhfless.functions.base import ReplicaInfo
from rlhfless.loop.ledger import Ledger
from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.scaling.prices import load_price_book


def ledger_in(folder: Path) -> Ledger:
    prices = load_price_book(None)
    return Ledger(TraceWriter(folder, TraceMeta("run", 1, prices.snapshot(), {}, {}), False), prices)
