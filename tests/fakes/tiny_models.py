"""Small models of the supported families as folders and Hugging Face models, published sizes, and engines for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhfless.functions.generation.engine import EngineSettings
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import Probe, PublishedWeights
from rlhfless.spec import EngineSpec, SpeculationSpec, TimeoutsSpec
from rlhfless.spec.generation import Quantization
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.check import PROBE_TOLERANCE, check_probe
from rlhfless.weights.samples import weight_sample
from rlhfless.weights.store import StoredWeights

VOCABULARY = ["<bos>", "<eos>", "<pad>", *(chr(code) for code in range(33, 127))]  # 97: not a multiple of 64,
# so the engine's padded output head is tested too
CONTEXT_TOKENS = 1024
KV_GIB = 0.0625
PROBE_TOKENS = (5, 6, 7, 8, 9, 40, 41, 42)


@dataclass
class TinyModel:
    """A model folder and the model in it."""

    folder: Path
    model: Qwen2ForCausalLM

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a learner publishes: tied weights once."""
        return dict(self.model.named_parameters())

    def use(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace the model's weights by `tensors`."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])

    @torch.no_grad()
    def logprobs(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> tuple[float, ...]:
        """Return the logprob of token i + 1 given the tokens up to i: `[tokens - 1]`."""
        logits = self.model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])
        return tuple(chosen[:, 0].tolist())

    def publish(self, stored: StoredWeights, *, samples: bool = True) -> PublishedWeights:
        """Return the announcement of the model's current weights, with samples of them to be read back."""
        values = {name: weight_sample(value, PROBE_TOKENS, value.dtype) for name, value in self.tensors().items()}
        probe = Probe(PROBE_TOKENS, self.logprobs(PROBE_TOKENS), values if samples else {})
        return PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token per character."""
    _tokenizer().save_pretrained(folder)


def make_tiny_model(folder: Path, tied: bool) -> TinyModel:
    """Create a random model with two layers of width 64."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32: the smallest size that the CPU kernel supports
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        # Large, so that the logits differ clearly and no comparison passes by accident.
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return TinyModel(folder, model)


def make_tiny_experts(folder: Path) -> TinyModel:
    """Create a random Qwen3-MoE with two layers of eight experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY), hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=CONTEXT_TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.15,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return TinyModel(folder, model)  # type: ignore[arg-type]


SHAPES = {
    "one process": EngineSpec(kv_cache_gib=KV_GIB, max_sequences=64),
    "core apart": EngineSpec(kv_cache_gib=KV_GIB, max_sequences=64, core_process=True),
    "two devices": EngineSpec(kv_cache_gib=KV_GIB, max_sequences=64, tensor_parallel_size=2),
}
"""Process layouts of an engine: on one CPU core, on one GPU, and on several devices."""


async def start_tiny_engine(
    model: TinyModel,
    store: Path,
    shape: str | EngineSpec = "one process",
    speculation: SpeculationSpec | None = None,
    quantization: Quantization = "off",
    **changes: Any,
) -> VllmEngine:
    """Start a small CPU engine with one thread per device that reads weights from the folder `store`."""
    settings = tiny_settings(model, store, SHAPES[shape] if isinstance(shape, str) else shape)
    with pytest.MonkeyPatch.context() as patch:
        # Threads that wait for each other on a busy machine take many times as long as a single thread.
        patch.setenv("OMP_NUM_THREADS", "1")
        return await VllmEngine.start(
            replace(settings, speculation=speculation or SpeculationSpec(), quantization=quantization, **changes)
        )


def tiny_settings(model: TinyModel, store: Path, engine: EngineSpec) -> EngineSettings:
    """Return the settings of a CPU engine."""
    return EngineSettings(
        model=str(model.folder),
        tokenizer=str(model.folder),
        dtype="float32",
        max_model_len=CONTEXT_TOKENS,
        seed=0,
        trust_remote_code=False,
        device="cpu",
        store=StoreAddress("file", str(store)),
        engine=engine,
        timeouts=TimeoutsSpec(start_s=200, sync_s=60, drain_s=20),
    )


async def loaded(engine: VllmEngine, published: PublishedWeights) -> Any:
    """Load a version with all checks (digest, read-back by the engine, probe), and return its transport."""
    report = await engine.load(published)
    check_probe(published.version, published.probe, await engine.logprobs(PROBE_TOKENS), PROBE_TOLERANCE["float32"])
    assert report is not None
    assert report.read_back == report.tensors
    return report.transport


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2_sliding": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=6),
    "gpt2_dropout": GPT2Config(
        vocab_size=40,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        attn_pdrop=0.5,
        embd_pdrop=0.5,
        resid_pdrop=0.5,
    ),
}


def save(config, folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


QWEN_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


# -- perturbed copies of models. The check `moved` loads such a copy once at an engine's start


RELATIVE_CHANGE = 0.3
"""Root mean square of an element's change, relative to the element. Large enough that a single stale layer moves
logprobs by far more than bfloat16's tolerance, and small enough that no activation overflows."""

ZERO_TENSOR_VALUE = 0.01
"""Replaces the elements, with random signs, of all-zero tensors such as new biases, because no factor changes zeros."""


def perturbed_by(seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function (name, value) -> value that multiplies each element by a factor of its first and of its last
    dimension.

    The factors are 1 plus or minus a constant; the signs depend only on `seed` and the name. Both dimensions are
    needed, because a norm after an embedding would undo a factor per row. Independent noise per element would take
    minutes for a model of several billion parameters; signs are few, and the rest is one multiplication per dimension,
    on the value's device. The result has the value's device, dtype and shape. Tensors that are not floating point are
    unchanged.
    """

    def perturb(name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        value = value.detach()
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        # Sampled on the CPU, so that the perturbation does not depend on the device.
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        signs = [
            (torch.randint(2, (length,), generator=generator) * 2 - 1).to(value.device, value.dtype)
            for length in value.shape[:1] + value.shape[1:][-1:]
        ] or [torch.ones((), device=value.device, dtype=value.dtype)]
        signs[0] = signs[0].view(-1, *[1] * (value.dim() - 1)) if value.dim() else signs[0]
        if not value.any():
            sign = signs[0] if len(signs) == 1 else signs[0] * signs[1]
            return (ZERO_TENSOR_VALUE * sign).expand(value.shape).clone()
        # With independent factors 1 + c and 1 - c for each of n dimensions, the mean square of the change is (1 +
        # c^2)^n - 1.
        change = ((1 + RELATIVE_CHANGE**2) ** (1 / len(signs)) - 1) ** 0.5
        moved: torch.Tensor = value * (1 + change * signs[0])
        for sign in signs[1:]:
            moved *= 1 + change * sign
        return moved

    return perturb


def perturbed(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return all `tensors`, perturbed by `perturbed_by`."""
    perturb = perturbed_by(seed)
    return {name: perturb(name, tensor) for name, tensor in tensors.items()}
