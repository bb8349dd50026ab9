"""Supervised learning on demonstrations: teaches the policy the skill and the bad habits of the bundled task.

It uses a rank of a run of `type: sft`, so the loss, the optimizer and the learning-rate schedule are those of any run.
A batch holds demonstrations of similar length (to limit padding), with about the same number of tokens in each batch.
Batches are cut from a pool of demonstrations sorted by length, and then visited in random order. No demonstration is
seen twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.bundled.model import ModelSize, build_model, build_tokenizer
from rlhfless.bundled.task import BundledTask, Demonstration
from rlhfless.functions.base import RankPlace
from rlhfless.functions.learner.rank import SupervisedRank
from rlhfless.functions.training.checkpoint import WEIGHTS_FILE
from rlhfless.records.rollouts import Example
from rlhfless.spec import AdamWSpec, DPOSpec, LearnerSpec, ModelSpec

POOL_DEMONSTRATIONS = 2048
"""Large enough to cut several dozen batches of nearly equal lengths."""


@dataclass(frozen=True)
class WarmStartRecipe:
    """The constants of supervised learning, tuned for the default task and model."""

    steps: int = 2200
    batch_tokens: int = 1024
    """Tokens per batch, including prompts and padding."""
    learning_rate: float = 4e-3
    """Peak rate: reached linearly over `warmup_steps`, then reduced to zero along a half cosine."""
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class WarmStartProgress:
    """One completed step of the warm start."""

    step: int
    steps: int
    loss: float
    """Mean cross-entropy per response token of this step's batch, in nats."""


def train_policy(
    folder: Path,
    seed: int,
    *,
    task: BundledTask,
    size: ModelSize,
    recipe: WarmStartRecipe,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> None:
    """Train a new policy, and write it with its tokenizer to `folder`.

    Takes about two minutes on one slow core with the default recipes. On CPUs the weights are a function of the seed
    and the recipes, regardless of the number of cores.
    """
    tokenizer = build_tokenizer(task, size.max_positions)
    model = build_model(tokenizer, size, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not recipe.steps:
        return
    batches = iterate_batches(task, tokenizer, np.random.default_rng(seed), recipe.batch_tokens)
    with _rank(folder, recipe) as rank:
        for step in range(1, recipe.steps + 1):
            figures = rank.learn(pack_examples(next(batches)), Passes(planned_updates=recipe.steps))
            if on_progress is not None:
                on_progress(WarmStartProgress(step, recipe.steps, figures["loss"]))
        weights = rank.weights()
    save_file(weights, folder / WEIGHTS_FILE, {"format": "pt"})


@contextmanager
def _rank(folder: Path, recipe: WarmStartRecipe) -> Iterator[SupervisedRank]:
    """Yield the learner's only rank.

    It computes on one thread: matrices this small gain little from a second thread, and lose much when it waits for a
    core that others use.
    """
    optimizer = AdamWSpec(
        learning_rate=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        warmup_steps=recipe.warmup_steps,
        rate_schedule="cosine",
    )
    learner = LearnerSpec(threads=1, micro_batch_tokens=recipe.batch_tokens)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as meeting:
        rank = SupervisedRank(
            RankPlace(address=f"file://{meeting}/rank"),
            ModelSpec(path=str(folder), dtype="float32"),
            learner,
            optimizer,
            "sft",
            DPOSpec(),
        )
        try:
            with closing(rank):
                yield rank
        finally:
            torch.set_num_threads(threads)


def iterate_batches(
    task: BundledTask, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator, batch_tokens: int
) -> Iterator[list[Example]]:
    """Yield batches of new demonstrations, without end."""
    numbers = count()
    while True:
        pool = task.demonstrations(rng, POOL_DEMONSTRATIONS)
        rows = sorted(_encode(tokenizer, pool, numbers), key=lambda row: len(row.sequences[0]))
        cuts = _cut([len(row.sequences[0]) for row in rows], batch_tokens)
        for index in rng.permutation(len(cuts)):
            start, stop = cuts[index]
            yield rows[start:stop]


def _encode(
    tokenizer: PreTrainedTokenizerFast, pool: Sequence[Demonstration], numbers: Iterator[int]
) -> Iterator[Example]:
    """Yield the examples, each with a number as its id. Only responses and their end tokens are learned."""
    texts = [text for each in pool for turn in ((each.prompt, each.response), *each.later) for text in turn]
    encoded = iter(tokenizer(texts)["input_ids"])
    for demonstration, number in zip(pool, numbers):  # noqa: B905 (numbers have no end)
        prompt, sequence, spans = list[int](), list[int](), list[tuple[int, int]]()
        for _ in (demonstration, *demonstration.later):
            sequence += next(encoded)
            start = len(sequence)
            prompt = prompt or sequence[:]
            sequence += (*next(encoded), tokenizer.eos_token_id)
            spans.append((start, len(sequence)))
        yield Example(
            str(number), tuple(prompt), "", {}, "", (tuple(sequence),), (len(prompt),),
            (tuple(spans),) if demonstration.later else (),
        )  # fmt: skip


def _cut(lengths: list[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Split ascending lengths into ranges `[start, stop)` whose padded size stays within `batch_tokens`."""
    cuts, start = [], 0
    for stop in range(1, len(lengths) + 1):
        full = stop == len(lengths) or (stop + 1 - start) * lengths[stop] > batch_tokens
        if full:
            cuts.append((start, stop))
            start = stop
    return cuts
