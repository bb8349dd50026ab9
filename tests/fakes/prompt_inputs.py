"""Small tokenizers (a token per word, or per byte with ChatML), and a policy whose weights are never loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<bot>", *(f"w{i}" for i in range(59))]


CONTEXT_TOKENS = 32


def make_tokenizer(**special):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT_TOKENS, **special)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>")
"""Added tokens that are not special, as in Qwen3."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, plus the special and added tokens."""
    bytes_ = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(bytes_, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users may speak') }}{% endif %}"
    "<user> {{ m.content }} {% endfor %}<bot>"
)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_policy(folder, tokenizer, context_tokens=CONTEXT_TOKENS):
    """Write a folder as `save_pretrained` does: a Llama with one layer of zeros, and this tokenizer."""
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": context_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    weights = {f"model.layers.0.{name}.weight": (8, 8) for name in names}
    weights |= {f"model.layers.0.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    weights |= {
        "model.norm.weight": (8,),
        "model.embed_tokens.weight": (len(tokenizer), 8),
        "lm_head.weight": (len(tokenizer), 8),
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model_folder(tmp_path):
    """Save a policy with the vocabulary WORDS."""
    return save_policy(tmp_path / "model", make_tokenizer())


@pytest.fixture
def edit_config(model_folder):
    """Return a function that changes keys of the model's config.json."""

    def edit(**changes):
        path = model_folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.fixture
def write_rows(tmp_path):
    """Return a function that writes rows as JSONL. A string is written as a line unchanged."""

    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write
