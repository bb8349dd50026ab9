"""A policy whose tokenizer reads bytes and writes ChatML, as many of the field's do; its weights are never loaded."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>")
"""Tokens of their own that are not special, as Qwen3 has them."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and those of their own."""
    bytes_ = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(bytes_, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def save_chat_policy(folder: Path, context_tokens: int = 512) -> Path:
    """A folder like those `save_pretrained` writes."""
    import numpy as np
    from safetensors.numpy import save_file

    tokenizer = make_chat_tokenizer()
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
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    weights: dict[str, tuple[int, ...]] = {f"model.layers.0.{name}.weight": (8, 8) for name in layers}
    weights |= {f"model.layers.0.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    weights |= {
        "model.norm.weight": (8,),
        "model.embed_tokens.weight": (len(tokenizer), 8),
        "lm_head.weight": (len(tokenizer), 8),
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in weights.items()}, folder / "model.safetensors")
    return folder
