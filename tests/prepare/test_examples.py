"""Demonstrations and preferences become the sequences that a policy draws, or that a reward model scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhfless.prepare import examples
from rlhfless.prepare.examples import load_examples
from rlhfless.prepare.model import PolicyModel, TokenizerInfo
from rlhfless.records.rollouts import Example
from rlhfless.spec import RunSpec
from rlhfless.spec.data import DATA
from rlhfless.spec.errors import InputError

WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", ":", "a", "b", "c", "d"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def policy(context_tokens: int | None = 12, template: str | None = TEMPLATE) -> PolicyModel:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=template
    )
    return PolicyModel(fast, TokenizerInfo("t", len(WORDS), 1, 0), context_tokens, None, ())


def load(folder: Path, rows: list[dict[str, Any]], run_type: str, model: PolicyModel | None = None, **data: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {DATA[run_type]: {"path": str(file), "id_field": "id", **data}}  # type: ignore[index]
    spec = RunSpec.model_validate({"type": run_type, "model": {"path": "m"}, **section})
    return load_examples(spec, model or policy())


def words(tokens: tuple[int, ...]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def only(sets: Any) -> Example:
    (example,) = sets.train
    return cast(Example, example)


def test_a_policy_learns_the_response_and_its_end(tmp_path: Path) -> None:
    example = only(load(tmp_path, [{"id": "x", "prompt": "a b", "response": "c d"}], "sft"))
    assert words(example.token_ids) == "a b"
    assert [words(tokens) for tokens in example.sequences] == ["a b c d <eos>"]
    assert example.learned_from == (2,)
    assert (example.prompt_id, dict(example.columns)) == ("x", {})


def test_a_pair_has_the_chosen_response_first(tmp_path: Path) -> None:
    rows = [{"id": "x", "prompt": "a", "better": "b", "worse": "c c"}]
    example = only(load(tmp_path, rows, "dpo", chosen_field="better", rejected_field="worse"))
    assert [words(tokens) for tokens in example.sequences] == ["a b <eos>", "a c c <eos>"]
    assert example.learned_from == (1, 1)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "responses"),
    [
        ("user : a assistant : b", "user : a assistant : c", "user : a assistant :", ("b", "c")),
        ("user : a assistant : b c", "user : a assistant : b d", "user : a assistant : b", ("c", "d")),
        # One begins with the other.
        ("user : assistant : b", "user : assistant : b c", "user : assistant :", ("b", "b c")),
    ],
)
def test_pairs_of_whole_texts_share_their_prompt(
    tmp_path: Path, chosen: str, rejected: str, prompt: str, responses: tuple[str, str]
) -> None:
    """Rows as in Anthropic's hh-rlhf: `chosen` and `rejected` have the dialogue, and there is no prompt."""
    rows = [{"id": "x", "chosen": chosen, "rejected": rejected}]
    example = only(load(tmp_path, rows, "dpo"))
    assert example.text == prompt
    learned = [words(example.sequences[i][example.learned_from[i] :]) for i in range(2)]
    assert learned == [f"{response} <eos>" for response in responses]


def test_a_reward_model_reads_the_text_without_an_end_and_a_place_for_its_score(tmp_path: Path) -> None:
    example = only(load(tmp_path, [{"id": "x", "prompt": "a ", "chosen": "b", "rejected": "c d"}], "reward_model"))
    assert [words(tokens) for tokens in example.sequences] == ["a b <pad>", "a c d <pad>"]
    assert example.learned_from == (2, 3)


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"prompt": "a", "response": "b"}, {}),
        ({"prompt": [{"role": "user", "content": "a"}], "response": [{"role": "assistant", "content": "b"}]}, {}),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"prompt_field": "messages", "response_field": None},
        ),
        ({"data": {"q": "a", "r": ["b"]}}, {"prompt_field": "data.q", "response_field": "data.r.0"}),
        (
            {"data": {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}},
            {"prompt_field": "data.chat", "response_field": None},
        ),
    ],
    ids=["texts", "messages", "a conversation", "nested", "a nested conversation"],
)
def test_a_chat_is_rendered_and_learned_up_to_the_end_of_its_turn(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any]
) -> None:
    example = only(load(tmp_path, [{"id": "x", **row}], "sft", chat_template=True, **data))
    assert words(example.token_ids) == "user : a <eos> assistant :"
    assert [words(tokens) for tokens in example.sequences] == ["user : a <eos> assistant : b <eos>"]
    assert example.learned_from == (6,)


@pytest.mark.parametrize(
    ("run_type", "row", "said"),
    [
        ("sft", {"prompt": "a", "respons": "b"}, ["in 1 of 2 rows, first at rows.jsonl:2", "`respons`"]),
        ("sft", {"prompt": "a", "response": 7}, ["`response` is not a response", "rows.jsonl:2: got 7", "a string"]),
        ("sft", {"prompt": "a", "response": " "}, ["`response` is not a response"]),
        ("sft", {"prompt": "a", "response": "b " * 12}, ["more than 12 tokens", "14 tokens", "max_context_tokens"]),
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            ["both responses are the same", "nothing is preferred"],
        ),
        ("reward_model", {"prompt": "a", "chosen": "b"}, ["no response in `rejected`", "preferences.path"]),
    ],
)
def test_a_faulty_row_is_named_with_a_hint(tmp_path: Path, run_type: str, row: dict[str, Any], said: list[str]) -> None:
    good = {"id": "x", "prompt": "a", "response": "b", "chosen": "b", "rejected": "c"}
    with pytest.raises(InputError) as caught:
        load(tmp_path, [good, {"id": "y", **row}], run_type)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    rewriting = policy(template="{{ messages | length }}{% for m in messages %} {{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match="writes the prompt otherwise once it is answered"):
        load(tmp_path, [{"id": "x", "prompt": "a", "response": "b"}], "sft", rewriting, chat_template=True)


def test_a_prompt_that_is_held_out_is_not_trained_on_with_another_response(tmp_path: Path) -> None:
    rows = [{"id": f"{p}{n}", "prompt": p, "response": r} for p in "abcd" for n, r in enumerate("ab")]
    sets = load(tmp_path, rows, "sft", held_out={"fraction": 0.25})
    held_out = {example.text for example in sets.held_out}
    assert len(sets.held_out) == 2
    assert not held_out & {example.text for example in sets.train}
    assert all(isinstance(example, Example) for example in (*sets.train, *sets.held_out))


def test_a_plan_reads_the_lengths_of_rows_spread_over_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "MOST_READ", 2)
    monkeypatch.setattr(examples, "load_policy", lambda _: policy())
    file = tmp_path / "rows.jsonl"
    answers = ["c", "a b", "c c", "d"]  # the first and the third are read
    rows = [{"prompt": f"a {'b ' * i}", "response": answer} for i, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"type": "sft", "model": {"path": "m"}, "demonstrations": {"path": str(file)}}
    found = examples.example_lengths(RunSpec.model_validate(values))
    assert (found.rows, found.read) == (4, 2)
    assert (found.prompt_tokens, found.response_tokens) == (2.0, 2.5), "with the end of each"
