"""`rlhfless data show`: rows as the policy reads them, what is learned, and what rewards get."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from fakes.prompt_inputs import make_chat_tokenizer, save_policy
from rlhfless.cli import main
from rlhfless.prepare.model import special_tokens
from rlhfless.prepare.shown_rows import pieces

Row = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "model", make_chat_tokenizer(), 512)


class Folder:
    """Writes data and specs, and shows rows of them."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self._model = path, model

    def rows(self, name: str, *rows: Row | str) -> str:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return name

    def show(self, spec: Row, *options: str, status: int = 0) -> str:
        file = self.path / "run.json"
        file.write_text(json.dumps({"model": {"path": str(self._model)}, **spec}))
        result = CliRunner().invoke(main.app, ["data", "show", str(file), *options])
        assert result.exit_code == status, result.output
        return result.output

    def objects(self, spec: Row, *options: str) -> list[Row]:
        return [json.loads(line) for line in self.show(spec, *options, "--json").splitlines()]


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Folder:
    return Folder(tmp_path, model)


def question(text: str, **columns: Any) -> Row:
    return {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], **columns}


RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def rlhf(folder: Folder, rewards: list[Row], **prompts: Any) -> Row:
    path = folder.rows("train.jsonl", question("1 + 1?", answer=" Two "), "", question("é 🎉?", answer="3", level=2.50))
    return {"prompts": {"path": path, "chat_template": True, **prompts}, "rewards": rewards}


MATCH = {"type": "exact_match", "ignore_case": True}


def test_a_row_is_shown_as_given_as_rendered_and_as_rewards_get_it(folder: Folder) -> None:
    output = folder.show(rlhf(folder, [MATCH, {"type": "format"}]), "--row", "2")
    assert "train  row 2 of 2 · train.jsonl:3 · training" in output
    assert "    system: Be brief.\n    user: é 🎉?\n" in output
    assert f"\n{RENDERED.format('é 🎉?')}\n" in output
    assert "exact_match (exact_match, weight 1)\n  expected: 3\n" in output
    assert "format (format, weight 1)\n  nothing else\n" in output


@pytest.mark.parametrize(
    ("reward", "gets"),
    [
        (MATCH, {"expected": "two"}),
        ({"type": "exact_match", "strip": False}, {"expected": " Two "}),
        ({"type": "regex", "pattern": "(.*)", "answer_field": "answer"}, {"expected": "Two"}),
        ({"type": "regex", "pattern": "x"}, {}),
        ({"type": "math", "answer_field": "level"}, {"expected": "1.50", "read as": "1.5"}),
        ({"type": "exact_match", "answer_field": "level"}, {"expected": "1.50"}),
        ({"type": "json_schema", "json_schema": {"type": "object"}}, {"schema": {"type": "object"}}),
        ({"type": "length_penalty", "free_tokens": 1, "max_tokens": 9}, {}),
        (
            {"type": "python", "target": "math:fsum"},
            {"prompt": RENDERED.format("1 + 1?"), "columns": question("1 + 1?", answer=" Two ", level=1.5)},
        ),
    ],
)
def test_what_each_kind_of_reward_gets(folder: Folder, reward: Row, gets: Row) -> None:
    path = folder.rows("one.jsonl", json.dumps(question("1 + 1?", answer=" Two ", level=1)).replace("1}", "1.50}"))
    spec = {"prompts": {"path": path, "chat_template": True}, "rewards": [reward]}
    if reward["type"] == "python":
        output = folder.show(spec, "--json", status=2)  # math.fsum takes no such arguments
        (row,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    else:
        (row,) = folder.objects(spec)
    assert row["rewards"][0]["gets"] == gets


def test_tests_are_shown_by_their_shape(folder: Folder) -> None:
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["3", "4"]})
    path = folder.rows("code.jsonl", {"prompt": "add 2", "tests": tests}, {"prompt": "add 3", "tests": "assert f(1)"})
    spec = {"prompts": {"path": path}, "rewards": [{"type": "code"}]}
    shown = [row["rewards"][0]["gets"]["tests"] for n in "12" for row in folder.objects(spec, "--row", n)]
    assert shown[0] == [{"input": "1", "output": "3"}, {"input": "2", "output": "4"}]
    assert shown[1] == [{"source": "assert f(1)"}]


def test_a_row_that_a_reward_cannot_score_is_shown_and_refused(folder: Folder) -> None:
    spec = rlhf(folder, [MATCH, {"type": "exact_match", "name": "level", "answer_field": "level"}])
    output = folder.show(spec, status=2)
    assert "expected: two" in output
    assert "cannot score it: reward 'level': the column `level` is missing" in output
    assert "the rewards cannot score the rows shown: 1 problem\n- train.jsonl:1: " in output
    folder.show(spec, "--row", "2")


def test_data_that_a_run_refuses_is_refused_with_its_line(folder: Folder) -> None:
    path = folder.rows("train.jsonl", question("1?"), {"prompt": [{"text": "no role"}]})
    output = folder.show({"prompts": {"path": path, "chat_template": True}, "rewards": [MATCH]}, status=2)
    assert "train.jsonl:2" in output
    assert "prompts.path" in output


DEMONSTRATIONS = {"prompt_field": "messages", "chat_template": True, "response_field": None}


def test_learned_spans_are_between_marks_or_alone(folder: Folder) -> None:
    messages = [{"role": "user", "content": "8 x 7?"}, {"role": "assistant", "content": " 56 🎉"}]
    path = folder.rows("sft.jsonl", {"messages": messages})
    spec = {"type": "sft", "demonstrations": {"path": path, **DEMONSTRATIONS}}
    output = folder.show(spec)
    assert "8 x 7?<|im_end|>\n<|im_start|>assistant\n⟦ 56 🎉<|im_end|>" in output
    assert folder.show(spec, "--learned").startswith("train row 1 (sft.jsonl:1): training\n 56 🎉<|im_end|>")
    (row,) = folder.objects(spec)
    (sequence,) = row["sequences"]
    assert (sequence["name"], sequence["tokens"]) == ("response", len(sequence["token_ids"]))
    learned = [token for token, one in zip(sequence["token_ids"], sequence["learned"], strict=True) if one]
    assert make_chat_tokenizer().decode(learned) == sequence["learned_text"]


def test_values_are_shown_as_the_data_has_them(folder: Folder) -> None:
    columns = {"answer": [Decimal("42.50")], "at": [date(2026, 11, 28)], "list": [[1.5, None]], "prompt": ["\x1b[2J?"]}
    pq.write_table(pa.table(columns), folder.path / "rows.parquet")
    spec = {"prompts": {"path": "rows.parquet"}, "rewards": [MATCH]}
    output = folder.show(spec)
    for line in ("answer: 42.50 (Decimal)", "at: 2026-11-28 (date)", "list: [1.5, null]", "prompt: \\x1b[2J?"):
        assert f"  {line}\n" in output
    path = folder.rows("rows.jsonl", '{"prompt": "a", "answer": 1.50, "text": "' + "x" * 5000 + '"}')
    output = folder.show({"prompts": {"path": path}, "rewards": [MATCH]})
    assert "  answer: 1.50\n" in output
    assert "xx… (5,000 characters)\n" in output


def test_a_reward_model_has_no_spans_to_show(folder: Folder) -> None:
    path = folder.rows("pairs.jsonl", {"prompt": "? ", "chosen": "a", "rejected": "b"})
    spec = {"type": "reward_model", "preferences": {"path": path}}
    assert "learns the score of a whole sequence" in folder.show(spec, "--learned", status=2)


@pytest.mark.parametrize("run_type", ["dpo", "reward_model"])
def test_both_responses_of_a_pair_are_shown(folder: Folder, run_type: str) -> None:
    path = folder.rows("pairs.jsonl", {"prompt": "é? ", "chosen": "ü", "rejected": "yes"})
    (row,) = folder.objects({"type": run_type, "preferences": {"path": path}})
    names = [
        (one["name"], one["text"].removesuffix("<|im_end|>").removesuffix("<|endoftext|>")) for one in row["sequences"]
    ]
    assert names == [("chosen", "é? ü"), ("rejected", "é? yes")]
    if run_type == "dpo":
        assert [one["learned_text"] for one in row["sequences"]] == ["ü<|im_end|>", "yes<|im_end|>"]


def test_each_data_set_is_shown_by_its_own_rows(folder: Folder) -> None:
    """Two files of the same name, one of them held out, and a named set with more rows."""
    spec = rlhf(folder, [MATCH], held_out={"path": folder.rows("held/train.jsonl", question("held?", answer="x"))})
    extra = folder.rows("extra.jsonl", *(question(f"extra {n}?", answer="y") for n in range(4)))
    spec["evaluation"] = {"sets": [{"name": "extra", "path": extra, "max_prompts": 3}]}
    rows = folder.objects(spec)
    assert [(row["dataset"], row["where"], row["use"]) for row in rows] == [
        ("train", "train.jsonl:1", "training"),
        ("held_out", "train.jsonl:1", "held out"),
        ("extra", "extra.jsonl:1", "held out"),
    ]
    assert [row["sequences"][0]["text"] for row in rows] == list(map(RENDERED.format, ("1 + 1?", "held?", "extra 0?")))
    (unused,) = folder.objects(spec, "--row", "4")
    assert (unused["dataset"], unused["sequences"]) == ("extra", [])
    assert unused["use"] == "not used: max_prompts of its held-out prompts is smaller"


def test_a_mixture_is_shown_by_its_names(folder: Folder) -> None:
    sets = [
        {"name": name, "path": folder.rows(f"{name}.jsonl", {"prompt": f"{name}?", "answer": name})}
        for name in ("sums", "words")
    ]
    spec = {"prompts": {"mixture": sets}, "rewards": [{**MATCH, "sets": ["words"]}, {"type": "format"}]}
    rows = folder.objects(spec)
    assert [(row["dataset"], [one["name"] for one in row["rewards"]]) for row in rows] == [
        ("sums", ["format"]),
        ("words", ["exact_match", "format"]),
    ]


def test_a_row_of_a_split_file_says_which_part_it_is_in(folder: Folder) -> None:
    path = folder.rows("train.jsonl", *({"prompt": f"{n}?", "answer": str(n)} for n in range(6)))
    spec = {"prompts": {"path": path, "held_out": {"fraction": 0.34}}, "rewards": [MATCH]}
    uses = [folder.objects(spec, "--row", str(n))[0]["use"] for n in range(1, 7)]
    assert sorted(uses) == ["held out"] * 2 + ["training"] * 4


def test_a_training_row_that_is_held_out_too_says_so(folder: Folder) -> None:
    held = folder.rows("held.jsonl", question("1 + 1?", answer="2"))
    (train, _) = folder.objects(rlhf(folder, [MATCH], held_out={"path": held}))
    assert train["use"] == "not used: its prompt is held out, too"
    assert ["are held out too" in text for text in train["warnings"]] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--row", "3"], "--row: 3, but there are 2 rows"),
        (["--dataset", "trian"], "did you mean `train`?"),
        (["--learned"], "--learned: a run of type rlhf learns its own responses"),
        (["--dataset", ""], "no data set is named ''"),
        (["--row", "0"], "Invalid value for '--row'"),
    ],
)
def test_what_cannot_be_shown_is_refused(folder: Folder, options: list[str], message: str) -> None:
    assert message in folder.show(rlhf(folder, [MATCH]), *options, status=2)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: the space before a word is a part of its token, and lost when that is decoded alone; other
    characters are bytes."""
    letters = [
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz",
        "\u2581a",
        "\u2581two",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocabulary = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    merges = [("\u2581", "a"), ("\u2581", "t"), ("\u2581t", "w"), ("\u2581tw", "o")]
    vocabulary |= {token: len(vocabulary) + place for place, token in enumerate(["\u2581t", "\u2581tw"])}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"bytes": make_chat_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "<|im_start|>user\n<think></think><|im_end|><|im_end|>",
        "🎉é<think>🎉</think>é",
        "  spaces  <|im_end|>  ",
        "<s>a two a</s><s> two",
        "two 🎉 two",
        "line\r\n\ttab",
    ],
)
def test_pieces_lose_nothing_wherever_learning_begins(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = set(special_tokens(tokenizer).values())
    for first in range(len(ids) + 1):
        found = list(pieces(tokenizer, ids, [place >= first for place in range(len(ids))]))
        assert "".join(piece.text for piece in found) == tokenizer.decode(ids)
        assert all(piece.special == (piece.text in special) for piece in found)
