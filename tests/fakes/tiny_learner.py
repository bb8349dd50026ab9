"""Inputs for learner tests and the processes that they spawn: models on disk, batches, learners."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fakes.builders import LONG, drawn
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.functions import lm_head, policy, policy_loading, sharding
from rlhfless.functions.base import RankPlace
from rlhfless.functions.batching import cut
from rlhfless.functions.learner.rank import LearnerRank, SupervisedRank
from rlhfless.functions.per_token import PerTokenSettings
from rlhfless.functions.policy import PolicyNetwork, logprob_outputs, outputs_of
from rlhfless.functions.shares import FrozenPolicy
from rlhfless.functions.training.critic import CriticRank
from rlhfless.records import FloatArray, Group, Prompt
from rlhfless.records.rollouts import Example
from rlhfless.spec import AdamWSpec, CriticSpec, DPOSpec, GRPOSpec, LearnerSpec, ModelSpec, PPOSpec

VOCABULARY = 40


def save_tiny_model(folder: Path, *, tied: bool = True) -> str:
    """Save a two-layer Qwen3 with grouped-query attention and logits that are far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return _saved(Qwen3ForCausalLM(config), folder)


def save_tiny_experts(folder: Path, *, experts: int = 8) -> str:
    """Save a two-layer Qwen3-MoE whose tokens have two experts each."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return _saved(Qwen3MoeForCausalLM(config), folder)


def _saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return str(folder)


def make_frozen(model: str, temperature: float = 0.8, worker: type[FrozenPolicy] = FrozenPolicy) -> FrozenPolicy:
    """Load a frozen model, such as a teacher."""
    settings = PerTokenSettings(
        run_id="run",
        lease=LONG,
        function="teacher_same",
        worker="",
        model=ModelSpec(path=model),
        dtype="float32",
        micro_batch_tokens=64,
        share_prefixes=True,
        temperature=temperature,
        rank_bindings=(),
        call_timeout_s=60,
    )
    return worker(settings, threads=1)


def make_batch() -> PackedBatch:
    """Return six groups of four ragged responses, one of them empty, with advantages and without old logprobs."""
    generator = np.random.default_rng(1)
    prompts = [tuple(generator.integers(0, VOCABULARY, 1 + 2 * number).tolist()) for number in range(6)]
    return _drawn(prompts, 4, generator)


def make_shared_batch() -> PackedBatch:
    """Return five groups of four with two levels of prefixes: three prompts share 20 tokens, and two of these share
    30."""
    generator = np.random.default_rng(2)
    system, shots, other = (generator.integers(0, VOCABULARY, size).tolist() for size in (20, 10, 13))
    questions = [generator.integers(0, VOCABULARY, 11 + number).tolist() for number in range(4)]
    prompts = [(*system, *shots, *questions[0]), (*system, *shots, *questions[1]), (*system, *questions[2])]
    return _drawn([*prompts, tuple(other), tuple(questions[3])], 4, generator)


def _drawn(prompts: Sequence[tuple[int, ...]], samples: int, generator: np.random.Generator) -> PackedBatch:
    groups = []
    for number, token_ids in enumerate(prompts):
        prompt = Prompt(f"p{number}", token_ids, "")
        lengths = generator.integers(1, 25, samples)
        lengths[number % samples] = 0 if number == 2 else lengths[number % samples]
        rollouts = tuple(
            drawn(
                prompt.prompt_id,
                index,
                generator.integers(0, VOCABULARY, length),
                -4 - generator.random(length, dtype=np.float32),
            )
            for index, length in enumerate(lengths)
        )
        groups.append(Group.of(prompt, rollouts))
    packed = pack(groups)
    return packed.with_columns(advantages=packed.spread(generator.standard_normal(packed.sequences)))


def save_tiny_critic(policy: str, folder: Path, labels: int = 1) -> str:
    """Save a critic's checkpoint: the policy's decoder with a random value head."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(policy, num_labels=labels)
    critic: Any = Qwen3ForSequenceClassification(config)
    critic.model.load_state_dict(Qwen3ForCausalLM.from_pretrained(policy).model.state_dict())
    critic.save_pretrained(folder)
    return str(folder)


def with_values(batch: PackedBatch) -> PackedBatch:
    """Return the batch with random old values and returns."""
    generator = np.random.default_rng(5)
    values, returns = generator.standard_normal((2, len(batch.tokens)))
    return batch.with_columns(values=values, returns=returns)


def plain_adamw(model: torch.nn.Module, spec: AdamWSpec) -> torch.optim.AdamW:
    """Return torch's AdamW with weight decay only for matrices."""
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, spec.learning_rate, spec.betas, spec.eps)


def make_critic(model: str, rendezvous: Path, rank: int = 0, world_size: int = 1, **changes: Any) -> CriticRank:
    """Create a critic in float32 with one thread. It starts from `model`, including its head unless `new_head`.

    `changes`: specs, or fields of CriticSpec.
    """
    specs: dict[str, Any] = {"optimizer": AdamWSpec(learning_rate=1e-3), "algorithm": PPOSpec()}
    specs |= {name: changes.pop(name) for name in tuple(changes) if name in specs}
    timeout_s, tokenizer = changes.pop("timeout_s", 60), changes.pop("tokenizer", None)
    start = {} if changes.pop("new_head", False) else {"model": model}
    return CriticRank(
        RankPlace(rank, world_size, f"file://{rendezvous}", timeout_s),
        ModelSpec(path=model, tokenizer=tokenizer),
        CriticSpec(**({"threads": 1} | start | changes)),
        **specs,
    )


def make_pairs() -> list[Example]:
    """Return seven pairs of ragged responses, with prompts long enough that computing them once for both responses pays
    off."""
    generator = np.random.default_rng(4)
    prompts = [tuple(generator.integers(0, VOCABULARY, 34 + 2 * number).tolist()) for number in range(7)]
    return [
        Example(
            f"p{number}",
            prompt,
            "",
            {},
            "",
            tuple((*prompt, *generator.integers(0, VOCABULARY, generator.integers(1, 15)).tolist()) for _ in "cr"),
            (len(prompt),) * 2,
        )
        for number, prompt in enumerate(prompts)
    ]


def make_supervised(model: str, rendezvous: Path, rank: int = 0, world_size: int = 1, **changes: Any) -> SupervisedRank:
    """Create a learner of preference pairs in float32 with one thread. `changes`: as for `make_rank`, and `run_type`
    and `dpo`."""
    specs = {"optimizer": AdamWSpec(learning_rate=1e-3), "run_type": "dpo", "dpo": DPOSpec()}
    specs |= {name: changes.pop(name) for name in tuple(changes) if name in specs}
    timeout_s = changes.pop("timeout_s", 60)
    model_options = changes.pop("model_options", {})
    return SupervisedRank(
        RankPlace(rank, world_size, f"file://{rendezvous}", timeout_s),
        ModelSpec(path=model, **model_options),
        LearnerSpec(**({"threads": 1} | changes)),
        **specs,
    )


def make_rank(model: str, rendezvous: Path, rank: int = 0, world_size: int = 1, **changes: Any) -> LearnerRank:
    """Create a learner in float32 with one thread. `changes`: specs, fields of LearnerSpec, or the options below."""
    specs = {
        "optimizer": AdamWSpec(learning_rate=1e-3),
        "algorithm": GRPOSpec(),
        "temperature": 0.8,
        "quantization": "off",
        "publishes_adapters": False,
        "routes_folder": "",
    }
    specs |= {name: changes.pop(name) for name in tuple(changes) if name in specs}
    dtype = changes.pop("published_dtype", "float32")
    timeout_s = changes.pop("timeout_s", 60)
    model_options = changes.pop("model_options", {})
    return LearnerRank(
        RankPlace(rank, world_size, f"file://{rendezvous}", timeout_s),
        ModelSpec(path=model, dtype=dtype, **model_options),
        LearnerSpec(**({"threads": 1} | changes)),
        **specs,
    )


def token_logprobs(
    policy: PolicyNetwork, batch: PackedBatch, temperature: float, micro_batch_tokens: int
) -> FloatArray:
    """Return logprobs `[tokens]` without a gradient, 0 on prompt tokens, as old and reference logprobs are computed."""
    parts = cut(batch, micro_batch_tokens, packing=policy.packing).parts
    return outputs_of(policy, batch, logprob_outputs(policy, temperature), parts)


# -- ranks of a function in separate processes


OPTIMIZER = AdamWSpec(learning_rate=0.1, eps=1.0)
PATIENCE_S = 240
"""Maximum wait of one process for another, even on a busy machine."""

Work = Callable[..., Any]


def compute_in_float64() -> None:
    """Use float64 wherever the product uses float32, small chunks of logits, and a group for each layer."""
    policy.TORCH_DTYPES["float32"] = torch.float64
    policy.CHECK_TOLERANCE[torch.float64] = 1e-9
    policy_loading.EAGER_TOLERANCE[torch.float64] = 1e-3  # norms compute in float32
    lm_head.LOGITS_CHUNK_ELEMENTS = 7 * VOCABULARY
    sharding.ONE_GROUP_PARAMETERS = 0
    torch.set_default_dtype(torch.float64)


def run_processes(target: Callable[..., None], folder: Path, ranks: int, *given: Any) -> list[Any]:
    """Run `target(rendezvous, rank, ranks, *given, queue)` in one process per rank, and return the results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fakes.tiny_learner"])  # torch and transformers are imported once for all processes
    queue = context.Queue()
    rendezvous = folder / f"rendezvous{ranks}-{os.urandom(4).hex()}"
    processes = [context.Process(target=target, args=(rendezvous, rank, ranks, *given, queue)) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        while len(results) < ranks:
            with contextlib.suppress(Empty):
                results |= [queue.get(timeout=1)]
            died = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in results]
            assert not died, f"without a result: ranks {died}"
        return [results[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def run_learner(
    work: Work, model: str, folder: Path, world_size: int, *, exact: bool = False, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(learner, rank, **options)` on all ranks of a learner."""
    return run_processes(_learn, folder, world_size, work, model, options, exact, dict(changes), make_rank)


def run_critic(
    work: Work, model: str, folder: Path, world_size: int, *, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(critic, rank, **options)` on all ranks of a critic."""
    return run_processes(_learn, folder, world_size, work, model, options, False, dict(changes), make_critic)


def run_supervised(
    work: Work, model: str, folder: Path, world_size: int, *, changes: Any = (), **options: Any
) -> list[Any]:
    """Run `work(learner, rank, **options)` on all ranks of a learner of preference pairs."""
    return run_processes(_learn, folder, world_size, work, model, options, False, dict(changes), make_supervised)


def _learn(
    rendezvous: Path,
    rank: int,
    world_size: int,
    work: Work,
    model: str,
    options: Mapping,
    exact: bool,
    changes: Mapping,
    make: Callable[..., Any],
    queue,
) -> None:
    """Run one rank, and send back its result or its error."""
    if exact:
        compute_in_float64()
    given = {"optimizer": OPTIMIZER, "micro_batch_tokens": 64, "timeout_s": PATIENCE_S} | dict(changes)
    learner = make(model, rendezvous, rank, world_size, **given)
    try:
        queue.put((rank, work(learner, rank, **options)))
    except Exception as error:  # the test examines it
        queue.put((rank, error))
    finally:
        learner.close()
