"""A policy small enough to create in a test: one token per word, and weights that are never loaded."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from fakes.tiny_tokenizers import CONTEXT_TOKENS, make_tokenizer

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
