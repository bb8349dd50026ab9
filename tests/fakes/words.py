"""A policy's tokenizer, small enough to make in a test: one token per word."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<bot>", *(f"w{i}" for i in range(59))]


CONTEXT_TOKENS = 32


def make_tokenizer(**special):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT_TOKENS, **special)
