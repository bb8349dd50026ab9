"""Small tokenizers: one with a token per word, and one that reads bytes and writes ChatML."""

from __future__ import annotations

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
