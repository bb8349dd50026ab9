"""Widely used chat templates, each with a small tokenizer and a hand-written form of the assistant's turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhfless.prepare.model import PolicyModel, TokenizerInfo

_FOLDER = Path(__file__).parent.parent / "chat" / "templates"
_CORPUS = [
    "user assistant system model tool What is the answer? The capital of France is Paris. Hello there, 12 + 34\n\n"
]


@dataclass(frozen=True)
class FieldTemplate:
    """A chat template. `last` and `earlier`: the policy's text around the content in its last turn and in earlier
    turns."""

    name: str
    last: str
    eos: str
    earlier: str = ""
    bos: str | None = None
    further_ends: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    pieces: bool = False
    """Whether its tokenizer writes spaces into tokens, as SentencePiece does."""
    system: bool = True
    begins: bool = False
    """Whether its tokenizer starts each text with bos."""

    @property
    def source(self) -> str:
        return (_FOLDER / f"{self.name}.jinja").read_text().removesuffix("\n")

    @property
    def before(self) -> str:
        return self.earlier or self.last

    def policy(self) -> PolicyModel:
        tokenizer = self.tokenizer()
        info = TokenizerInfo(self.name, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        ends = tuple(tokenizer.convert_tokens_to_ids(list(self.further_ends)))
        return PolicyModel(tokenizer, info, None, None, (), ends)

    def tokenizer(self) -> Any:
        return _tokenizer(self)


@cache
def _tokenizer(template: FieldTemplate) -> Any:
    special = {"<pad>", template.eos, *template.further_ends, *template.special} | ({template.bos} - {None})
    tokenizer = Tokenizer(models.BPE(byte_fallback=template.pieces))
    if template.pieces:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        alphabet = [chr(code) for code in range(32, 127)] + ["\u2581", "\n"]
    else:
        lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=sorted(special), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=template.eos,
        bos_token=template.bos,
        additional_special_tokens=sorted(special - {"<pad>", template.eos, template.bos}),
        chat_template=template.source,
    )
    fast.clean_up_tokenization_spaces = False
    return fast


_CHATML = ("<|im_start|>", "<|endoftext|>")
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")

FIELD = [
    FieldTemplate("chatml", "{}<|im_end|>", "<|im_end|>", special=_CHATML),
    FieldTemplate("qwen2_5", "{}<|im_end|>", "<|im_end|>", further_ends=("<|endoftext|>",), special=_CHATML),
    FieldTemplate(
        "qwen3", "<think>\n\n</think>\n\n{}<|im_end|>", "<|im_end|>", "{}<|im_end|>", None, ("<|endoftext|>",), _CHATML
    ),
    FieldTemplate("llama2", " {} </s>", "</s>", bos="<s>", pieces=True),
    FieldTemplate("llama3", "{}<|eot_id|>", "<|end_of_text|>", "", "<|begin_of_text|>", ("<|eot_id|>",), _LLAMA3),
    FieldTemplate(
        "llama3_1",
        "{}<|eot_id|>",
        "<|end_of_text|>",
        bos="<|begin_of_text|>",
        further_ends=("<|eom_id|>", "<|eot_id|>"),
        special=_LLAMA3,
    ),
    FieldTemplate("mistral_v0_1", "{}</s>", "</s>", bos="<s>", pieces=True, system=False),
    FieldTemplate(
        "mistral_v0_3",
        " {}</s>",
        "</s>",
        bos="<s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]"),
        pieces=True,
        system=False,
    ),
    FieldTemplate(
        "gemma", "{}<end_of_turn>", "<eos>", "", "<bos>", ("<end_of_turn>",), ("<start_of_turn>",), True, False
    ),
    FieldTemplate("gemma3", "{}<end_of_turn>", "<eos>", "", "<bos>", ("<end_of_turn>",), ("<start_of_turn>",), True),
    FieldTemplate(
        "phi3", "{}<|end|>", "<|endoftext|>", "", "<s>", ("<|assistant|>", "<|end|>"), ("<|user|>", "<|system|>"), True
    ),
    FieldTemplate("zephyr", "{}</s>", "</s>", bos="<s>", pieces=True),
    FieldTemplate("vicuna", " {}</s>", "</s>", bos="<s>", pieces=True),
    FieldTemplate("command_r", "{}<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", special=_COHERE),
    FieldTemplate("granite", "{}<|end_of_text|>", "<|end_of_text|>", special=("<|start_of_role|>", "<|end_of_role|>")),
    FieldTemplate("olmo2", "{}<|endoftext|>", "<|endoftext|>", bos="<|endoftext|>"),
    FieldTemplate("smollm3", "{}<|im_end|>", "<|im_end|>", special=_CHATML),
    FieldTemplate(
        "harmony",
        "<|channel|>final<|message|>{}<|return|>",
        "<|return|>",
        "<|channel|>final<|message|>{}<|end|>",
        None,
        ("<|call|>", "<|endoftext|>"),
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
    ),
    FieldTemplate("falcon", " {}<|endoftext|>", "<|endoftext|>"),
    FieldTemplate("yi", "{}<|im_end|>", "<|im_end|>", special=_CHATML),
    FieldTemplate("internlm2", "{}<|im_end|>", "</s>", "", "<s>", ("<|im_end|>",), ("<|im_start|>",)),
    FieldTemplate("nemotron", "{}</s>", "</s>", "{}", special=("<extra_id_0>", "<extra_id_1>")),
    FieldTemplate(
        "glm4",
        "\n{}<|endoftext|>",
        "<|endoftext|>",
        "\n{}<|user|>",
        further_ends=("<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
    ),
    FieldTemplate(
        "deepseek_r1",
        "{}<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        special=("<｜User｜>", "<｜Assistant｜>"),
    ),
]

BY_NAME = {template.name: template for template in FIELD}
