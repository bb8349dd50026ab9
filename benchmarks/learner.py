"""The learner against a plain transformers loop: tokens per second and peak memory, on the same ragged batch.

    python benchmarks/learner.py [--model DIR] [--smoke]

Both sides do one optimiser step per round, with the same loss, optimiser, clipping, number of threads and bound
on the padded size of a micro-batch. The plain loop takes sequences as they come, pads them to the longest of the
micro-batch, passes an attention mask, and computes logits at every position. Rounds alternate in one process
(A B A B ...), so that both meet the same state of the machine; medians are compared, of wall time and of CPU
time, which other work on the machine disturbs less. Memory is what the peak of a fresh process grows during its
steps. Without --model a random model of 0.8 M parameters is made.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smoke import parsed
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from where import machine

from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.base import RankPlace
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.records import FinishReason, Group, Prompt, Rollout
from rlhfless.spec import AdamWSpec, GRPOSpec, LearnerSpec, ModelSpec

MAX_GRAD_NORM = 1.0
OPTIMIZER = AdamWSpec(max_grad_norm=MAX_GRAD_NORM)
MEMORY_STEPS = 3


def ragged_batch(prompts: int, samples: int, vocabulary: int) -> PackedBatch:
    """Prompts of 10-30 and responses of 10-100 tokens, uniform, with random advantages."""
    generator = np.random.default_rng(0)
    groups = []
    for number in range(prompts):
        prompt = Prompt(f"{number:04}", tuple(generator.integers(3, vocabulary, generator.integers(10, 31))), "")
        rollouts = []
        for sample in range(samples):
            length = int(generator.integers(10, 101))
            tokens = generator.integers(3, vocabulary, length)
            logprobs = np.full(length, -np.log(vocabulary), dtype=np.float32)
            rollouts.append(
                Rollout(
                    prompt.prompt_id,
                    sample,
                    0,
                    tokens,
                    logprobs,
                    "",
                    FinishReason.STOP,
                    (),
                    "benchmark",
                    0.0,
                    0.0,
                )
            )
        groups.append(Group.of(prompt, tuple(rollouts)))
    batch = pack(groups)
    return batch.with_columns(advantages=batch.spread(generator.standard_normal(batch.sequences).astype(np.float32)))


class PlainLoop:
    """A transformers training step as one writes it first."""

    def __init__(self, model: str, threads: int, micro_batch_tokens: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=OPTIMIZER.learning_rate,
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )
        self._micro_batch_tokens = micro_batch_tokens

    def step(self, batch: PackedBatch) -> None:
        self._optimizer.zero_grad()
        for rows in self._micro_batches(batch.lengths):
            torch.autograd.backward(self._loss(batch, rows))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()

    def _micro_batches(self, lengths: np.ndarray) -> Iterator[range]:
        start = longest = 0
        for index, length in enumerate(lengths):
            longest = max(longest, int(length))
            if (index + 1 - start) * longest > self._micro_batch_tokens:
                yield range(start, index)
                start, longest = index, int(length)
        yield range(start, len(lengths))

    def _loss(self, batch: PackedBatch, rows: range) -> torch.Tensor:
        assert batch.advantages is not None
        slices = [slice(batch.starts[row], batch.starts[row] + batch.lengths[row]) for row in rows]
        padded = [
            torch.nn.utils.rnn.pad_sequence([torch.tensor(values[part]) for part in slices], batch_first=True)
            for values in (batch.tokens, batch.response_mask, batch.advantages, batch.rollout_logprobs)
        ]
        tokens, response, advantages, rollout = padded
        lengths = torch.tensor(batch.lengths[rows.start : rows.stop])
        attention = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        logits = self._model(input_ids=tokens, attention_mask=attention.long()).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        ratio = (logprobs - logprobs.detach()).exp()
        weight = (logprobs.detach() - rollout[:, 1:]).exp().clamp(max=2.0)
        loss: torch.Tensor = -(weight * ratio * advantages[:, 1:] * response[:, 1:]).sum()
        return loss / batch.denominators.tokens


class Ours:
    """The learner with one rank."""

    def __init__(self, model: str, threads: int, micro_batch_tokens: int) -> None:
        learner = LearnerSpec(threads=threads, micro_batch_tokens=micro_batch_tokens)
        rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
        self._rank = LearnerRank(
            RankPlace(address=f"file://{rendezvous}"),
            ModelSpec(path=model),
            learner,
            OPTIMIZER,
            GRPOSpec(),
            1.0,
        )

    def step(self, batch: PackedBatch) -> None:
        self._rank.learn(batch, Passes())


SIDES: dict[str, Callable[[str, int, int], PlainLoop | Ours]] = {"ours": Ours, "plain": PlainLoop}


def tokens_per_s(arguments: argparse.Namespace, batch: PackedBatch) -> dict[str, dict[str, float]]:
    """Median tokens per second of each side, by wall clock and by CPU time of all threads."""
    sides = {
        name: make(arguments.model, arguments.threads, arguments.micro_batch_tokens) for name, make in SIDES.items()
    }
    clocks: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[tuple[str, str], list[float]] = {(clock, name): [] for clock in clocks for name in sides}
    for turn in range(arguments.rounds + 1):
        for name, side in sides.items():
            starts = {clock: read() for clock, read in clocks.items()}
            side.step(batch)
            for clock, read in clocks.items():
                if turn:  # the first round warms up
                    seconds[clock, name].append(read() - starts[clock])
    return {
        clock: {name: len(batch.tokens) / statistics.median(seconds[clock, name]) for name in sides} for clock in clocks
    }


def peak_memory_mib(arguments: argparse.Namespace, side: str) -> float:
    """How much the peak resident memory of a fresh process grows from the loaded model to after its steps."""
    command = [sys.executable, __file__, "--memory-of", side, "--model", arguments.model]
    for name in ("threads", "micro_batch_tokens", "prompts", "samples"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout
    return float(output.strip().splitlines()[-1])


def _grown_memory_mib(arguments: argparse.Namespace, batch: PackedBatch) -> float:
    side = SIDES[arguments.memory_of](arguments.model, arguments.threads, arguments.micro_batch_tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MEMORY_STEPS):
        side.step(batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def random_model(folder: str) -> str:
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM
    model(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder of a causal language model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", choices=sorted(SIDES), help=argparse.SUPPRESS)
    arguments = parsed(parser, prompts=2, samples=2, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = arguments.model or random_model(folder)
        vocabulary = AutoConfig.from_pretrained(arguments.model).vocab_size
        batch = ragged_batch(arguments.prompts, arguments.samples, vocabulary)
        if arguments.memory_of:
            print(_grown_memory_mib(arguments, batch))
            return
        memory = {name: peak_memory_mib(arguments, name) for name in SIDES}
        speed = tokens_per_s(arguments, batch)
    result = {
        "machine": f"{machine()}, {arguments.threads} threads",
        "sequences": batch.sequences,
        "tokens": len(batch.tokens),
        "tokens_per_s": {
            clock: {name: round(value) for name, value in sides.items()} for clock, sides in speed.items()
        },
        "speed_ratio": {clock: round(sides["ours"] / sides["plain"], 3) for clock, sides in speed.items()},
        "peak_memory_mib": {name: round(value, 1) for name, value in memory.items()},
        "memory_ratio": round(memory["ours"] / memory["plain"], 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
