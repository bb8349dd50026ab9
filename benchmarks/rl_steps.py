"""Published RL steps against the simulator's clock: fitted to all of them but one, how far off is that one?

    python benchmarks/rl_steps.py STEPS.csv [--share 0.5] [--smoke]

STEPS.csv has a row per published step: id, model, devices, kind, generation_tp, prompts, samples,
mean_response_tokens, max_response_tokens, schedule (sync or one_step_off) and step_s. Lengths were not published: they
are drawn lognormal, cut off at the limit, with the published mean and an assumed spread. Generation is simulated, with
the runtime floor of `engine.runtime_s`. The rest is

    6 operations per parameter and token for learning, 1.5 for old and 1.5 for reference logprobs, by peak x MFU
    + the scenarios' seconds of each step whatever its size

where the MFU, and with experts the operations per second, is fitted (`learner.expert_flops_per_s`). Steps that overlap
take the longer of generation and the rest, at the best split of the devices, or with `--share` of them for generation
(NeMo-RL's recipes have half).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from smoke import parsed
from where import machine

from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.scenarios import Scenario
from rlhfless.sim.scenarios.timing import operation_s, pass_operation_s
from rlhfless.sim.scenarios.work import LearnerTimingSpec

SPREAD = 0.6
"""Standard deviation of the log of the lengths: an assumption."""

PROMPT_TOKENS = 200
"""Median prompt: an assumption."""

OPERATIONS = 9.0
"""Per parameter and token, outside generation; a forward pass alone runs at 8/6 of the rate (`learner.mfu`)."""

SPLITS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Shares of the devices that draw, where generation and the learner have devices of their own."""

DEVICES_PER_NODE = 8

GRID = tuple(np.geomspace(0.1, 0.5, 33).tolist())
EXPERT_GRID = tuple(np.geomspace(30e12, 200e12, 33).tolist())
"""Values that are tried of `mfu`, and of `expert_flops_per_s`: each 5 and 6 % above the one before."""


def _config(sizes: Sequence[int], **more: int) -> Mapping[str, object]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "intermediate_size", "vocab_size"), sizes, strict=True)) | more


CONFIGS: dict[str, Mapping[str, object]] = {  # of the models' own config.json
    "Llama-3.1-8B": BUILT_IN["llama-3.1-8b"],
    "Qwen3-32B": BUILT_IN["qwen3-32b"],
    "Qwen3-30B-A3B": BUILT_IN["qwen3-30b-a3b"],
    "Qwen3-235B-A22B": BUILT_IN["qwen3-235b-a22b"],
    "DeepSeek-V3": _config(
        (61, 7168, 128, 128, 18432, 129280),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
    ),
    "Nemotron-3-Nano-30B-A3B": _config((52, 2688, 32, 2, 1856, 131072), mamba_num_heads=64),
    "Qwen3-8B": BUILT_IN["qwen3-8b"],
    "Qwen2.5-Math-1.5B": BUILT_IN["qwen2.5-1.5b"],
    "deepseek-llm-7b": _config((30, 4096, 32, 32, 11008, 102400)),
}


@dataclass(frozen=True)
class Part:
    """A split of the devices."""

    generation_s: float
    learner_devices: int


@dataclass(frozen=True)
class Known:
    """A published step, and what is simulated of it."""

    name: str
    step_s: float
    shape: ModelShape
    kind: str
    tokens: float
    overlaps: bool
    parts: tuple[Part, ...]

    def rest_s(self, part: Part, timing: LearnerTimingSpec) -> float:
        """Seconds of learning and of logprobs."""
        sheet = device_of(self.kind)
        token_s = operation_s(self.shape, sheet, part.learner_devices, timing)
        return OPERATIONS * (self.tokens * token_s + pass_operation_s(self.shape, sheet, timing))


@dataclass(frozen=True)
class Fit:
    """Fitted figures."""

    mfu: float
    expert_flops_per_s: float

    def step_s(self, known: Known) -> float:
        timing = LearnerTimingSpec(mfu=self.mfu, expert_flops_per_s=self.expert_flops_per_s)
        join = max if known.overlaps else sum
        return min(join((part.generation_s, known.rest_s(part, timing))) for part in known.parts) + timing.fixed_s


def known_of(row: Mapping[str, Any]) -> Known:
    """Simulates the generation of a row. Raises ValueError for a model whose shape is not known."""
    parallel, devices = int(row["generation_tp"] or 1), int(row["devices"])
    overlaps = row["schedule"] != "sync"
    shares = SPLITS if overlaps else (1.0,)
    if overlaps and "generation_devices" in row:
        shares = (int(row["generation_devices"]) / devices,)
    counts = sorted({max(int(devices * share) // parallel, 1) * parallel for share in shares})
    found = []
    for count in counts:
        one = scenario_of(row, count, parallel)
        shape = one.model.shape
        generation_s = compare(one).results["static"][0].steps[-1].generation_s / int(row.get("in_flight_steps", 1))
        found.append(Part(generation_s, devices - count if overlaps else devices))
    tokens = int(row["prompts"]) * int(row["samples"]) * (float(row["mean_response_tokens"]) + PROMPT_TOKENS)
    name = row.get("id", row["model"])
    return Known(name, float(row["step_s"]), shape, row["kind"], tokens, overlaps, tuple(found))


def scenario_of(row: Mapping[str, Any], devices: int, parallel: int) -> Scenario:
    """Two steps of the row's generation on so many devices; the learner takes no memory, and its time is not used."""
    prompts = int(row["prompts"]) * int(row.get("in_flight_steps", 1))  # steps that are drawn at once share their tails
    each = min(devices, max(DEVICES_PER_NODE, parallel))
    quantised = {"weight_bits": int(row["bits"]), "product_bits": int(row["bits"])} if "bits" in row else {}
    return Scenario.model_validate(
        {
            "name": "step",
            "cluster": {
                "machines": [{"kind": row["kind"], "nodes": -(-devices // each), "devices_per_node": each}],
            },
            "model": {"config": CONFIGS[row["model"]]},
            "engine": {"tensor_parallel": parallel, **quantised},
            "workload": {
                "type": "lognormal",
                "lengths": {"median_tokens": median_tokens(row), "spread": SPREAD, "persistence": 0.0},
                "prompts": prompts,
                "median_prompt_tokens": PROMPT_TOKENS,
                "source": "mean and limit as published, the spread assumed",
            },
            "prompts_per_step": prompts,
            "samples_per_prompt": int(row["samples"]),
            "max_tokens": int(row["max_response_tokens"]),
            # The weights are counted apart: these systems do not bring them as a run of ours does.
            "transport": {"pull_bytes_per_s": 1e15, "load_bytes_per_s": 1e15, "fixed_s": 0},
            "learner": {"state_bytes_per_parameter": 0.001},
            "steps": 2,
            "seeds": 1,
            "policies": [{"name": "static"}],
        }
    )


def median_tokens(row: Mapping[str, Any]) -> float:
    """The median of lognormal lengths that have the published mean once they are cut off."""
    limit, mean = float(row["max_response_tokens"]), float(row["mean_response_tokens"])
    deviates = np.random.default_rng(0).standard_normal(20_000)
    low, high = 1.0, 50 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        cut = float(np.minimum(middle * np.exp(SPREAD * deviates), limit).mean())
        low, high = (middle, high) if cut < mean else (low, middle)
    return low


def fitted(rows: Sequence[Known]) -> Fit:
    """The least sum of |log(predicted / published)|; a utilisation that no row tells is the scenarios' default."""
    prior = LearnerTimingSpec()
    tried = GRID if any(not row.shape.experts for row in rows) else (prior.mfu,)
    with_experts = EXPERT_GRID if any(row.shape.experts for row in rows) else (prior.expert_flops_per_s,)

    def off(fit: Fit) -> float:
        return math.fsum(abs(math.log(fit.step_s(row) / row.step_s)) for row in rows)

    return min((Fit(*rates) for rates in itertools.product(tried, with_experts)), key=off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, help="only the first so many")
    parser.add_argument("--share", type=float, help="of the devices draw in steps that overlap; by default the best")
    arguments = parsed(parser, rows=3)
    with arguments.file.open(encoding="utf-8", newline="") as file:
        found: list[dict[str, Any]] = list(csv.DictReader(file))[: arguments.rows]
    if arguments.share:
        found = [row | {"generation_devices": int(int(row["devices"]) * arguments.share)} for row in found]
    rows = [known_of(row) for row in found]
    default = LearnerTimingSpec()
    prior, every = Fit(default.mfu, default.expert_flops_per_s), fitted(rows)
    print(machine())
    print(f"fitted to all: MFU {every.mfu:.3f}, with experts {every.expert_flops_per_s / 1e12:.0f} TFLOP/s of a device")
    print(f"{'step':20} {'published':>10} {'defaults':>9} {'fit':>7} {'left out':>9}")
    errors = []
    for index, row in enumerate(rows):
        left_out = fitted([*rows[:index], *rows[index + 1 :]])
        off = [fit.step_s(row) / row.step_s - 1 for fit in (prior, every, left_out)]
        errors.append(off)
        print(f"{row.name:20} {row.step_s:8.1f} s {off[0]:+9.1%} {off[1]:+7.1%} {off[2]:+9.1%}")
    for name, column in zip(("defaults", "fit", "left out"), zip(*errors, strict=True), strict=True):
        print(f"{name}: median error {median(map(abs, column)):.1%}, median of signed errors {median(column):+.1%}")


if __name__ == "__main__":
    main()
