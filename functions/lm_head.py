"""The output head: logprobs of given tokens from hidden states, in chunks of logits of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import linear

from rlhfless.scaling.memory import LOGITS_CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Maps hidden states to logits: a linear layer, a scale, a soft cap (Gemma 2, arXiv 2408.00118)."""

    linear: torch.nn.Linear
    scale: float
    soft_cap: float | None
    chunk_elements: int | None = None
    """Elements of the largest block of logits; LOGITS_CHUNK_ELEMENTS if None."""
    fused: bool = False
    """Compute logprobs with rlhfless.functions.head_kernels."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `hidden` [positions, hidden] to logits [positions, vocabulary], float32 or finer."""
        return self.finished(self.linear(hidden))

    def finished(self, products: torch.Tensor) -> torch.Tensor:
        """Map the linear layer's output [positions, vocabulary] to logits, float32 or finer."""
        logits = at_least_float32(products)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Convert `values` to float32 unless their dtype is finer."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def output_head(model: Any, chunk_elements: int | None = None) -> OutputHead:
    """Return a model's output head.

    Scale and soft cap have different names per model family; `load_policy` verifies the result.
    """
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    soft_cap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(model.get_output_embeddings(), float(scale), soft_cap, chunk_elements)


Entropy = Literal["none", "value", "gradient"]
"""Whether to compute an entropy, and whether it has a gradient."""


@dataclass(frozen=True, slots=True)
class HeadPass:
    """The parameters of a pass of the head."""

    head: OutputHead
    temperature: float
    entropy: Entropy = "none"
    backward: bool = False
    """Whether a backward pass may follow."""

    def apply(
        self, function: type[torch.autograd.Function], hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Apply a function of (hidden, weight, bias, targets, HeadPass) that returns logprobs and entropy."""
        layer = self.head.linear
        outputs: tuple[torch.Tensor, ...] = function.apply(hidden, layer.weight, layer.bias, targets, self)  # type: ignore[no-untyped-call]
        return outputs


def head_logprobs(
    head: OutputHead, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: Entropy = "none"
) -> tuple[torch.Tensor, ...]:
    """Return logprobs and, if requested, entropies, [positions] each.

    With several chunks, the backward pass recomputes each chunk's logits.
    """
    if len(targets) > rows_of(head):
        return HeadPass(head, temperature, entropy).apply(_ChunkedHead, hidden, targets)
    everything = _log_softmax(head, head.linear(hidden), temperature)
    logprobs = _taken(everything, targets)
    if entropy == "none":
        return (logprobs,)
    return logprobs, _entropy(everything if entropy == "gradient" else everything.detach())


def rows_of(head: OutputHead) -> int:
    """Return the positions in the largest block of logits."""
    return max(1, (head.chunk_elements or LOGITS_CHUNK_ELEMENTS) // head.linear.weight.shape[0])


def _log_softmax(head: OutputHead, products: torch.Tensor, temperature: float) -> torch.Tensor:
    """Map the head's linear output to logprobs of all tokens, both [positions, vocabulary]."""
    logits = head.finished(products)
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _taken(everything: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return everything.gather(1, targets.unsqueeze(1)).squeeze(1)


def _entropy(everything: torch.Tensor) -> torch.Tensor:
    return -(everything.exp() * everything).sum(-1)


class _ChunkedHead(torch.autograd.Function):
    """The head with the logits of `rows_of` positions at a time.

    hidden [positions, hidden], weight, bias, targets [positions] -> logprobs and entropy, [positions] each. The
    chunks' weight gradients are summed in float32 or wider: in bfloat16 the sum of 25 chunks would lose most of the
    last chunks' contributions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        asked: HeadPass,
    ) -> tuple[torch.Tensor, ...]:
        parts, rows = [], rows_of(asked.head)
        for part, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            everything = _log_softmax(asked.head, linear(part, weight, bias), asked.temperature)
            logprobs = _taken(everything, target)
            parts.append((logprobs,) if asked.entropy == "none" else (logprobs, _entropy(everything)))
        outputs = tuple(map(torch.cat, zip(*parts, strict=True)))
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.asked = asked
        if asked.entropy == "value":
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        asked: HeadPass = ctx.asked
        of_hidden, rows = torch.empty_like(hidden), rows_of(asked.head)
        wide = torch.promote_types(weight.dtype, torch.float32)
        # A frozen head has no gradient, which would take as much memory as the head.
        of_weight, of_bias = (
            torch.zeros_like(each, dtype=wide) if needed else None
            for each, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        with_entropy = asked.entropy == "gradient"
        used = gradients if with_entropy else gradients[:1]
        chunks = (torch.split(each, rows) for each in (hidden, targets, of_hidden, *used))
        for part, target, result, *upstream in zip(*chunks, strict=True):
            products = linear(part, weight, bias).requires_grad_()
            with torch.enable_grad():
                everything = _log_softmax(asked.head, products, asked.temperature)
                outputs = [_taken(everything, target), *([_entropy(everything)] if with_entropy else [])]
            (slope,) = torch.autograd.grad(outputs, products, upstream)
            result.copy_(slope @ weight)
            if of_weight is not None:
                of_weight += slope.T @ part
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=wide)
        return of_hidden, *in_format(weight, of_weight, of_bias), None, None


def in_format(weight: torch.Tensor, *sums: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Convert gradient sums to the dtype of the weight."""
    return tuple(None if total is None else total.to(weight.dtype) for total in sums)
