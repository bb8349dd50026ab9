"""Ledgers of a run."""

from __future__ import annotations

from pathlib import Path

from rlhfless.orchestrator.ledger import Ledger
from rlhfless.records.traces import TraceMeta, TraceWriter
from rlhfless.scaling.prices import load_price_book


def ledger_in(folder: Path) -> Ledger:
    prices = load_price_book(None)
    return Ledger(TraceWriter(folder, TraceMeta("run", 1, prices.snapshot(), {}, {}), False), prices)
