"""The policy as a network: load it, and compute the logprobs of a packed batch's response tokens.

The learner and the reference function share this path, so that their logprobs differ by the weights alone.

How a batch is forwarded. It is cut into micro-batches within a budget of tokens (rlhfless.functions.batching). Either
each is padded on the right: under causal attention nothing looks to the right, so no attention mask is built and the
kernel's own causal path is taken. Or it is one row without padding, in which prefixes that sequences share are computed
once (rlhfless.functions.prefix_attention). The last token of a sequence predicts nothing and is not fed. The output
head runs only where a response token is predicted, in chunks of bounded size.

Invariants: a token's logprob depends on its own sequence only (not on its neighbours, order or padding), up
to the rounding of differently shaped matrix products. Dropout is off, always: a ratio of two passes would
be noise.

Deliberately not here: encoder-decoders, bidirectional attention, and heads that are more than a linear
layer with a scale or a soft cap. `load_policy` compares its own logits with the model's and refuses what
differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions.batching import MicroBatches, cut
from rlhfless.functions.loading import load_whole
from rlhfless.functions.prefix_attention import NAME, SharingUnsupported, packed_row
from rlhfless.prefixes.packing import LEAST_SAVED_TOKENS, PackedSegments, SharingSequences
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec

log = logging.getLogger(__name__)

LOGITS_CHUNK_ELEMENTS = 2**25
"""Largest `[positions, vocabulary]` block of logits: 128 MiB in float32. With a vocabulary of 150,000 that is
220 rows, still a well shaped matrix product; all logits of 8192 tokens at once would take 5 GB."""

CHECK_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Difference of two passes with the same weights that rounding explains, relative to the largest logit."""

SHARING_CHECK_TOKENS = LEAST_SAVED_TOKENS + 8
"""Enough that the prefix of two sequences is shared."""

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Hidden states to logits: a linear layer, a scale, a soft cap (Gemma 2, arXiv 2408.00118)."""

    linear: torch.nn.Linear
    scale: float
    soft_cap: float | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [positions, hidden] -> [positions, vocabulary], in float32 at least."""
        logits: torch.Tensor = self.linear(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model, taken apart into decoder and head."""

    model: PreTrainedModel
    decoder: torch.nn.Module
    head: OutputHead
    device: torch.device
    compute_dtype: torch.dtype
    """Format of matrix products. Where it differs from the parameters' own, autocast casts them per use."""
    shares: bool = False
    """Whether prefixes that sequences share may be computed once."""

    def hidden_states(self, tokens: torch.Tensor, **shared: Any) -> torch.Tensor:
        """`tokens` [batch, width], padded on the right -> [batch, width, hidden]. For a packed row `shared` has its
        `packed_row`."""
        output = self.decoder(input_ids=tokens, use_cache=False, **shared)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Only where parameters have another format: autocast has a price per operation."""
        if self.model.dtype == self.compute_dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


@dataclass(frozen=True, slots=True)
class ResponseLogprobs:
    """Values of the response tokens of a batch, in its order."""

    logprobs: torch.Tensor  # [response tokens], float32
    entropy: torch.Tensor  # [response tokens], float32, nats, no gradient


def default_device() -> torch.device:
    """The GPU that this process was given, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_policy(
    spec: ModelSpec,
    *,
    parameter_dtype: DType,
    compute_dtype: DType,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    share_prefixes: bool = True,
) -> Policy:
    """Load `spec.path` in Hugging Face format, without dropout, to `device` (`default_device` if None). Its `shares` is
    `share_prefixes`, if its attention allows that.

    Raises InputError if weights are missing, odd or not finite; ValueError if this module's logits differ from the
    model's own; and whatever transformers raises for a path that it cannot read.
    """
    device = device or default_device()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a function's output is a log
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    _switch_off_dropout(config)
    model = load_whole(
        AutoModelForCausalLM,
        spec.path,
        "model.path",
        config=config,
        dtype=TORCH_DTYPES[parameter_dtype],
        attn_implementation="sdpa",
        trust_remote_code=spec.trust_remote_code,
    )
    model.to(device)
    policy = Policy(
        model=model,
        decoder=model.get_decoder(),
        head=_output_head(model),
        device=device,
        compute_dtype=TORCH_DTYPES[compute_dtype],
    )
    _check_against_model(policy, spec.path)
    if share_prefixes:
        policy = dataclasses.replace(policy, shares=_can_share(policy, spec.path))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # checkpointing is tied to training mode, which without dropout changes nothing else
    return policy


def response_logprobs(
    policy: Policy, batch: PackedBatch, temperature: float, packed: PackedSegments | None = None
) -> ResponseLogprobs:
    """Logprobs at `temperature` of all response tokens of `batch`, in one forward pass: one micro-batch. With `packed`,
    the layout of its sequences but for their last tokens, prefixes that they share are computed once.

    The gradient flows to the parameters unless it is switched off outside. Without responses nothing is run.
    """
    if not batch.response_mask.any():
        nothing = torch.zeros(0, device=policy.device)
        return ResponseLogprobs(nothing, nothing)
    targets = torch.from_numpy(batch.tokens[batch.response_mask]).to(policy.device)
    with policy.autocast():
        hidden = _predicting(policy, batch) if packed is None else _predicting_packed(policy, batch, packed)
        return _head_logprobs(policy.head, hidden, targets, temperature)


def _predicting(policy: Policy, batch: PackedBatch) -> torch.Tensor:
    """Hidden states from which the response tokens are predicted, `[response tokens, hidden]`."""
    width = int(batch.lengths.max()) - 1
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    flat = batch.sequence_id * width + batch.positions
    padded = np.zeros(batch.sequences * width, dtype=np.int64)
    padded[flat[fed]] = batch.tokens[fed]
    predictors = torch.from_numpy(flat[batch.response_mask] - 1).to(policy.device)
    tokens = torch.from_numpy(padded).view(batch.sequences, width).to(policy.device)
    return policy.hidden_states(tokens).flatten(0, 1).index_select(0, predictors)


def _predicting_packed(policy: Policy, batch: PackedBatch, packed: PackedSegments) -> torch.Tensor:
    """As `_predicting`, from a row in which each shared prefix lies once."""
    fed = batch.positions < batch.lengths[batch.sequence_id] - 1
    row = torch.from_numpy(batch.tokens[fed][packed.source])[None].to(policy.device)
    hidden = policy.hidden_states(row, **packed_row(packed, policy.device))[0]
    # A sequence's first token is never drawn, so the token before a drawn one is in its own sequence, and fed.
    before = np.flatnonzero(batch.response_mask) - batch.sequence_id[batch.response_mask] - 1
    return hidden.index_select(0, torch.from_numpy(packed.index[before]).to(policy.device))


@torch.no_grad()
def token_logprobs(policy: Policy, batch: PackedBatch, temperature: float, micro_batch_tokens: int) -> FloatArray:
    """Old or reference logprobs: `[tokens]`, at `temperature`, 0 on prompt tokens, without a gradient."""
    return logprobs_of(policy, batch, temperature, cut(batch, micro_batch_tokens, may_share=policy.shares))


@torch.no_grad()
def logprobs_of(policy: Policy, batch: PackedBatch, temperature: float, parts: MicroBatches) -> FloatArray:
    """As `token_logprobs`, in these micro-batches."""
    values = np.zeros(len(batch.tokens), dtype=np.float32)
    for micro_batch in parts.parts:
        part = select(batch, micro_batch.indices)
        logprobs = response_logprobs(policy, part, temperature, micro_batch.packed).logprobs.cpu().numpy()
        source = np.repeat(batch.starts[micro_batch.indices], part.lengths) + part.positions
        values[source[part.response_mask]] = logprobs
    return values


def _head_logprobs(
    head: OutputHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> ResponseLogprobs:
    """In chunks; where there are several, the backward pass computes each chunk's logits anew."""
    vocabulary = head.linear.weight.shape[0]
    rows = max(1, LOGITS_CHUNK_ELEMENTS // vocabulary)
    if len(targets) <= rows:
        return ResponseLogprobs(*_chunk_logprobs(head, hidden, targets, temperature))
    chunks = [
        torch.utils.checkpoint.checkpoint(_chunk_logprobs, head, part, target, temperature, use_reentrant=False)
        for part, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    logprobs, entropy = zip(*chunks, strict=True)
    return ResponseLogprobs(torch.cat(logprobs), torch.cat(entropy))


def _chunk_logprobs(
    head: OutputHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden` [positions, hidden], `targets` [positions] -> logprobs and entropy, [positions] each."""
    logits = head.logits(hidden)
    if temperature != 1.0:
        logits = logits / temperature
    everything = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def _switch_off_dropout(config: PretrainedConfig) -> None:
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _output_head(model: Any) -> OutputHead:
    """Scale and soft cap have different names per model family; `_check_against_model` verifies the result."""
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return OutputHead(model.get_output_embeddings(), float(scale), getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def _check_against_model(policy: Policy, path: str) -> None:
    """The model's own logits of a few tokens against ours, ours with padding on the right."""
    tokens = torch.arange(1, 9, device=policy.device).remainder(policy.head.linear.weight.shape[0])[None]
    padded = torch.nn.functional.pad(tokens, (0, 4))
    expected = policy.model(input_ids=tokens, use_cache=False).logits[0].float()
    ours = policy.head.logits(policy.hidden_states(padded)[0, : tokens.shape[1]])
    difference = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    limit = CHECK_TOLERANCE[policy.model.dtype]
    if not difference <= limit:
        raise ValueError(
            f"model {path!r} ({type(policy.model).__name__}) is not supported: its logits differ from those "
            f"of a causal decoder with a linear head by {difference:.2g} of the largest (limit {limit:g})"
        )


@torch.no_grad()
def _can_share(policy: Policy, path: str) -> bool:
    """Whether the model's attention can share prefixes: two sequences with a common prefix, both ways."""
    if not policy.model._supports_attention_backend:
        log.info("model %r reaches its attention by no interface: its prefixes are computed for each sequence", path)
        return False
    vocabulary = policy.head.linear.weight.shape[0]
    rows = torch.arange(1, SHARING_CHECK_TOKENS + 1).remainder(vocabulary).repeat(2, 1)
    rows[1, -2:] = rows[1, -2:].add(1).remainder(vocabulary)
    packed = SharingSequences(rows.flatten().numpy(), np.full(2, SHARING_CHECK_TOKENS)).pack(np.arange(2))
    row = rows.flatten()[torch.from_numpy(packed.source)][None].to(policy.device)
    expected = policy.hidden_states(rows.to(policy.device)).flatten(0, 1)
    policy.model.set_attn_implementation(NAME)
    try:
        ours = policy.hidden_states(row, **packed_row(packed, policy.device))[0, torch.from_numpy(packed.index)]
        difference = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if difference <= CHECK_TOLERANCE[policy.model.dtype]:
            return True
        reason = f"its outputs differ by {difference:.2g} of the largest"
    except SharingUnsupported as error:
        reason = str(error)
    policy.model.set_attn_implementation("sdpa")
    log.info("model %r cannot share prefixes, which are computed for each sequence: %s", path, reason)
    return False
