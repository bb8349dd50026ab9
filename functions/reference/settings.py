"""The settings of the reference's front and of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned
from rlhfless.spec import DType, ModelSpec


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """The settings of a reference replica."""

    run_id: str
    lease: LeaseTerms
    model: ModelSpec
    dtype: DType
    micro_batch_tokens: int
    share_prefixes: bool
    temperature: float
    rank_bindings: tuple[DeviceBinding, ...]
    call_timeout_s: float
    logits_elements: int | None = None
    """See OutputHead.chunk_elements."""
    planned: Planned = field(default_factory=dict)
    """Of one rank."""
