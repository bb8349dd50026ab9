"""What is worth knowing of prompts before a run: words that the tokenizer does not know, repetitions, NaN answers."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from fakes.prompt_inputs import make_tokenizer
from rlhfless.prepare.prompts import load_prompts
from rlhfless.prepare.rewards import columns_read
from rlhfless.spec import PromptsSpec, RunSpec, SizesSpec

NAN = float("nan")


@pytest.fixture
def warnings(tokenizer):
    def load(path, tokenizer=tokenizer, read=None, **options):
        spec = PromptsSpec(path=str(path), **options)
        return load_prompts(spec, tokenizer, max_context_tokens=32, seed=0, sizes=SizesSpec(), read=read).warnings

    return load


def test_unknown_tokens_are_counted(warnings, write_rows):
    path = write_rows([{"prompt": "w1 w2 w3"}, {"prompt": "w1 what w2 is"}, {"prompt": "this w1 w2"}])
    assert warnings(path) == (
        "prompts.path: 3 of 10 tokens (30.0%) are the unknown token '<unk>', in 2 of 3 prompts, such as "
        "train.jsonl:2: 'w1 what w2 is'; the policy cannot see that text",
    )


def test_a_tokenizer_that_calls_its_end_token_unknown_knows_all(warnings, write_rows):
    """As GPT-2's: byte-level, so that nothing is unknown, and a prompt may hold the end token."""
    path = write_rows([{"prompt": "w1 <eos> w2"}])
    assert warnings(path, tokenizer=make_tokenizer(unk_token="<eos>")) == ()


def test_prompts_of_the_same_tokens_are_repetitions(warnings, write_rows):
    path = write_rows([{"prompt": "w1"}, {"prompt": "w2  w3"}, {"prompt": "w2 w3"}])
    (warning,) = warnings(path)
    assert "1 of 3 rows have the same tokens as an earlier row, such as train.jsonl:3 and train.jsonl:2" in warning


def test_held_out_prompts_are_looked_at_too(warnings, write_rows):
    held_out = write_rows([{"prompt": "nonsense", "answer": NAN}], "held.jsonl")
    found = warnings(write_rows([{"prompt": "w1"}]), held_out={"path": str(held_out)})
    assert [warning.split(":")[0] for warning in found] == ["prompts.held_out.path"] * 2


@pytest.mark.parametrize("value", [NAN, [1.0, NAN], {"low": NAN}])
def test_answers_that_are_nan(warnings, write_rows, value):
    path = write_rows([{"prompt": "w1", "answer": 1}, {"prompt": "w2", "answer": value}])
    assert "NaN" in path.read_text()
    assert warnings(path) == (
        "prompts.path: the column `answer` is NaN in 1 of 2 rows, such as train.jsonl:2; rewards that read it compare "
        "with NaN, which equals nothing: fill it in, or remove these rows",
    )


def test_missing_values_of_a_data_frame_are_nan(warnings, tmp_path):
    path = tmp_path / "train.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["w1", "w2"], "answer": pa.array([NAN, 1.0], from_pandas=False)}), path)
    assert "the column `answer` is NaN in 1 of 2 rows, such as train.parquet row 1" in warnings(path)[0]


def test_columns_that_no_reward_reads_may_be_nan(warnings, write_rows):
    path = write_rows([{"prompt": "w1", "answer": 1, "difficulty": NAN}])
    assert warnings(path, read=frozenset({"answer"})) == ()


def test_which_columns_rewards_read(tmp_path):
    def read(*rewards):
        spec = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": list(rewards), "prompts_per_step": 1}
        return columns_read(RunSpec.model_validate(spec).rewards)

    exact, code = {"type": "exact_match"}, {"type": "code", "tests_field": "checks"}
    assert read(exact) == {"answer"}
    of_code = {"checks", "entry_point", "metadata", "prompt", "test_imports", "test_setup_code"}
    assert read(exact, code) == {"answer", *of_code}
    assert read({"type": "length_penalty", "free_tokens": 1, "max_tokens": 2}) == frozenset()
    assert read(exact, {"type": "python", "target": "m:f"}) is None


def test_validate_tells_all_three(model_folder, write_rows, tmp_path):
    from typer.testing import CliRunner

    from rlhfless.cli.main import app

    rows = [{"prompt": f"w{i} what", "level": NAN} for i in (1, 2, 1)]
    (tmp_path / "judge_levels.py").write_text("def score(response, level): return 1.0\n")
    spec = {
        "model": {"path": str(model_folder)},
        "prompts": {"path": str(write_rows(rows))},
        "rewards": [{"type": "python", "target": "judge_levels:score"}],
        "prompts_per_step": 2,
        "generation": {"max_tokens": 8},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(spec))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    for part in ("are the unknown token '<unk>', in 3 of 3 prompts", "1 of 3 rows have the same", "`level` is NaN"):
        assert part in result.stderr
