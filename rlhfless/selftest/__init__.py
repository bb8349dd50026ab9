"""Tests in minutes whether everything a run needs works on this machine, and how fast.

The checks (`report.CHECKS`) run in order on a subject (`subject`): the bundled model, or the user's run. Each has an
outcome with its measurements. The checks call the parts of a real run: engine, learner ranks, store, memory plan. They
add no mechanism, and `rlhfless plan --measured` plans with their measurements (`report`).
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from rlhfless.functions.base import DeviceBinding
from rlhfless.spec import RunSpec


def serve_rank(end: Connection, spec: RunSpec, binding: DeviceBinding, rank: int, ranks: int, meeting: str) -> None:
    """Bind the devices of a rank's process, then serve. The devices must be bound before torch is imported."""
    binding.bind()
    from rlhfless.selftest import rank_work

    rank_work.serve(end, spec, rank, ranks, meeting)
