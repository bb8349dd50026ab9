"""Logprobs of engine and learner for a mixture of experts, with and without replayed routes.

    python benchmarks/router_replay.py [--dtypes float32,bfloat16] [--samples 12] [--tokens 96] [--smoke]

A random model of 6.8 M parameters (8 layers, 32 experts, 4 per token) generates, and the learner computes the logprobs
of the same tokens with the same weights. What is left is the rounding of two implementations, and what follows when
it changes the choice of experts.

difference   |learner - engine|, nats: mean and largest
k3           KL divergence of the engine from the learner per token, by the estimator r - 1 - log r
routes       share of (token, layer) whose experts differ; of tokens with at least one such layer
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smoke import parsed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from where import machine

from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.functions.batching import cut
from rlhfless.functions.generation.engine import EngineSettings, Sampled, SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.functions.policy import PolicyNetwork, logprob_outputs, outputs_of, recorded_outputs
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.route_files import RouteFiles
from rlhfless.functions.routers import Routers
from rlhfless.records import Group, Prompt, Rollout
from rlhfless.records.routes import name_of
from rlhfless.spec import DType, EngineSpec, ModelSpec, TimeoutsSpec
from rlhfless.weights.address import StoreAddress

VOCABULARY, PROMPT_TOKENS, PASS_TOKENS = 512, 16, 4096


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    kind: Any = Qwen3MoeConfig
    config = kind(
        vocab_size=VOCABULARY, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.08,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


async def generated(model: Path, routes: Path, dtype: DType, samples: int, tokens: int) -> list[Sampled]:
    """Generate responses with the routes of their tokens."""
    settings = EngineSettings(
        model=str(model),
        tokenizer=str(model),
        dtype=dtype,
        max_model_len=PROMPT_TOKENS + tokens,
        seed=0,
        trust_remote_code=False,
        device="cpu",
        store=StoreAddress("file", str(routes.parent)),
        engine=EngineSpec(kv_cache_gib=0.25, max_sequences=16),
        timeouts=TimeoutsSpec(start_s=300),
        routes_folder=str(routes),
    )
    engine = await VllmEngine.start(settings)
    try:
        return await asyncio.gather(
            *(
                engine.sample(
                    SampleRequest(f"s{i}", prompt(i), seed=i, max_tokens=tokens, temperature=1.0, routes=name_of(1))
                )
                for i in range(samples)
            )
        )
    finally:
        await engine.stop()


def prompt(number: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(3, VOCABULARY, PROMPT_TOKENS).tolist())


def batch_of(sampled: Sequence[Sampled]) -> PackedBatch:
    """Pack the responses as a learner gets them."""
    groups = [
        Group.of(
            Prompt(f"p{number:03}", prompt(number), ""),
            [
                Rollout(
                    f"p{number:03}", 0, number, np.asarray(each.token_ids), np.asarray(each.logprobs, np.float32), "",
                    each.finish_reason, each.version_spans, "actor", 0.0, 0.0, routes=each.routes,
                )
            ],
        )
        for number, each in enumerate(sampled)
    ]  # fmt: skip
    return pack(groups)


def compared(policy: PolicyNetwork, batch: PackedBatch) -> dict[str, float]:
    """Return the differences between engine and learner."""
    parts = cut(batch, PASS_TOKENS, packing=policy.packing).parts
    logprobs = outputs_of(policy, batch, logprob_outputs(policy, 1.0), parts)
    log_ratio = (logprobs - batch.rollout_logprobs)[batch.response_mask].astype(np.float64)
    return {
        "mean": float(np.abs(log_ratio).mean()),
        "largest": float(np.abs(log_ratio).max()),
        "k3": float((np.exp(log_ratio) - 1 - log_ratio).mean()),
    }


def differing(policy: PolicyNetwork, batch: PackedBatch, source: RouteFiles) -> tuple[float, float]:
    """Return the shares of routes, and of tokens with one, that the learner's routers would choose otherwise."""
    parts = cut(batch, PASS_TOKENS, packing=policy.packing).parts
    _, own = recorded_outputs(policy, batch, logprob_outputs(policy, 1.0), parts)
    assert batch.route_file is not None
    assert batch.route_row is not None
    known = batch.route_file > 0
    engine = source.rows(batch.route_files, batch.route_file[known] - 1, batch.route_row[known] - 1)
    other = (np.sort(engine, -1) != np.sort(own[known], -1)).any(-1)
    return float(other.mean()), float(other.any(-1).mean())


def measure(folder: Path, dtype: DType, samples: int, tokens: int) -> dict[str, Any]:
    """Return the figures of one number format."""
    model, routes = folder / "model", folder / dtype / "routes"
    if not model.exists():
        save_model(model)
    batch = batch_of(asyncio.run(generated(model, routes, dtype, samples, tokens)))
    policy = load_policy(ModelSpec(path=str(model), dtype=dtype), parameter_dtype=dtype, compute_dtype=dtype)
    routers = Routers.of(policy.model)
    assert routers is not None
    policy = dataclasses.replace(policy, routers=routers)
    source = RouteFiles(routes, routers.layers, routers.k)
    of_routes, of_tokens = differing(policy, batch, source)
    without = compared(policy, batch)
    routers.source = source
    return {"without": without, "with": compared(policy, batch), "routes": of_routes, "tokens": of_tokens}


def rows(dtype: str, figures: dict[str, Any]) -> list[str]:
    lines = []
    for name in ("without", "with"):
        of = figures[name]
        share = f"{figures['routes']:.2%} / {figures['tokens']:.2%}" if name == "without" else "replayed"
        lines.append(f"| {dtype} | {name} | {of['mean']:.2e} | {of['largest']:.2e} | {of['k3']:.2e} | {share} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parsed(parser, dtypes="bfloat16", samples=2, tokens=8)
    print(machine())
    print("| format | replay | mean | largest | k3 | differing routes / tokens |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="rlhfless-bench-") as folder:
        for dtype in arguments.dtypes.split(","):
            print("\n".join(rows(dtype, measure(Path(folder), dtype, arguments.samples, arguments.tokens))))


if __name__ == "__main__":
    main()
