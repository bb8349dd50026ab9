"""A function that computes a per-token output of complete groups, such as reference logprobs.

Contains its controller, its ranks, their settings, and the interface of a rank's worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import DistributedSettings
from rlhfless.functions.launching import Launch
from rlhfless.functions.ranks import DistributedFunction, RankActor
from rlhfless.records import FloatArray
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import DType, ModelSpec
from rlhfless.spec.imports import add_import_paths, import_paths, load_target

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTokenSettings(DistributedSettings):
    function: str
    worker: str
    """Import path of a PerTokenWorker."""
    model: ModelSpec
    """The model to load: the policy's, unless the function's declaration names another."""
    dtype: DType
    micro_batch_tokens: int
    share_prefixes: bool
    temperature: float
    logits_elements: int | None = None
    """See OutputHead.chunk_elements."""
    own: Any = None
    """The spec section of a user-defined function."""
    import_paths: tuple[str, ...] = ()
    """Folders from which to import the worker: the driver's `sys.path`."""


class PerTokenWorker(Protocol):
    """One rank of a function that computes a per-token output."""

    def __init__(self, settings: PerTokenSettings, threads: int, mesh: DeviceMesh | None) -> None:
        """Load the model, or with a mesh this rank's part of it (*Collective*)."""
        ...

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        """Return all tensors on the device between two calls; they are offloaded while the function sleeps."""
        ...

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Compute the output `[tokens]` of the whole batch, 0 on tokens that were not generated. *Collective*.

        Also returns the number of prompt tokens that this rank skipped because of a shared prefix.
        """
        ...


PHASE = "logprobs"
"""Phase of the memory plan."""


class PerTokenActor(RankActor[PerTokenSettings]):
    """One rank; its model is a PerTokenWorker."""

    phases: ClassVar[Mapping[str, str]] = {"compute": PHASE}

    def _load(self, address: str) -> None:
        from rlhfless.functions.sharding import join_frozen

        settings = self._settings
        self.named = settings.function
        add_import_paths(settings.import_paths)
        with self._at_work(PHASE):
            self._rank = load_target(settings.worker)(settings, self._threads, join_frozen(self._place(address)))


class PerTokenFunction(DistributedFunction):
    """One replica, split over its ranks."""

    actor = PerTokenActor

    async def __init__(self, settings: PerTokenSettings) -> None:  # type: ignore[misc]
        self.named = settings.function
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> PerTokenSettings:
        """Return the settings of a replica for an allocation with bound devices."""
        spec = launch.spec
        return PerTokenSettings(
            function=kind.name,
            worker=kind.worker,
            model=launch.within_context(kind.model(spec.model)),
            dtype=spec.learner.dtype,
            micro_batch_tokens=spec.learner.pass_tokens,
            share_prefixes=spec.learner.share_prefixes,
            logits_elements=spec.learner.logits_elements,
            temperature=spec.generation.temperature,
            own=kind.settings,
            import_paths=import_paths(),
            **launch.of_ranks(kind, allocation),
        )
