"""Shared prefixes: the search for them, and reference and learner with and without computing them once.

    python benchmarks/prefixes.py [--model DIR] [--prefixes 0 1000] [--rounds 5] [--prompts 8192] [--threads 2]

Per length of a common prefix, a step of 16 prompts x 8 samples: tokens that are computed, and the time of the
reference's logprobs and of the learner's forward and backward passes, each prefix once against each prefix for each
sample. The two take turns in one process (A B A B ...), so that both meet the same state of the machine; medians are
compared, of wall time and of processor time, which other work on the machine disturbs less. The search is timed on
prompts of 1,000 tokens. Without --model a random model of 0.8 M parameters is made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from learner import random_model
from smoke import parsed
from where import machine

from rlhfless.algorithms.batch import PackedBatch, pack, select
from rlhfless.functions.batching import cut, prompt_tokens
from rlhfless.functions.policy import PolicyNetwork, load_policy, logprobs_of, response_logprobs
from rlhfless.prefixes.packing import ALWAYS, NEVER, ON_CPUS, Packing
from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import FinishReason, Group, Prompt, Rollout
from rlhfless.spec import ModelSpec

GROUPS, SAMPLES = 16, 8
OWN_TOKENS, RESPONSE_TOKENS = (10, 31), (10, 65)
"""Shortest and longest, as of ranges: a prompt behind the common prefix, and a response."""
BUDGET_TOKENS = 8192
BLOCK_TOKENS = 16
TRIE_PREFIX_TOKENS, TRIE_PROMPT_TOKENS = 900, 1000


def batch_behind(prefix_tokens: int, vocabulary: int) -> PackedBatch:
    """A step's sequences; every prompt begins with the same `prefix_tokens`."""
    generator = np.random.default_rng(0)
    prefix = generator.integers(3, vocabulary, prefix_tokens).tolist()
    groups = []
    for number in range(GROUPS):
        own = generator.integers(3, vocabulary, generator.integers(*OWN_TOKENS)).tolist()
        prompt = Prompt(f"{number:04}", (*prefix, *own), "")
        groups.append(Group.of(prompt, [_rollout(prompt, sample, generator, vocabulary) for sample in range(SAMPLES)]))
    batch = pack(groups)
    return batch.with_columns(advantages=batch.spread(generator.standard_normal(batch.sequences)))


def _rollout(prompt: Prompt, sample: int, generator: np.random.Generator, vocabulary: int) -> Rollout:
    tokens = generator.integers(3, vocabulary, generator.integers(*RESPONSE_TOKENS))
    logprobs = np.full(len(tokens), -np.log(vocabulary), dtype=np.float32)
    stop = FinishReason.STOP
    return Rollout(prompt.prompt_id, sample, 0, tokens, logprobs, "", stop, (), "benchmark", 0.0, 0.0)


def reference(policy: PolicyNetwork, batch: PackedBatch, packing: Packing) -> None:
    logprobs_of(policy, batch, 1.0, cut(batch, BUDGET_TOKENS, packing=packing))


def learner(policy: PolicyNetwork, batch: PackedBatch, packing: Packing) -> None:
    policy.model.zero_grad()
    for part in cut(batch, BUDGET_TOKENS, packing=packing).parts:
        torch.autograd.backward(response_logprobs(policy, select(batch, part.indices), 1.0, part.packed).logprobs.sum())


def medians_s(works: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """Each work's medians of wall time and of processor time, when they take turns; the first round is not counted."""
    times: list[list[tuple[float, float]]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, of_work in zip(works, times, strict=True):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            work()
            if number:
                of_work.append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    return [(statistics.median(w for w, _ in each), statistics.median(c for _, c in each)) for each in times]


def search_ms(prompts: int, rounds: int) -> float:
    """Median time of the search over prompts that have all but their last 100 tokens in common."""
    generator = np.random.default_rng(0)
    prefix = generator.integers(0, 50_000, TRIE_PREFIX_TOKENS)
    own = generator.integers(0, 50_000, (prompts, TRIE_PROMPT_TOKENS - TRIE_PREFIX_TOKENS))
    rows = [np.concatenate([prefix, row]) for row in own]
    ((taken_s, _),) = medians_s([partial(shared_prefixes, rows, SAMPLES, block_tokens=BLOCK_TOKENS)], rounds)
    return 1e3 * taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model in Hugging Face format")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[0, 30, 100, 300, 1000], help="tokens in common")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8192, help="prompts of the search")
    parser.add_argument("--always", action="store_true", help="share also where it does not pay, to find where it does")
    arguments = parsed(parser, prefixes=[60], rounds=1, prompts=64)
    packing = ALWAYS if arguments.always else ON_CPUS
    print(f"{machine()}, {arguments.threads} threads")
    print(f"search over {arguments.prompts} prompts: {search_ms(arguments.prompts, arguments.rounds):.1f} ms")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(path=arguments.model or random_model(folder))
        policies = [
            load_policy(spec, parameter_dtype="float32", compute_dtype="float32", share_prefixes=share)
            for share in (False, True)
        ]
    vocabulary = policies[0].vocabulary
    print(f"{'prefix':>7} {'computed':>9} {'of':>8} {'shared':>7} {'reference: wall, processor':>30} {'learner':>30}")
    for prefix in arguments.prefixes:
        batch = batch_behind(prefix, vocabulary)
        parts = cut(batch, BUDGET_TOKENS, packing=packing)
        fed, saved = int((batch.lengths - 1).sum()), prompt_tokens(batch) - parts.prompt_tokens
        line = f"{prefix:>7} {fed - saved:>9} {fed:>8} {parts.packed!s:>7}"
        for work in (reference, learner):
            (each, each_cpu), (once, once_cpu) = medians_s(
                [partial(work, policy, batch, packing if policy.packing.pays_below else NEVER) for policy in policies],
                arguments.rounds,
            )
            line += f" {each:>7.2f} {once:>6.2f} s {each / once:>5.2f}x {each_cpu / once_cpu:>5.2f}x"
        print(line, flush=True)


if __name__ == "__main__":
    main()
