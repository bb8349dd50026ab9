"""A live fleet without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.fake_cluster import FakeCluster, pool_of
from rlhfless.functions.base import Call, ReplicaInfo
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.orchestrator.live_fleet import LiveFleet
from rlhfless.records import Decision, FunctionName
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.latency.fitted import EngineSpeeds
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.scaling.prices import PriceBook
from rlhfless.spec import RunSpec


class Fleet:
    """A live fleet of two allocations for actors, with scoring and a learner on half a core each."""

    def __init__(
        self,
        folder: Path,
        fewest: int = 1,
        sequences: int = 256,
        hold: Bounds | None = None,
        actors: Any = None,
    ) -> None:
        """`actors`: their pool, if given."""
        self.spec = RunSpec.model_validate(
            {
                "model": {"path": "m"},
                "prompts": {"path": "p"},
                "rewards": [{"type": "exact_match"}],
                "generation": {"max_tokens": 64, "engine": {"max_sequences": sequences}},
                "scaling": {"generation": {"min_actors": fewest, "max_actors": 2}},
            }
        )
        meta = TraceMeta("run", 1, PRICES.snapshot(), {}, {})
        self.folder = folder
        self.ledger = Ledger(TraceWriter(folder, meta, record_tokens=False), PRICES)
        self.cluster = FakeCluster()
        self.actors: Any = actors or pool_of(self.cluster, "a", slots=2, bounds=Bounds(fewest, "min_actors"))
        self.actors["a"].info = ReplicaInfo("a-1", 1, "here", kv_capacity_tokens=5000)
        self.scoring, learner = (
            pool_of(self.cluster, function, bounds=bounds, function=function, given=[HALF_A_CORE])
            for function, bounds in ((FunctionName.SCORING, hold or Bounds()), (FunctionName.LEARNER, Bounds(1)))
        )
        pools = [self.actors, self.scoring, learner]
        speeds = EngineSpeeds(None, 1, 256)
        self.fleet = LiveFleet(self.spec, Call("run", 1, 0), pools, self.ledger, speeds, 100)

    def decisions(self) -> list[Decision]:
        self.ledger.write([])
        return list(read_trace(self.folder).decisions)


PRICES = PriceBook.model_validate(
    {"devices": [{"kind": CPU_KIND, "usd_per_hour": 36.0, "rented_by": "device", "source": "a", "as_of": "2026-11-01"}]}
)


HALF_A_CORE = Allocation.of([Device("cpu-1", CPU_KIND, 1)], 0.5)
