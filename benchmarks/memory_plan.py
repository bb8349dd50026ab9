"""The memory plan of the learner against the learner's own code, for models and ranks that are not here.

    python benchmarks/memory_plan.py [--smoke]

A step of the real learner runs without data (rlhfless.functions.rehearsal): torch counts what a rank holds at
most. Beside it stands the plan's figure of the phase `learn`, made from the sizes alone. With the published sizes of
Qwen2.5-7B on 8 ranks, Qwen2.5-32B on 16 and Llama-3.1-70B on 64, in bfloat16 with activation checkpointing. No device
is needed, and none is measured: memory outside torch's tensors is not in either figure.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from smoke import parsed
from transformers import LlamaConfig, Qwen2Config
from where import machine

from rlhfless.functions.rehearsal import peak_bytes
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import GIB, LOGITS_CHUNK_ELEMENTS, Sharded, learn_phases
from rlhfless.spec import LearnerSpec

WIDTH = 4096
"""Tokens of a sequence; a micro-batch has two."""

ROWS = 2

LEARNER = LearnerSpec(dtype="bfloat16", gradient_checkpointing=True)

CASES: dict[str, tuple[Any, int]] = {
    "7B": (
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
        8,
    ),
    "32B": (
        Qwen2Config(
            vocab_size=152064,
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        16,
    ),
    "70B": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        64,
    ),
}


def compared(name: str, layers: int | None, width: int) -> dict[str, Any]:
    """One model: what the plan counts and what the code holds, per rank."""
    config, ranks = CASES[name]
    config.num_hidden_layers = layers or config.num_hidden_layers
    start_s = time.perf_counter()
    held = peak_bytes(config, LEARNER, ranks, ROWS, width)
    how = Sharded(ranks, LEARNER.dtype, LEARNER.recomputes)
    shape = ModelShape.of_config(config.to_dict())
    planned = learn_phases(shape, ROWS * width, how, LOGITS_CHUNK_ELEMENTS)[0].size_bytes
    return {
        "ranks": ranks,
        "layers": config.num_hidden_layers,
        "tokens": ROWS * width,
        "planned_gib": round(planned / GIB, 2),
        "held_gib": round(held["total"] / GIB, 2),
        "plan_ratio": round(planned / held["total"], 3),
        "parts_gib": {part: round(size / GIB, 2) for part, size in held.items() if size > GIB / 100},
        "took_s": round(time.perf_counter() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="some of " + ", ".join(CASES))
    parser.add_argument("--layers", type=int, default=0, help="of each model; 0 for all")
    parser.add_argument("--width", type=int, default=WIDTH)
    arguments = parsed(parser, models="7B", layers=2, width=256)
    result: dict[str, Any] = {"machine": machine()}
    for name in arguments.models.split(","):
        result[name] = compared(name, arguments.layers or None, arguments.width)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
