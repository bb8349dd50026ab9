"""A tiny sequence-classification model as a reward, built here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from fakes.builders import LONG, drawn
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.calls import Call
from rlhfless.functions.scoring.deployment import RewardModelFunction, RewardModelSettings
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.records import FinishReason, Group, Prompt
from rlhfless.rewards import Failed, RewardError, RewardSample
from rlhfless.spec import RewardModelSpec

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<bot>", *(f"w{i}" for i in range(27))]
TEMPLATE = "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'bot' }}> {{ m.content }} {% endfor %}"


def build(folder: Path, *, labels: int = 1, head: bool = True) -> str:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=0,
    )
    (LlamaForSequenceClassification if head else LlamaForCausalLM)(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("reward-model"))


def spec(path: str, **options: Any) -> RewardModelSpec:
    return RewardModelSpec(type="reward_model", path=path, dtype="float32", **options)


def sample(prompt: str, response: str, **columns: Any) -> RewardSample:
    return RewardSample(prompt, response, 1, FinishReason.STOP, columns)


def plain(path: str, ids: list[int]) -> float:
    """The model's own score of one sequence."""
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
def test_scores_are_the_models_own_however_they_are_batched(path: str, micro_batch_tokens: int) -> None:
    model = RewardModel(spec(path, micro_batch_tokens=micro_batch_tokens), threads=1)
    texts = [("w1 w2 ", "w3"), ("w4 ", "w5 w6 w7 w8 w9"), ("w1 ", "w2")]
    scores = model.score([sample(*text) for text in texts])
    assert scores == pytest.approx([plain(path, ids("".join(text))) for text in texts], abs=1e-5)


def test_a_chat_template_of_its_own(path: str) -> None:
    model = RewardModel(spec(path, chat_template=True, prompt_field="question"), threads=1)
    as_text = sample("rendered", "w2", question="w1")
    as_messages = sample("rendered", "w2", question=[{"role": "user", "content": "w1"}])
    expected = plain(path, ids("<user> w1 <bot> w2"))
    assert model.score([as_text, as_messages]) == pytest.approx([expected] * 2, abs=1e-5)


def templated(folder: Path, template: str) -> str:
    path = build(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def test_arguments_of_its_template(tmp_path: Path) -> None:
    own = templated(tmp_path, TEMPLATE + "{{ grade }}")
    model = RewardModel(spec(own, chat_template=True, chat_template_kwargs={"grade": "w9"}), threads=1)
    assert model.score([sample("w1", "w2")]) == pytest.approx([plain(own, ids("<user> w1 <bot> w2 w9"))], abs=1e-5)
    with pytest.raises(RewardError, match=r"chat_template_kwargs\.grad: .* did you mean `grade`"):
        RewardModel(spec(own, chat_template=True, chat_template_kwargs={"grad": "w9"}), threads=1)


def test_what_its_template_would_drop_is_not_scored(tmp_path: Path) -> None:
    own = templated(tmp_path, "{% for m in messages if m.role != 'system' %}<bot> {{ m.content }} {% endfor %}")
    model = RewardModel(spec(own, chat_template=True, prompt_field="question"), threads=1)
    question = [{"role": "system", "content": "w5"}, {"role": "user", "content": [{"type": "text", "text": "w1"}]}]
    lost, kept = model.score([sample("", "w2", question=question), sample("", "w2", question=question[1:])])
    assert isinstance(lost, Failed)
    assert "content of message 1 (system), 'w5', is not in what it writes" in lost.cause
    assert kept == pytest.approx(plain(own, ids("<bot> w1 <bot> w2")), abs=1e-5)


def test_a_thought_that_its_template_cuts_is_scored(tmp_path: Path) -> None:
    cutting = "{% for m in messages %}<bot> {{ m.content.split('</think>')[-1] }} {% endfor %}"
    own = templated(tmp_path, cutting)
    model = RewardModel(spec(own, chat_template=True), threads=1)
    response = "<think> w3 </think> w2"
    expected = plain(own, [WORDS.index(w) if w in WORDS else 2 for w in f"<bot> w1 <bot> {response}".split()])
    assert model.score([sample("w1", response)]) == pytest.approx([expected], abs=1e-5)


def test_a_long_sequence_keeps_its_end(path: str) -> None:
    model = RewardModel(spec(path, max_tokens=3), threads=1)
    assert model.score([sample("w1 w2 ", "w3 w4 w5")]) == pytest.approx([plain(path, ids("w3 w4 w5"))], abs=1e-5)


def test_what_cannot_be_written_marks_its_sample(path: str) -> None:
    model = RewardModel(spec(path, prompt_field="question"), threads=1)
    missing, messages, good = model.score(
        [sample("p", "w1"), sample("p", "w1", question=[{"role": "user"}]), sample("p", "w2", question="w1 ")]
    )
    assert isinstance(missing, Failed)
    assert "there is no field `question`" in missing.cause
    assert isinstance(messages, Failed)
    assert "set `chat_template: true`" in messages.cause
    assert good == pytest.approx(plain(path, ids("w1 w2")), abs=1e-5)


def test_a_forward_pass_that_fails_marks_its_sample(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RewardModel(spec(path), threads=1)
    forward = model._model

    def fragile(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        if WORDS.index("w9") in input_ids:
            raise RuntimeError("out of memory")
        return forward(input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(model, "_model", fragile)
    bad, good = model.score([sample("w1 ", "w9"), sample("w1 ", "w2")])
    assert isinstance(bad, Failed)
    assert "fails on 2 tokens: out of memory" in bad.cause
    assert good == pytest.approx(plain(path, ids("w1 w2")), abs=1e-5)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has 3 labels; a reward model has one"):
        RewardModel(spec(build(tmp_path / "three", labels=3)), threads=1)
    with pytest.raises(RewardError, match=r"lacks tensor 'score\.weight' \[1, 16\], which LlamaForSequence.* needs"):
        RewardModel(spec(build(tmp_path / "none", head=False)), threads=1)


async def test_the_function_scores_groups(path: str, in_process: Any) -> None:
    binding = DeviceBinding("cpu", ("0",), exclusive=False)
    settings = RewardModelSettings(
        run_id="run",
        lease=LONG,
        rewards=(spec(path, weight=2),),
        on_failure="drop",
        rank_bindings=(binding,),
        call_timeout_s=60,
    )
    function = await in_process(RewardModelFunction, settings)
    prompt = Prompt("p", (6,), "w1 ")
    rollouts = tuple(drawn("p", i, [7], text=text) for i, text in enumerate(["w2", "w3 w4"]))
    reply = await function.score(Call("run", 1, 1), [Group.of(prompt, rollouts)])
    ((first, second),) = reply.value
    assert first.parts["reward_model"] == pytest.approx(plain(path, ids("w1 w2")), abs=1e-5)
    assert first.total == pytest.approx(2 * first.parts["reward_model"])
    assert second.parts["reward_model"] == pytest.approx(plain(path, ids("w1 w3 w4")), abs=1e-5)
    assert (reply.usage.sequences, reply.usage.input_tokens) == (2, 4)
