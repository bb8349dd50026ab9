"""Fitted and roofline latency models against measured runs of vLLM: how far off is each request?

    python benchmarks/latency.py FOLDER [--requests N] [--smoke]

FOLDER holds one folder per run, with meta.json and requests.jsonl as LLMServingSim's `bench` writes them: when each
request was scheduled and had its last token, on RTX PRO 6000 devices. Every model is given arrivals and lengths alone;
the engine is replayed (first come first served, prefill before decode) and the time of each request compared.

    roofline     the data sheet
    kernels      measured kernels of aiconfigurator-core, where that is installed
    fit, half    fitted to the first half of the run's requests, judged on the second
    fit, replay  the same, but by replaying the engine with the KV tokens that meta.json records (`kv_cache_tokens`), or
                 that fit beside the weights by the data sheet: also where requests wait or are preempted
    other model  fitted to the other run, carried over by the ratio of both rooflines, term by term
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engine_fit import Served, fit_by_replay, replayed_s
from smoke import parsed
from where import machine

from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.latency.aiconfigurator import MeasuredKernels
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.fitted import BentEngine, LatencyFit, LinearEngine
from rlhfless.scaling.latency.kernel_tables import NoTables, tables_folder
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.latency.timeline import Array, Requests
from rlhfless.sim.engine import EngineShape
from rlhfless.sim.scenarios.timing import reserved_bytes

CONFIGS: dict[str, dict[str, Any]] = {  # of the models' own config.json
    "meta-llama/Llama-3.1-8B": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "Qwen/Qwen3-32B": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
    },
}


@dataclass(frozen=True)
class Measured:
    """One measured run."""

    name: str
    roofline: Roofline
    asked_s: Array
    requests: Requests
    max_sequences: int
    shape: EngineShape


MEMORY_SHARE, BLOCK_TOKENS = 0.9, 16
"""vLLM's `gpu_memory_utilization`, and tokens of a KV block."""

COUNTS_GRAPHS = (0, 21)
"""The first version of vLLM that takes CUDA graphs out of the memory for KV."""


def shape_of(meta: dict[str, Any], roofline: Roofline) -> EngineShape:
    """The capacity of the engine: of all its data-parallel ranks together, each of which has vLLM's limits."""
    settings, model, ranks = meta["engine_kwargs"], roofline.shape, roofline.data_parallel
    held = model.total_bytes - model.expert_bytes * (1 - 1 / ranks)
    sequences, batch = settings["max_num_seqs"], settings.get("max_num_batched_tokens", 8192)
    graphs = tuple(map(int, meta["vllm_version"].split(".")[:2])) >= COUNTS_GRAPHS
    reserved = reserved_bytes(model, roofline.tensor_parallel, batch, sequences, graphs=graphs)
    memory = (roofline.device.visible_bytes or roofline.device.memory_bytes).value
    share = meta.get("kv_cache", {}).get("gpu_memory_utilization", MEMORY_SHARE)
    left = roofline.tensor_parallel * (memory * share - reserved) - held
    tokens = ranks * int(meta.get("kv_cache_tokens") or left / model.kv_bytes)
    return EngineShape(ranks * sequences, tokens // BLOCK_TOKENS, BLOCK_TOKENS, ranks * batch)


def roofline_of(folder: Path, meta: dict[str, Any]) -> Roofline:
    """The model of a run's engine. Ends the program for settings that no latency model here knows."""
    settings, shape = meta["engine_kwargs"], ModelShape.of_config(CONFIGS[meta["model"]])
    ranks = settings.get("data_parallel_size", 1)
    modelled = {"pipeline_parallel_size": 1, "enable_expert_parallel": ranks > 1 and shape.experts > 0}
    for key, only in modelled.items():
        if settings.get(key, only) != only:
            raise SystemExit(f"{folder}: {key} is {settings[key]}, which is not modelled; leave this run out")
    return Roofline(shape, device_of("rtx-pro-6000"), settings["tensor_parallel_size"], ranks)


def load(folder: Path, count: int | None) -> Measured:
    """Reads a run, or its first `count` requests."""
    meta = json.loads((folder / "meta.json").read_text())
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    rows = sorted(rows, key=lambda row: (row["queued_ts"], row["scheduled_ts"]))[:count]

    def column(name: str) -> Array:
        return np.array([row[name] for row in rows], dtype=np.float64)

    roofline = roofline_of(folder, meta)
    return Measured(
        folder.name,
        roofline,
        column("queued_ts"),
        Requests(
            column("input_toks"),
            np.zeros(len(rows)),
            column("output_toks"),
            column("scheduled_ts"),
            column("last_token_ts"),
        ),
        shape_of(meta, roofline).max_sequences,
        shape_of(meta, roofline),
    )


def by_replay(run: Measured, learn: np.ndarray) -> tuple[LinearEngine, float, float]:
    """Fitted to some requests of a run; and as `error`, of the others, from when they were asked for."""
    requests = run.requests
    served = Served(
        requests.prompt_tokens.astype(np.int64),
        requests.response_tokens.astype(np.int64),
        run.asked_s,
        requests.finished_s,
    )
    found = fit_by_replay(served, run.shape, LinearEngine.of(run.roofline), learn)
    took = replayed_s(found, run.shape, served) - run.asked_s
    real = requests.finished_s - run.asked_s
    return found, float(np.median(np.abs(took / real - 1)[~learn])), float(took.sum() / real.sum() - 1)


def replay(model: EngineModel, asked_s: Array, requests: Requests, max_sequences: int) -> Array:
    """Seconds from being scheduled to the last token, for each request."""
    prompt, length = requests.prompt_tokens.astype(int), requests.response_tokens.astype(int)
    began, took = np.empty(len(asked_s)), np.empty(len(asked_s))
    now, iteration, context, waiting = float(asked_s[0]), 0, 0, 0
    running: list[tuple[int, int]] = []
    while waiting < len(asked_s) or running:
        while waiting < len(asked_s) and len(running) < max_sequences and asked_s[waiting] <= now:
            began[waiting] = now
            now += model.prefill_s(int(prompt[waiting]))
            heapq.heappush(running, (iteration + int(length[waiting]), waiting))
            context += int(prompt[waiting])
            waiting += 1
        if not running:
            now = float(asked_s[waiting])
            continue
        steps = running[0][0] - iteration
        if waiting < len(asked_s) and len(running) < max_sequences:
            steps = min(steps, _until(model, len(running), context, float(asked_s[waiting]) - now))
        now += decode_s(model, len(running), context, steps)
        iteration += steps
        context += steps * len(running)
        while running and running[0][0] == iteration:
            _, done = heapq.heappop(running)
            took[done] = now - began[done]
            context -= int(prompt[done] + length[done])
    return took


def _until(model: EngineModel, sequences: int, context: int, seconds: float) -> int:
    """Iterations until so many seconds have passed, at least 1."""
    each = model.iteration_s(sequences) + model.context_s * context
    return max(int(np.ceil(seconds / each)), 1)


def fitted(run: Measured, learn: np.ndarray) -> BentEngine:
    """Fitted to some requests of a run."""
    fit = LatencyFit(run.roofline)
    fit.observe(run.requests, learn)
    return fit.model()


def measured_kernels(like: Roofline) -> MeasuredKernels:
    """Kernel tables for the same model and devices. Raises NoTables."""
    return MeasuredKernels.of(like.shape, like.device.kind, (like.tensor_parallel, 1), tables_folder())


def without_kernels() -> str:
    """Why there are no kernel tables at all; empty where there are."""
    try:
        tables_folder()
    except NoTables as error:
        return str(error)
    return ""


def carried(model: BentEngine, source: Measured, target: Measured) -> BentEngine:
    """A fit to one model, for another one, by the ratio of their rooflines.

    What each sequence adds is kernels that the roofline does not count; it is carried over like the fixed part.
    """
    here, there = LinearEngine.of(source.roofline), LinearEngine.of(target.roofline)
    fixed = there.fixed_s / here.fixed_s
    return BentEngine(
        model.fixed_s * fixed,
        tuple(slope_s * fixed for slope_s in model.sequence_s),
        model.context_s * there.context_s / here.context_s,
        model.prefill_token_s * there.prefill_token_s / here.prefill_token_s,
        model.prefill_context_s * there.prefill_context_s / here.prefill_context_s,
    )


def error(model: EngineModel, run: Measured, judged: np.ndarray) -> tuple[float, float]:
    """Median absolute error of the judged requests' times, and error of the sum of all requests' times: shares."""
    took = replay(model, run.asked_s, run.requests, run.max_sequences)
    real = run.requests.finished_s - run.requests.started_s
    return float(np.median(np.abs(took / real - 1)[judged])), float(took.sum() / real.sum() - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, help="only the first so many of each run")
    arguments = parsed(parser, requests=200)
    folders = [path.parent for path in sorted(arguments.folder.glob("*/meta.json"))]
    if not folders:
        raise SystemExit(f"{arguments.folder} holds no runs: no <run>/meta.json in it")
    runs = [load(folder, arguments.requests) for folder in folders]
    print(machine())
    if skipped := without_kernels():
        print(f"kernels          skipped: {skipped}")
    print(f"{'run':16} {'model':14} {'median error':>12} {'total':>8}")
    for run in runs:
        everything = np.ones(len(run.asked_s), dtype=bool)
        first = np.arange(len(everything)) < len(everything) // 2
        models: dict[str, tuple[EngineModel, np.ndarray]] = {
            "roofline": (run.roofline, everything),
            "fit, half": (fitted(run, first), ~first),
        }
        with contextlib.suppress(NoTables):
            models["kernels"] = (measured_kernels(run.roofline), everything)
        for other in runs:
            if other is not run:
                whole = fitted(other, np.ones(len(other.asked_s), dtype=bool))
                models["other model"] = (carried(whole, other, run), everything)
        for name, (model, judged) in models.items():
            off, total = error(model, run, judged)
            print(f"{run.name:16} {name:14} {off:12.1%} {total:+8.1%}")
        _, off, total = by_replay(run, first)
        print(f"{run.name:16} {'fit, replay':14} {off:12.1%} {total:+8.1%}")


if __name__ == "__main__":
    main()
