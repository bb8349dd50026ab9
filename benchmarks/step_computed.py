"""Seconds of a GRPO step of 7B on eight H100 by part, computed from assumed rates: nothing is measured here. Pure.

    python benchmarks/step_computed.py [--smoke]

It prints the table of docs/gpus.md: a step of 1,024 samples of 256 + 770 tokens with one update, co-located, side by
side. `before` is the state of 27 November 2026: one file of weights, packed rows by the memory-efficient kernel, the
plain head. `now` has files in parallel, packed rows by FlashAttention, the fused head, and `learner.compile: true`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smoke import print_computed
from weights_computed import MODELS, shared_memory

from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.known_models import known_config
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import layer_token_bytes

SHAPE = ModelShape.of_config(known_config("Qwen/Qwen2.5-7B") or {})
H100 = device_of("h100")
GPUS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 1024, 256, 770
TOKENS = SAMPLES * (PROMPT_TOKENS + RESPONSE_TOKENS) / GPUS
"""Of one GPU."""

PRODUCTS = 0.65
"""Assumed: the share of the peak that matrix products of 8,192 and more rows reach."""

BYTES_PER_S = 0.8 * H100.memory_bytes_per_s.value
"""Assumed: 80 % of the data sheet."""

EFFICIENT, FLASH = (150e12, 100e12), (350e12, 350e12)
"""FLOP/s of attention, forward and backward: published figures of H100, heads of 128."""

LOGIT_BYTES = {False: 94, True: 14}
"""Moved for a logit: by the plain head, counted from its operations; by the fused one the product is written and read,
in both passes, overwritten with its gradient, and read by two products, in bfloat16."""

PASSES = 7
"""Over what a layer keeps of a token, by unfused norms, rotary embeddings and activations: written and read in the
forward pass and when it is computed again, and in the backward pass read, and its gradient written and read."""

FUSED_SHARE = 0.5
"""Assumed: what inductor leaves of that traffic."""

ITERATION_S = 0.012
"""Assumed: an iteration of 128 sequences; their weights and KV alone take 8 ms."""

CHECKS_S, DRIVER_S = 1.0, 1.2
"""Assumed: read-back and probe of a load; collating, rewards and packing."""


def generation(now: bool) -> float:  # noqa: ARG001 - the engine's iteration is the same
    return RESPONSE_TOKENS * ITERATION_S


def products(now: bool) -> float:  # noqa: ARG001
    """With activations computed twice, as the memory plan decides for 7B on eight H100."""
    return 8 * SHAPE.active * TOKENS / (PRODUCTS * H100.flops_per_s.value)


def attention(now: bool) -> float:
    """Half of the context on average; forward twice, backward 2.5 times the operations."""
    operations = 4 * (PROMPT_TOKENS + RESPONSE_TOKENS) / 2 * SHAPE.query_width * SHAPE.layers * TOKENS
    forward, backward = FLASH if now else EFFICIENT
    return operations * (2 / forward + 2.5 / backward)


def elementwise(now: bool) -> float:
    moved = PASSES * layer_token_bytes(SHAPE, "bfloat16") * SHAPE.layers * TOKENS
    return moved * (FUSED_SHARE if now else 1) / BYTES_PER_S


def head(now: bool) -> float:
    """Its memory traffic; its products are among the others."""
    return SAMPLES * RESPONSE_TOKENS / GPUS * SHAPE.vocabulary * LOGIT_BYTES[now] / BYTES_PER_S


def weights(now: bool) -> float:
    """Published and loaded (docs/weights.md), and checked."""
    return shared_memory(MODELS[0], now) + CHECKS_S


def driver(now: bool) -> float:  # noqa: ARG001
    return DRIVER_S


PARTS: Mapping[str, Callable[[bool], float]] = {
    "generation, 128 samples a GPU": generation,
    "learn: matrix products": products,
    "learn: attention": attention,
    "learn: norms, rotary embeddings, activations": elementwise,
    "learn: output head": head,
    "weights: publish, load, read-back, probe": weights,
    "driver, rewards, packing": driver,
}


def step_s(now: bool) -> float:
    """All parts: none overlaps with another."""
    return sum(part(now) for part in PARTS.values())


def table() -> str:
    """The table of docs/gpus.md."""
    rows = [*((name, part(False), part(True)) for name, part in PARTS.items()), ("step", step_s(False), step_s(True))]
    lines = ["| seconds (computed) | before | now |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {before:.1f} | {now:.1f} |" for name, before, now in rows)])


def main() -> None:
    print_computed(__doc__, table)


if __name__ == "__main__":
    main()
