"""The settings of a function that computes a column, for its front and its ranks; and the class that a rank works
with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlhfless.functions.base import RankedSettings
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from rlhfless.algorithms.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSettings(RankedSettings):
    """The settings of a replica."""

    function: str
    worker: str
    """Import path of a ColumnWorker."""
    model: ModelSpec
    """The policy's."""
    dtype: DType
    micro_batch_tokens: int
    share_prefixes: bool
    temperature: float
    logits_elements: int | None = None
    """See OutputHead.chunk_elements."""
    own: Any = None
    """The settings of a function of the user's own: its section of the spec."""
    import_paths: tuple[str, ...] = ()
    """Folders from which to import the worker: the driver's own `sys.path`."""


class ColumnWorker(Protocol):
    """One rank of a function that computes a column."""

    def __init__(self, settings: ColumnSettings, threads: int, mesh: DeviceMesh | None) -> None:
        """Load the model; with a mesh, this rank's part of it. *Collective* then."""
        ...

    def kept_on_device(self) -> Iterable[torch.Tensor]:
        """All tensors that this rank keeps on its device between two calls: they leave it while the function sleeps."""
        ...

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """The column `[tokens]` of the whole batch, 0 on tokens that the model did not draw; and the prompt tokens that
        this rank did not compute, because a sequence with the same prefix had computed them. *Collective*."""
        ...
