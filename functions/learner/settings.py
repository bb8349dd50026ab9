"""The settings of the learner's front and of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned
from rlhfless.spec import AdamWSpec, AlgorithmSpec, LearnerSpec, ModelSpec
from rlhfless.weights.address import StoreAddress

if TYPE_CHECKING:
    from rlhfless.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class StoreHome:
    """The learner's side of the weight store."""

    folder: str
    token: str = field(default="", repr=False)
    """If given, the folder is served by HTTP to requests that carry the token."""

    def open(self, host: str) -> WeightStore:
        """The store; if there is a token it is served at `host`, this node's address, from threads of this process as
        long as it lives."""
        # Here, because they bring torch along: seconds of start-up for the front, which never opens the store.
        from rlhfless.weights.http_server import HttpStoreServer
        from rlhfless.weights.store import FolderStore

        if not self.token:
            store = FolderStore(self.folder)
            self.mark()
            return store
        return HttpStoreServer(self.folder, host=host, token=self.token)

    def mark(self) -> None:
        """Show engines that this folder is the learner's (StoreAddress.require_shared). Again with each version: a
        folder that was lost is made anew."""
        if not self.token:
            StoreAddress("folder", self.folder).mark()


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Settings of the learner function."""

    run_id: str
    lease: LeaseTerms
    model: ModelSpec
    learner: LearnerSpec
    optimizer: AdamWSpec
    algorithm: AlgorithmSpec
    temperature: float
    probe_token_ids: tuple[int, ...]
    """The text whose logprobs every published version carries."""
    read_back: bool
    """A published version carries samples of its weights, which engines compare with theirs."""
    store: StoreHome
    rank_bindings: tuple[DeviceBinding, ...]
    call_timeout_s: float
    planned: Planned = field(default_factory=dict)
    """What the memory plan counts for one rank."""
