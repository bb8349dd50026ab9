"""The policy as a network: load it, and compute the logprobs of a packed batch's response tokens.

The learner and the reference function share this path, so that their logprobs differ by the weights alone.

Forward passes: a batch is cut into micro-batches within a token budget (rlhfless.functions.batching). A micro-batch
is either padded on the right: under causal attention nothing looks to the right, so no attention mask is built and
the kernel's own causal path is used. Or it is one row without padding that computes shared prefixes once
(rlhfless.functions.prefix_attention); with FlashAttention on GPUs it always is. The last token of a sequence
predicts nothing and is not fed. The output head runs only where a response token is predicted
(rlhfless.functions.lm_head).

Invariants: a token's logprob depends only on its own sequence (not on its neighbours, order or padding), up to the
rounding of differently shaped matrix products. Dropout is always off: otherwise the ratio of two passes would be
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions import sharding
from rlhfless.functions.batching import NO_SEQUENCES, MicroBatch
from rlhfless.functions.lm_head import Entropy, OutputHead, head_logprobs, output_head
from rlhfless.functions.prefix_attention import packed_row
from rlhfless.functions.routers import Routers
from rlhfless.prefixes.packing import (
    NEVER,
    PackedSegments,
    Packing,
)
from rlhfless.records import FloatArray, IntArray
from rlhfless.records.routes import Rows
from rlhfless.spec import DType

CHECK_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Difference between two passes with the same weights that rounding explains, relative to the largest logit."""

NOT_SHARED: Mapping[str, Any] = MappingProxyType({})
"""The layout of a pass without shared prefixes."""

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class PolicyNetwork:
    """A causal language model, split into decoder and head."""

    model: PreTrainedModel
    decoder: torch.nn.Module
    head: OutputHead
    device: torch.device
    compute_dtype: torch.dtype
    """Dtype of matrix products."""
    mesh: DeviceMesh | None = None
    """All ranks of the process group, over which its parameters are split; None if they are not split."""
    packing: Packing = NEVER
    """When to pack sequences into one row that computes shared prefixes once."""

    varlen: bool = False
    """Every pass is a row of sequences without padding, computed by FlashAttention."""

    routers: Routers | None = None
    """Of a mixture of experts that is trained."""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def hidden_states(self, tokens: torch.Tensor, **shared: Any) -> torch.Tensor:
        """Map `tokens` [batch, width], padded on the right, to [batch, width, hidden].

        For a packed row, `shared` has its `packed_row`.
        """
        output = self.decoder(input_ids=tokens, use_cache=False, **shared)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(*arguments)` as one forward pass, gathering each group of a sharded model once.

        *Collective*.

        Tensors that a gradient must flow from must be in its result, alone or in a tuple.
        """
        return function(*arguments) if self.mesh is None else getattr(self.model, sharding.INSIDE)(function, *arguments)

    def in_step(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Append empty micro-batches until all ranks have the same number. *Collective*."""
        return [*parts, *[NO_SEQUENCES] * (self.most(len(parts)) - len(parts))]

    def most(self, count: int) -> int:
        """Return the largest of all ranks' counts. *Collective*."""
        if self.mesh is None or self.mesh.size() == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def settle(self) -> None:
        """Free the gathered parameters, before the shards are written to. *Collective*."""
        if self.mesh is not None:
            sharding.settle(self.model)


@dataclass(frozen=True, slots=True)
class ResponseLogprobs:
    """Values of the response tokens of a batch, in its order."""

    logprobs: torch.Tensor  # [response tokens], float32
    entropy: torch.Tensor  # [response tokens], float32, nats; with a gradient only if requested


def policy_of(
    model: Any,
    device: torch.device,
    compute_dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    logits_elements: int | None = None,
    head: Callable[[Any, int | None], OutputHead] = output_head,
) -> PolicyNetwork:
    """Return the network of a model that is on `device`. `logits_elements`: see OutputHead.chunk_elements."""
    decoder = model.get_decoder()
    if decoder is model:  # transformers does not find that of Llama 4's text model
        decoder = model.model
    return PolicyNetwork(model, decoder, head(model, logits_elements), device, compute_dtype, mesh)


Outputs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""A head: (hidden states [positions, hidden], their next tokens [positions]) -> tensors [positions]."""


def response_logprobs(
    policy: PolicyNetwork,
    batch: PackedBatch,
    temperature: float,
    packed: PackedSegments | None = None,
    *,
    entropy_gradient: bool = False,
) -> ResponseLogprobs:
    """Return logprobs at `temperature` of all response tokens of `batch`; see `response_outputs`."""
    outputs = logprob_outputs(policy, temperature, "gradient" if entropy_gradient else "value")
    return ResponseLogprobs(*response_outputs(policy, batch, outputs, packed))


def logprob_outputs(policy: PolicyNetwork, temperature: float, entropy: Entropy = "none") -> Outputs:
    """Return the head that computes logprobs at `temperature`, and entropies if requested."""
    compute = head_logprobs
    if policy.head.fused:
        from rlhfless.functions.head_kernels import fused_logprobs as compute  # imports triton
    return partial(compute, policy.head, temperature=temperature, entropy=entropy)


def response_outputs(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, packed: PackedSegments | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a head's outputs `[response tokens]` for all response tokens of `batch`, in one forward pass.

    The batch is one micro-batch. With `packed`, the layout of its sequences without their last tokens, shared
    prefixes are computed once. Gradients flow to the parameters unless disabled by the caller. Without responses a
    single token is run and the outputs are empty: each rank of a sharded model must take part in every pass and its
    backward pass.
    """
    batch = batch.conversations
    if not batch.response_mask.any():
        if policy.routers is not None:
            policy.routers.begin(None)
        token = torch.zeros(1, dtype=torch.int64, device=policy.device)
        return tuple(each[:0] for each in policy.inside(_passed, policy, token[None], token, token, outputs))
    if packed is None and policy.varlen:
        packed = PackedSegments.side_by_side(batch.lengths - 1)
    targets = torch.from_numpy(batch.tokens[batch.response_mask]).to(policy.device)
    tokens, predictors = _padded(batch) if packed is None else _in_one_row(batch, packed)
    if policy.routers is not None:
        place = fed_places(batch, packed)
        policy.routers.begin(policy.routers.routed(batch, place, tokens.numel(), policy.device))
    shared = NOT_SHARED if packed is None else packed_row(packed, policy.device, varlen=policy.varlen)
    fed = (tokens.to(policy.device), predictors.to(policy.device), targets, outputs, shared)
    passed: tuple[torch.Tensor, ...] = policy.inside(_passed, policy, *fed)
    return passed


def fed_places(batch: PackedBatch, packed: PackedSegments | None) -> IntArray:
    """Return the flat positions of the fed tokens in a pass, `[fed]`: all but the last of each sequence."""
    if packed is not None:
        return packed.index
    width = int(batch.lengths.max()) - 1
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    return (batch.sequence_id * width + batch.positions)[fed]


def _padded(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fed tokens `[sequences, width]`, and the flat positions `[response tokens]` that predict responses."""
    width = int(batch.lengths.max()) - 1
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    flat = batch.sequence_id * width + batch.positions
    padded = np.zeros(batch.sequences * width, dtype=np.int64)
    padded[flat[fed]] = batch.tokens[fed]
    predictors = torch.from_numpy(flat[batch.response_mask] - 1)
    return torch.from_numpy(padded).view(batch.sequences, width), predictors


def _in_one_row(batch: PackedBatch, packed: PackedSegments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a row `[1, width]` of this layout."""
    fed = batch.tokens[batch.positions < batch.lengths[batch.sequence_id] - 1]
    # A sequence's first token is never generated, so the token before a generated one is in its own sequence, and fed.
    before = np.flatnonzero(batch.response_mask) - batch.sequence_id[batch.response_mask] - 1
    return torch.from_numpy(fed[packed.source])[None], torch.from_numpy(packed.index[before])


def _passed(
    policy: PolicyNetwork,
    tokens: torch.Tensor,
    predictors: torch.Tensor,
    targets: torch.Tensor,
    outputs: Outputs,
    shared: Mapping[str, Any] = NOT_SHARED,
) -> tuple[torch.Tensor, ...]:
    """Map `tokens` [batch, width] to `outputs` of `targets` [response tokens].

    The flat positions `predictors` [response tokens] predict the targets. `shared`: see PolicyNetwork.hidden_states.
    """
    hidden = policy.hidden_states(tokens, **shared).flatten(0, 1).index_select(0, predictors)
    first, *others = outputs(hidden, targets)
    return first.clone(), *others  # FSDP hooks the result, and warns about views


@torch.no_grad()
def recorded_outputs(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, parts: Sequence[MicroBatch]
) -> tuple[FloatArray, Rows]:
    """Return the first output of a head `[tokens]`, and the routes `[tokens, layers, k]` of the tokens, -1 where none
    was fed. *Collective*. The network has routers."""
    assert policy.routers is not None, "asked of a mixture of experts"
    rows = np.full((len(batch.tokens), policy.routers.layers, policy.routers.k), -1, dtype=np.int16)
    dtype = torch.promote_types(policy.compute_dtype, torch.float32)
    values = torch.zeros(len(batch.tokens), dtype=dtype).numpy()
    policy.routers.recording = True
    try:
        for micro_batch in policy.in_step(parts):
            part = select(batch, micro_batch.indices)
            found, *_ = response_outputs(policy, part, outputs, micro_batch.packed)
            if not len(micro_batch.indices):
                continue
            source = batch.tokens_of(micro_batch.indices)
            values[source[part.response_mask]] = found.cpu().numpy()
            packed = micro_batch.packed
            if packed is None and policy.varlen:
                packed = PackedSegments.side_by_side(part.conversations.lengths - 1)
            read = part.conversations
            fed = read.positions < read.lengths[read.sequence_id] - 1
            rows[source[fed]] = policy.routers.recorded()[fed_places(read, packed)]
    finally:
        policy.routers.recording = False
    policy.settle()
    return values, rows


@torch.no_grad()
def outputs_of(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, parts: Sequence[MicroBatch], width: int = 1
) -> FloatArray:
    """Return the first output of a head `[tokens]`, or the first `width` as `[tokens, width]`, without a gradient.
    *Collective* if the network is sharded.

    An output is 0 on prompt tokens and on sequences in no micro-batch.
    """
    dtype = torch.promote_types(policy.compute_dtype, torch.float32)
    values = torch.zeros(len(batch.tokens), width, dtype=dtype).numpy()
    for micro_batch in policy.in_step(parts):
        part = select(batch, micro_batch.indices)
        found = response_outputs(policy, part, outputs, micro_batch.packed)[:width]
        source = batch.tokens_of(micro_batch.indices)
        values[source[part.response_mask]] = torch.stack(found, 1).cpu().numpy()
    policy.settle()
    return values[:, 0] if width == 1 else values
