"""The entry point of a rank's process. Bind its devices before importing anything that imports torch."""

from __future__ import annotations

from multiprocessing.connection import Connection

from rlhfless.functions.base import DeviceBinding
from rlhfless.spec import RunSpec


def begin(end: Connection, spec: RunSpec, binding: DeviceBinding, rank: int, ranks: int, meeting: str) -> None:
    """Bind the devices, then serve."""
    binding.bind()
    from rlhfless.selftest import rank_work

    rank_work.serve(end, spec, rank, ranks, meeting)
