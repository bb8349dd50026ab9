"""A reward model is read where it was trained: at the last token of a sequence, whatever token that is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLNetConfig,
)

from fakes.tiny_learner import make_supervised
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import pack_examples
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.prepare.examples import load_examples
from rlhfless.prepare.model import load_policy
from rlhfless.records import FinishReason
from rlhfless.rewards import RewardSample
from rlhfless.spec import RewardModelSpec, RunSpec

WORDS = ["<eos>", "<pad>", "<unk>", "<user>", "<bot>", *(f"w{i}" for i in range(27))]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.3}
ENDED = "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'bot' }}> {{ m.content }} <eos>{% endfor %}"
TOKENIZERS = {"none": {}, "eos": {"pad_token": "<eos>"}, "own": {"pad_token": "<pad>"}, "unk": {"pad_token": "<unk>"}}


def save_tokenizer(folder: Path, **special: str) -> None:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>", **special)
    tokenizer.chat_template = ENDED
    tokenizer.save_pretrained(folder)


def save_policy(folder: Path, config: PreTrainedConfig, **special: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, **special)
    return str(folder)


PAIRS = [  # of other lengths; some end in tokens that pad
    {"prompt": "w1 w2", "chosen": " w3 w4 <eos>", "rejected": " w5"},
    {"prompt": "w6", "chosen": " w7 <pad>", "rejected": " w8 w9 w10 w11 <eos> <eos>"},
    {"prompt": "w2 w2 w2", "chosen": " <eos> w1", "rejected": " w12 <unk>"},
    {"prompt": "w3", "chosen": " <eos>", "rejected": " <pad> <pad> w1 <pad>"},
]


@contextmanager
def trained(path: str, spec: RunSpec, folder: Path) -> Iterator[Any]:
    options = {"trust_remote_code": False, "dtype": "float32"}
    rank = make_supervised(path, folder / "rendezvous", run_type="reward_model", model_options=options)
    try:
        yield rank
    finally:
        rank.close()


@pytest.mark.parametrize("templated", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_run_evaluates_what_its_checkpoint_scores(
    family: str, tokenizer: str, templated: bool, tmp_path: Path
) -> None:
    config = {
        "llama": lambda: LlamaConfig(**DECODER),
        "mistral": lambda: MistralConfig(**DECODER, num_key_value_heads=2, pad_token_id=0),
        "gpt2": lambda: GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, initializer_range=0.3),
    }[family]()
    path = save_policy(tmp_path / "policy", config, **TOKENIZERS[tokenizer])
    rows = [{"prompt": row["prompt"], **{k: row[k].strip() if templated else row[k] for k in ("chosen", "rejected")}}
            for row in PAIRS]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), "chat_template": templated}
    spec = RunSpec.model_validate({"type": "reward_model", "model": {"path": path}, "preferences": data})
    examples = load_examples(spec, load_policy(spec.model)).train
    batch = pack_examples(examples)
    with trained(path, spec, tmp_path) as rank:
        rank.learn(batch, Passes(1))  # a head of zeros would hide any difference
        evaluated = rank.evaluate(batch)[batch.response_mask].tolist()
        rank.save(tmp_path / "checkpoint")
    reward = RewardModelSpec(
        type="reward_model", path=str(tmp_path / "checkpoint"), dtype="float32", chat_template=templated
    )
    model = RewardModel(reward, threads=1)
    samples = [
        RewardSample(row["prompt"], row[name], 1, FinishReason.STOP) for row in rows for name in ("chosen", "rejected")
    ]
    scores = dict(zip((tuple(model._tokens(sample)) for sample in samples), model.score(samples), strict=True))
    sequences = [tokens[:-1] for example in examples for tokens in example.sequences]
    assert scores == pytest.approx(dict(zip(sequences, evaluated, strict=True)), abs=1e-5)
    assert len({round(value, 5) for value in evaluated}) == len(evaluated) == 8


def test_a_policys_template_makes_the_same_sequence_in_training_and_as_a_reward(tmp_path: Path) -> None:
    path = save_policy(tmp_path / "policy", LlamaConfig(**DECODER))
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**DECODER, num_labels=1)).save_pretrained(
        tmp_path / "policy"
    )
    tokens = RewardModel(RewardModelSpec(type="reward_model", path=path, chat_template=True), threads=1)._tokens
    sequence = tokens(RewardSample("w1", "w2", 1, FinishReason.STOP))
    assert [WORDS[token] for token in sequence] == ["<user>", "w1", "<eos>", "<bot>", "w2", "<eos>"]


ENCODER = {**SIZES, "intermediate_size": 32, "initializer_range": 0.3}
OTHERS = {
    "bert": lambda: BertConfig(**ENCODER, max_position_embeddings=24, pad_token_id=1),
    "roberta": lambda: RobertaConfig(**ENCODER, max_position_embeddings=24, pad_token_id=1),
    "modernbert, mean": lambda: ModernBertConfig(
        **ENCODER, classifier_pooling="mean", pad_token_id=1, reference_compile=False,
        bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0,
    ),
    "xlnet, last": lambda: XLNetConfig(vocab_size=len(WORDS), d_model=16, n_layer=2, n_head=2, d_inner=32),
}  # fmt: skip
"""Models that pool otherwise: the first token, the mean, or the last position of a row."""


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("tokenizer", ["none", "own"])
def test_other_models_score_a_sequence_as_it_is_alone(family: str, tokenizer: str, tmp_path: Path) -> None:
    config = OTHERS[family]()
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, **TOKENIZERS[tokenizer])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    model = RewardModel(RewardModelSpec(type="reward_model", path=str(tmp_path), dtype="float32"), threads=1)
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18", "w1 <eos>", "w3 <eos> w2"]
    with torch.inference_mode():
        alone = [plain(input_ids=torch.tensor([[WORDS.index(w) for w in text.split()]])).logits[0, 0] for text in texts]
    scores = model.score([RewardSample("", text, 1, FinishReason.STOP) for text in texts])
    assert scores == pytest.approx(list(map(float, alone)), abs=1e-5)
    assert model._pads is (family != "xlnet, last")


def test_a_batch_that_ends_in_every_token_is_scored(tmp_path: Path) -> None:
    """More sequences than there are tokens: one must be left to pad."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**DECODER, num_labels=1)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    plain.config.pad_token_id = None
    model = RewardModel(RewardModelSpec(type="reward_model", path=str(tmp_path), dtype="float32"), threads=1)
    texts = [" ".join(["w1"] * (1 + number % 3) + [word]) for number, word in enumerate(WORDS)]
    with torch.inference_mode():
        alone = [plain(input_ids=torch.tensor([[WORDS.index(w) for w in text.split()]])).logits[0, 0] for text in texts]
    scores = model.score([RewardSample("", text, 1, FinishReason.STOP) for text in texts])
    assert scores == pytest.approx(list(map(float, alone)), abs=1e-5)


def test_a_padding_token_beyond_the_embedding_is_not_fed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**DECODER, num_labels=1)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, pad_token="<added>")
    model = RewardModel(RewardModelSpec(type="reward_model", path=str(tmp_path), dtype="float32"), threads=1)
    one, other = model.score([RewardSample("", text, 1, FinishReason.STOP) for text in ("w1", "w1 w2 w3")])
    assert isinstance(one, float)
    assert isinstance(other, float)
