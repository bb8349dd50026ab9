"""What a simulated run knows of its fleet before it has measured it, and the terms of its devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.orchestrator.ledger import NOTHING, Ledger
from rlhfless.records.traces import Trace
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.prices import PriceBook, RentalTerms
from rlhfless.sim.setup import ActorShape, Setup


class SetupEngines:
    """The engines of a setup, by kind of device. Nothing is kept for other runs. Stragglers look like all others."""

    def __init__(self, setup: Setup) -> None:
        self._transport = setup.transport
        self._nodes = {actor.slot_setup.node for actor in setup.actors}
        self._actors: dict[str, ActorShape] = {}
        for actor in setup.actors:
            self._actors.setdefault(actor.slot_setup.allocation.devices[0].kind, actor)

    def model(self, kind: str) -> EngineModel:
        """Return the latency model of engines on a kind of device."""
        return self._actors[kind].prices.model

    def expected_s(self, kind: str) -> float:
        return self._actors[kind].slot_setup.start_s

    def expected_load_s(self, kind: str) -> float:  # noqa: ARG002
        """Return the seconds until all actors have loaded their weights, if all start to at once."""
        return sum(map(self._transport.pulls, self._nodes)) * self._transport.pull_s + self._transport.load_s

    def expected_kv_tokens(self, kind: str) -> int:
        shape = self._actors[kind].engine
        return shape.kv_blocks * shape.block_tokens

    def keep(self, kind: str, phases: Mapping[str, float]) -> None: ...


class SetupLedger(Ledger):
    """A ledger whose devices come and go on the terms of a setup."""

    def __init__(self, writer: object, prices: PriceBook, setup: Setup, earlier: Trace | None = None) -> None:
        super().__init__(writer, prices, earlier or NOTHING)  # type: ignore[arg-type]
        self._setup = setup
        for record in earlier.steps if earlier else ():
            self.add_rollouts(record.step, ())

    def keep_up(self, pools: Iterable[ReplicaPool], lag_s: float) -> None:
        """Do nothing: the rows are kept in memory, and a row per holding is enough."""

    def reacquire_s(self, kind: str) -> float:  # noqa: ARG002
        return self._setup.node_s

    def terms(self, kinds: Collection[str]) -> RentalTerms:  # noqa: ARG002
        return self._setup.terms
