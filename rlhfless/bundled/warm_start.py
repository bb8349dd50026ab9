"""Supervised learning on demonstrations: teaches the policy the skill, and the bad habits, of the bundled task.

Plain next-token cross-entropy on the response tokens. A batch holds demonstrations of about the same length
(padded on the right, so causal attention needs no mask) and about the same number of tokens. Batches are cut from
a pool of demonstrations that is sorted by length and then visited in random order. No demonstration is seen twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rlhfless.bundled.model import ModelSize, build_model, build_tokenizer
from rlhfless.bundled.task import Demonstration, TaskRecipe, draw_demonstrations

IGNORED = -100
"""Label of tokens without a loss (the default of `torch.nn.functional.cross_entropy`)."""

POOL_DEMONSTRATIONS = 2048
"""Enough to cut some dozens of batches whose members are of nearly equal length."""


@dataclass(frozen=True)
class WarmStartRecipe:
    """The constants of supervised learning, found by trial for the default task and model."""

    steps: int = 2200
    batch_tokens: int = 1024
    """Tokens of a batch, prompts and padding included."""
    learning_rate: float = 4e-3
    """Peak: reached linearly over `warmup_steps`, then a half cosine down to zero."""
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class WarmStartProgress:
    """One step of the warm start is done."""

    step: int
    steps: int
    loss: float
    """Mean cross-entropy per response token of this step's batch, in nats."""


@dataclass(frozen=True)
class Batch:
    """Token ids `[sequences, seq]` and labels of the same shape: label t is the token after position t."""

    ids: torch.Tensor
    labels: torch.Tensor


def train_policy(
    folder: Path,
    seed: int,
    *,
    task: TaskRecipe,
    size: ModelSize,
    recipe: WarmStartRecipe,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> None:
    """Train a new policy and write it with its tokenizer to `folder`.

    Takes about three minutes on one slow core with the default recipes. The weights are a function of the seed and
    the recipes, whatever the number of cores.
    """
    tokenizer = build_tokenizer(task, size.max_positions)
    model = build_model(tokenizer, size, seed)
    batches = iterate_batches(task, tokenizer, np.random.default_rng(seed), recipe.batch_tokens)
    with _one_thread():
        for step, loss in enumerate(_fit(model, batches, recipe), start=1):
            if on_progress is not None:
                on_progress(WarmStartProgress(step, recipe.steps, loss))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fit(model: Qwen3ForCausalLM, batches: Iterator[Batch], recipe: WarmStartRecipe) -> Iterator[float]:
    """Train in place and yield the loss of each step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, recipe))
    model.train()
    for _ in range(recipe.steps):
        loss = _loss(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: matrices this small gain little from a second one, and lose much when it has to
    wait for a core that others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def iterate_batches(
    task: TaskRecipe, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator, batch_tokens: int
) -> Iterator[Batch]:
    """Batches of new demonstrations, without end."""
    while True:
        pool = draw_demonstrations(task, rng, POOL_DEMONSTRATIONS)
        rows = sorted(_encode(tokenizer, pool), key=lambda row: len(row[0]))
        cuts = _cut([len(ids) for ids, _ in rows], batch_tokens)
        for index in rng.permutation(len(cuts)):
            start, stop = cuts[index]
            yield _pad(rows[start:stop], tokenizer.pad_token_id)


def _encode(tokenizer: PreTrainedTokenizerFast, pool: list[Demonstration]) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and labels of each demonstration; only the response and the end token have labels."""
    prompts = tokenizer([demonstration.prompt for demonstration in pool])["input_ids"]
    responses = tokenizer([demonstration.response for demonstration in pool])["input_ids"]
    for prompt, response in zip(prompts, responses, strict=True):
        learned = [*response, tokenizer.eos_token_id]
        yield (prompt + learned)[:-1], [IGNORED] * (len(prompt) - 1) + learned


def _cut(lengths: list[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Cut ascending lengths into runs `[start, stop)` whose padded size stays within `batch_tokens`."""
    cuts, start = [], 0
    for stop in range(1, len(lengths) + 1):
        full = stop == len(lengths) or (stop + 1 - start) * lengths[stop] > batch_tokens
        if full:
            cuts.append((start, stop))
            start = stop
    return cuts


def _pad(rows: list[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    width = len(rows[-1][0])
    ids = [ids + [pad_id] * (width - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in rows]
    return Batch(torch.tensor(ids), torch.tensor(labels))


def _loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch.ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)


def _schedule(step: int, recipe: WarmStartRecipe) -> float:
    """Factor of the learning rate at optimiser step `step`, counted from 0."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))
