"""Prompts as users keep them: what is read, what is refused, and whether the message helps."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from huggingface_hub.errors import EntryNotFoundError

from rlhfless.prepare.prompts import load_prompts
from rlhfless.spec import NamedSetSpec, PromptsSpec, SizesSpec
from rlhfless.spec.errors import InputError


@pytest.fixture
def load(tokenizer):
    def load_with(
        path, *, tokenizer=tokenizer, seed=0, context=32, sizes=None, named_sets=(), whole_rows=False, **options
    ):
        spec, sizes = PromptsSpec(path=path and str(path), **options), sizes or SizesSpec()
        given = {"max_context_tokens": context, "seed": seed, "sizes": sizes, "named_sets": named_sets}
        return load_prompts(spec, tokenizer, whole_rows=whole_rows, **given)

    return load_with


@pytest.fixture
def fault(load):
    def refused(path, **options):
        with pytest.raises(InputError) as caught:
            load(path, **options)
        return str(caught.value)

    return refused


def rows(count, **columns):
    return [{"prompt": f"w{i // 50} w{i % 50}", "answer": i, **columns} for i in range(count)]


# -- what is read


def test_a_prompt_has_its_tokens_text_and_other_columns(load, write_rows):
    sets = load(write_rows([{"prompt": "w1 w2", "answer": "3", "level": 4}, "", {"prompt": "w3"}]))
    first, second = sets.train
    assert (first.text, first.token_ids) == ("w1 w2", (6, 7))
    assert first.columns == {"answer": "3", "level": 4}
    assert second.token_ids == (8,)
    assert (first.where, second.where) == ("train.jsonl:1", "train.jsonl:3")
    assert dataclasses.replace(first, where="") == first, "the place is for messages alone"
    assert (sets.held_out, sets.warnings) == ((), ())


def test_parquet_is_recognised_by_content(load, tmp_path):
    path = tmp_path / "prompts.data"
    pa.parquet.write_table(pa.table({"question": ["w1", "w2"], "answer": [1, 2]}), path)
    prompts = load(path, prompt_field="question").train
    assert [(prompt.text, prompt.columns) for prompt in prompts] == [
        ("w1", {"answer": 1}),
        ("w2", {"answer": 2}),
    ]


def test_numbers_of_json_keep_the_text_that_the_data_has(load, write_rows):
    path = write_rows(['{"prompt": "w1", "answer": 1.50, "nested": {"small": 1e-5}, "big": 12345678901234567890}'])
    (prompt,) = load(path).train
    assert (prompt.columns["answer"], str(prompt.columns["answer"])) == (1.5, "1.50")
    assert str(prompt.columns["nested"]["small"]) == "1e-5"
    assert prompt.columns["big"] == 12345678901234567890


def test_narrow_numbers_of_parquet_are_as_they_were_written(load, tmp_path):
    path = tmp_path / "prompts.parquet"
    kind = pa.schema(
        {
            "prompt": pa.string(),
            "answer": pa.float32(),
            "more": pa.list_(pa.struct({"x": pa.float16()})),
            "y": pa.float64(),
        }
    )
    rows = [{"prompt": "w1", "answer": 0.1, "more": [{"x": 0.1}, None], "y": 0.1}, {"prompt": "w2"}]
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema=kind), path)
    first, second = load(path).train
    assert first.columns == {"answer": 0.1, "more": [{"x": 0.1}, None], "y": 0.1}
    assert second.columns == {"answer": None, "more": None, "y": None}


def test_prompt_and_id_may_be_nested(load, fault, write_rows):
    row = {"data": {"questions": ["w1", "w2"]}, "extra_info": {"index": 7}, "reward_model": {"ground_truth": "4"}}
    path = write_rows([row])
    (prompt,) = load(path, prompt_field="data.questions.-1", id_field="extra_info.index").train
    assert (prompt.text, prompt.prompt_id) == ("w2", "7")
    assert prompt.columns == row
    assert "did you mean `data.questions`?" in fault(path, prompt_field="data.question")
    assert "did you mean `extra_info.index`?" in fault(
        path, prompt_field="data.questions.0", id_field="extra_info.indx"
    )


def test_a_byte_order_mark_is_ignored(load, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "w1"}\n', encoding="utf-8-sig")
    assert load(path).train[0].text == "w1"


def test_a_data_set_folder_is_read_by_datasets(load, tmp_path, write_rows):
    (tmp_path / "set").mkdir()
    write_rows(rows(3), "set/train.jsonl")
    write_rows(rows(2), "set/test.jsonl")
    assert [prompt.columns["answer"] for prompt in load(tmp_path / "set").train] == [0, 1, 2]
    assert len(load(tmp_path / "set", split="test").train) == 2


def test_ids_are_hashes_of_the_prompt_and_repetitions_are_numbered(load, write_rows):
    sets = load(write_rows([{"prompt": "w1"}, {"prompt": "w2"}, {"prompt": "w1"}, {"prompt": "w1"}]))
    one, two, again, third = (prompt.prompt_id for prompt in sets.train)
    assert (again, third) == (f"{one}-2", f"{one}-3")
    assert len(one) == 16
    assert two != one
    assert load(write_rows([{"prompt": "w1", "other": 1}], "b.jsonl")).train[0].prompt_id == one
    assert sets.warnings == (
        "prompts.path: 2 of 4 rows have the same tokens as an earlier row, such as train.jsonl:3 and train.jsonl:1; "
        "all are kept, so these prompts count more often than others",
    )


def test_ids_from_a_field(load, write_rows):
    sets = load(write_rows([{"prompt": "w1", "key": 7}, {"prompt": "w1", "key": "b"}]), id_field="key")
    assert [prompt.prompt_id for prompt in sets.train] == ["7", "b"]


def test_columns_and_ids_that_no_file_can_hold_are_shown_as_escapes(load, write_rows):
    given = {"prompt": "w1", "key": "a\ud800", "tests": [{"in\udcff": "b\0"}], "level": 4}
    (prompt,) = load(write_rows([given]), id_field="key").train
    assert prompt.prompt_id == "a\\ud800"
    assert prompt.columns == {"key": "a\\ud800", "tests": [{"in\\udcff": "b\\x00"}], "level": 4}


def test_chat_messages_and_plain_texts_are_rendered(load, write_rows, chat_tokenizer):
    given = [
        {"prompt": [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]},
        {"prompt": "w3"},
    ]
    many, one = load(write_rows(given), tokenizer=chat_tokenizer, chat_template=True).train
    assert many.text == "<user> w1 <user> w2 <bot>"
    assert (one.text, one.token_ids) == ("<user> w3 <bot>", (3, 8, 4))
    assert [many.columns, one.columns] == given, "rewards may want the prompt as it was written"


# -- what is refused


@pytest.mark.parametrize(
    ("given", "options", "parts"),
    [
        (
            [{"question": "w1", "promt": "w1"}, {"prompt": "w1"}],
            {},
            [
                "no field `prompt` in 1 of 2 rows, first at train.jsonl:1",
                "question, promt",
                "`promt`?",
                "prompt_field",
            ],
        ),
        ([{"prompt": None}], {}, ["no field `prompt`"]),
        ([{"prompt": "w1"}, {"prompt": 3}], {}, ["`prompt` is not a string", "train.jsonl:2: got 3"]),
        ([{"prompt": " "}, {"prompt": ""}], {}, ["`prompt` is empty in 2 of 2 rows", "remove these rows"]),
        ([{"prompt": []}], {}, ["`prompt` is empty"]),
        ([{"prompt": "w1 \ud83d"}], {}, ["`prompt` is not valid Unicode", "surrogates not allowed"]),
        (
            [{"prompt": "w1", "key": "\ud800"}, {"prompt": "w2", "key": "\\ud800"}],
            {"id_field": "key"},
            ["a prompt id occurs again", "is also at train.jsonl:1"],
        ),
        (
            [{"prompt": [{"role": "user", "content": "w1"}]}],
            {},
            ["list of chat messages in 1 of 1", "prompts.chat_template: true"],
        ),
        (
            [{"prompt": "w1"}, {"prompt": "w " * 40}, {"prompt": "w " * 32}],
            {},
            [
                "more than 31 tokens",
                "in 2 of 3 rows, first at train.jsonl:2: 40 tokens",
                "max_context_tokens (now 32)",
            ],
        ),
        (
            [{"prompt": "w1", "key": 1}, {"prompt": "w2"}],
            {"id_field": "key"},
            ["no id in `key`", "train.jsonl:2"],
        ),
        (
            [{"prompt": "w1", "key": 1}, {"prompt": "w2", "key": "1"}],
            {"id_field": "key"},
            ["a prompt id occurs again in 1 of 2", "train.jsonl:2: '1' is also at train.jsonl:1"],
        ),
        (
            ["{'prompt': 1}", "{}", "[1]", "{"],
            {},
            ["train.jsonl:1: not JSON", "train.jsonl:3: an object", "got [1]"],
        ),
        (["{"] * 9, {}, ["train.jsonl:3: not JSON", "(and 6 more)", "one JSON object per line"]),
        (['{"prompt": "w1"}', '{"n": ' + "1" * 5000 + "}"], {}, ["train.jsonl:2: not JSON", "4300 digits"]),
        (['{"n": ' + "[" * 100_000 + "]" * 100_000 + "}"], {}, ["train.jsonl:1: not JSON", "nested too deeply"]),
        ([{"prompt": "w1", "key": float("nan")}], {"id_field": "key"}, ["got nan\n    Leave prompts.id_field out"]),
        ([], {}, ["is empty"]),
        (["", " "], {}, ["is empty"]),
    ],
)
def test_a_faulty_row_is_named_with_its_line_and_the_mend(fault, write_rows, given, options, parts):
    message = fault(write_rows(given), **options)
    assert "prompts.path" in message
    assert all(part in message for part in parts), message


def test_all_kinds_of_fault_are_told_at_once(fault, write_rows):
    message = fault(write_rows([{"prompt": ""}, {"prompt": 1}, {"prompt": "w " * 40}]))
    assert "3 problems" in message


def test_no_context_limit_allows_any_length(load, write_rows):
    assert len(load(write_rows([{"prompt": "w " * 40}]), context=None).train[0].token_ids) == 40


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (["w1"], ["`prompt` is not a list of chat messages", "role: user"]),
        ([{"content": "w1"}], ["`prompt` is not a list of chat messages"]),
        ([{"role": "system", "content": "w1"}], ["the chat template fails", "only users may speak"]),
    ],
)
def test_faulty_messages_are_named(fault, write_rows, chat_tokenizer, prompt, parts):
    message = fault(write_rows([{"prompt": prompt}]), tokenizer=chat_tokenizer, chat_template=True)
    assert all(part in message for part in parts), message


def test_a_tokenizer_without_a_chat_template_is_named(fault, write_rows):
    message = fault(write_rows(rows(3)), chat_template=True)
    assert "the chat template fails in 3 of 3 rows" in message
    assert "leave prompts.chat_template out" in message


def test_no_such_file_names_the_nearest(fault, write_rows, tmp_path):
    write_rows(rows(1))
    message = fault(tmp_path / "trian.jsonl")
    assert "trian.jsonl': no such file" in message
    assert "did you mean `train.jsonl`?" in message


def test_a_broken_parquet_file_is_named(fault, tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    assert "cannot be read as Parquet" in fault(path)


def test_a_file_that_is_not_text_is_named(fault, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in fault(path)


def test_a_file_that_the_system_refuses_to_read_is_named(fault):
    """The memory of this process: reading its first bytes is an input/output error, for root as well."""
    assert "'/proc/self/mem' cannot be read: [Errno 5]" in fault("/proc/self/mem")


def test_hub_data_sets_need_datasets(fault, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    message = fault("openai/gsm8k:main")
    assert "'openai/gsm8k:main' is not a file here" in message
    assert "pip install 'rlhfless[data]'" in message


def test_a_hub_that_cannot_be_reached_is_named(fault, monkeypatch):
    import datasets

    def unreachable(name, configuration, **options):
        assert (name, configuration) == ("hf://datasets/openai/gsm8k", "main")
        assert options == {"split": "train", "revision": "abc"}
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nand more")

    monkeypatch.setattr("rlhfless.prepare.data_rows.foreign_files", lambda name: ("abc", ""))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = fault("openai/gsm8k:main")
    assert "ConnectionError: Couldn't reach 'hf://datasets/openai/gsm8k' on the Hub" in message
    assert "and more" not in message
    assert "name:configuration" in message


CARD = "---\nconfigs:\n- config_name: default\n  data_files:\n  - {{split: train, path: {}}}\n---\n"


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("where", ["{url}/rows.jsonl", "[a.jsonl, '{url}/rows.jsonl']", "{file}", "../secret.jsonl"])
def test_a_data_set_names_no_files_outside_of_itself(fault, tmp_path, write_rows, listener, card, where):
    """`datasets` would ask any server, and open any file."""
    write_rows(rows(1), "secret.jsonl")
    (tmp_path / "set").mkdir()
    write_rows(rows(1), "set/a.jsonl")
    named = where.format(url=listener.url, file=tmp_path / "secret.jsonl")
    (tmp_path / "set" / card).write_text(CARD.format(named) if card == "README.md" else CARD.format(named)[4:-4])
    assert "names data outside of it" in fault(tmp_path / "set")
    assert listener.connections == 0


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
def test_the_card_of_a_hub_data_set_is_looked_at_first(fault, tmp_path, listener, monkeypatch, card):
    def given(name, file, *, repo_type, revision):
        assert (name, repo_type, revision) == ("owner/name", "dataset", "abc")
        if file != card:
            raise EntryNotFoundError(file)
        text = CARD.format(f"{listener.url}/x.jsonl")
        (tmp_path / file).write_text(text if card == "README.md" else text[4:-4])
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="abc"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", given)
    assert "the card of 'owner/name' names data outside of it" in fault("owner/name")
    assert listener.connections == 0


def test_a_data_set_may_name_its_own_files(load, tmp_path, write_rows):
    (tmp_path / "set").mkdir()
    write_rows(rows(3), "set/a.jsonl")
    (tmp_path / "set" / "README.md").write_text(CARD.format("a.jsonl"))
    assert len(load(tmp_path / "set").train) == 3


@pytest.mark.parametrize("name", ["secret.jsonl", "secret", "text", "json", "json:default"])
def test_no_name_is_looked_for_in_the_working_directory(fault, tmp_path, write_rows, monkeypatch, name):
    write_rows(rows(1), "secret.jsonl")
    (tmp_path / "secret").symlink_to(tmp_path)
    (tmp_path / "rows.txt").write_text("w1")
    monkeypatch.chdir(tmp_path)
    assert f"{name!r}: no such file" in fault(name)


# -- held-out prompts


def test_named_sets_have_names_in_their_ids_and_are_not_trained_on(load, write_rows):
    train, held_out = write_rows(rows(5)), write_rows([{"prompt": "w9"}], "test.jsonl")
    first = write_rows([{"prompt": "w9"}, {"prompt": "w0 w1"}], "first.jsonl")
    second = write_rows([{"prompt": "w9"}, {"prompt": "w8"}, {"prompt": "w7"}], "second.jsonl")
    named = [NamedSetSpec(name="a", path=str(first)), NamedSetSpec(name="b", path=str(second), max_prompts=2)]
    sets = load(train, held_out={"path": str(held_out)}, named_sets=named)
    assert [prompt.text for prompt in sets.train] == ["w0 w0", "w0 w2", "w0 w3", "w0 w4"]
    told = [(prompt.source, prompt.text) for prompt in sets.held_out]
    assert told == [("", "w9"), ("a", "w9"), ("a", "w0 w1"), ("b", "w9"), ("b", "w8")]
    assert len({prompt.prompt_id for prompt in sets.held_out}) == 5
    assert sets.held_out[1].prompt_id == f"a/{sets.held_out[0].prompt_id}"


def test_a_mixture_has_the_prompts_of_all_its_sets(load, write_rows):
    first = write_rows([{"prompt": "w1"}, {"prompt": "w2"}], "first.jsonl")
    second = write_rows([{"question": "w1", "no": 7}, {"question": "w3", "no": 8}], "second.jsonl")
    mixture = [{"name": "a", "path": str(first)}]
    mixture += [{"name": "b", "path": str(second), "prompt_field": "question", "id_field": "no"}]
    held_out = write_rows([{"prompt": "w2"}], "test.jsonl")
    sets = load(None, mixture=mixture, held_out={"path": str(held_out)})
    assert [(prompt.source, prompt.text) for prompt in sets.train] == [("a", "w1"), ("b", "w1"), ("b", "w3")]
    assert [prompt.prompt_id for prompt in sets.train[1:]] == ["b/7", "b/8"]
    halves = load(None, mixture=mixture, held_out={"fraction": 0.5, "max_prompts": 2})
    assert {prompt.source for prompt in halves.held_out} <= {"a", "b"}
    assert len(halves.train) + len(halves.held_out) >= 3


def test_a_fault_of_a_named_set_names_its_field(fault, write_rows, tmp_path):
    named = [NamedSetSpec(name="a", path=str(tmp_path / "none.jsonl"))]
    assert "evaluation.sets.0.path" in fault(write_rows(rows(3)), named_sets=named)
    mixture = [{"name": "a", "path": str(write_rows(rows(2)))}, {"name": "b", "path": str(tmp_path / "none.jsonl")}]
    assert "prompts.mixture.1.path" in fault(None, mixture=mixture)


def test_a_held_out_file_keeps_its_prompts_out_of_training(load, write_rows):
    train = write_rows(rows(10))
    held_out = write_rows([*rows(3), {"prompt": "w40", "answer": 0}], "test.jsonl")
    sets = load(train, held_out={"path": str(held_out)})
    assert [prompt.columns["answer"] for prompt in sets.train] == [3, 4, 5, 6, 7, 8, 9]
    assert len(sets.held_out) == 4
    assert "3 training prompts are held out too, and are not trained on" in sets.warnings[0]


def test_tasks_of_an_environment_are_whole_rows(load, write_rows):
    train = write_rows([{"prompt": "w1", "id": number, "code": number % 4} for number in range(8)])
    held_out = write_rows([{"prompt": "w1", "id": 99, "code": 2}], "test.jsonl")
    sets = load(train, held_out={"path": str(held_out)}, id_field="id", whole_rows=True)
    assert [prompt.columns["code"] for prompt in sets.train] == [0, 1, 3, 0, 1, 3]
    assert sets.warnings == ("prompts.held_out: 2 training prompts are held out too, and are not trained on",)


def test_a_fraction_is_drawn_by_hash_and_seed(load, write_rows):
    path = write_rows(rows(1000))
    sets = load(path, held_out={"fraction": 0.1})
    assert (len(sets.train), len(sets.held_out)) == (900, 100)
    assert not {prompt.text for prompt in sets.train} & {prompt.text for prompt in sets.held_out}
    assert load(path, held_out={"fraction": 0.1}) == sets
    other = load(path, held_out={"fraction": 0.1}, seed=1)
    assert {prompt.text for prompt in other.held_out} != {prompt.text for prompt in sets.held_out}


def test_a_small_fraction_still_holds_one_out_and_a_repeated_prompt_never_overlaps(load, write_rows):
    sets = load(write_rows([{"prompt": "w1"}, {"prompt": "w1"}, {"prompt": "w2"}]), held_out={"fraction": 0.01})
    assert len(sets.held_out) == 1
    assert not {prompt.text for prompt in sets.train} & {prompt.text for prompt in sets.held_out}


def test_at_most_max_prompts_are_evaluated_and_the_others_are_still_not_trained_on(load, write_rows):
    sets = load(write_rows(rows(100)), held_out={"fraction": 0.5, "max_prompts": 10})
    assert (len(sets.train), len(sets.held_out)) == (50, 10)


def test_holding_everything_out_is_refused(fault, write_rows):
    path = write_rows(rows(3))
    message = fault(path, held_out={"path": str(path)})
    assert "prompts.held_out: no training prompt is left: all 3 are held out" in message


def test_faults_of_both_files_are_told_at_once(fault, write_rows, tmp_path):
    message = fault(write_rows([{"prompt": 1}]), held_out={"path": str(tmp_path / "none.jsonl")})
    assert "prompts.path: `prompt` is not a string" in message
    assert "prompts.held_out.path" in message
    assert "no such file" in message


# -- how large it may be


def test_data_above_the_bounds_is_refused_before_its_rows_are_made(fault, write_rows, tmp_path):
    few, small = SizesSpec(prompts=2), SizesSpec(data_mib=1)
    hint = "ask for less, or raise sizes.prompts; it can be 10,000,000 at most"
    path = str(write_rows(rows(3)))
    assert f"the number of rows of {path!r} is 3, above sizes.prompts (2)\n    {hint}" in fault(path, sizes=few)
    path = str(write_rows([{"prompt": "w1", "text": "x" * 2**20}]))
    assert f"the number of MiB of {path!r} is 2, above sizes.data_mib (1)" in fault(path, sizes=small)
    packed = tmp_path / "packed.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["w1"] * 1000, "text": ["x" * 10_000] * 1000}), packed)
    assert packed.stat().st_size < 2**20
    assert "above sizes.data_mib (1)" in fault(packed, sizes=small)
    assert "is 1,000, above sizes.prompts (2)" in fault(packed, sizes=few)
