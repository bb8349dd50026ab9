"""`rlhfless rewards test`, typed as a user would."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rlhfless.cli import main


@pytest.fixture
def spec(model_folder, write_rows, tmp_path):
    write_rows([{"prompt": f"w{i}", "answer": f"w{i}", "id": f"q{i}"} for i in range(4)])
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {model_folder.name}}}\n"
        "prompts: {path: train.jsonl, id_field: id}\n"
        "rewards:\n- type: exact_match\n- {type: length_penalty, free_tokens: 1, max_tokens: 3, weight: 2}\n"
        "prompts_per_step: 4\n"
    )
    return path


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["rewards", "test", *map(str, arguments)], env={"COLUMNS": "200"})


def test_every_part_of_every_row_as_json(spec, write_rows):
    rows = [
        {"prompt": "w9", "response": "w1 w2", "answer": "w1"},
        {"prompt_id": "q2", "response": "w2"},
        {"prompt": "w9", "response": "w1", "answer": ["w1"], "response_tokens": 3, "finish_reason": "length"},
    ]
    result = invoke(spec, write_rows(rows, "samples.jsonl"), "--json", "--set", "prompts_per_step=2")
    assert result.exit_code == 2
    assert "the column `answer` cannot be used in 1 of 3 prompts: samples.jsonl:3: it holds" in result.stderr

    rows[2]["answer"] = "w1"
    result = invoke(spec, write_rows(rows, "samples.jsonl"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["parts"] for row in found["samples"]] == [
        {"exact_match": 0.0, "length_penalty": -0.5},
        {"exact_match": 1.0, "length_penalty": 0.0},
        {"exact_match": 1.0, "length_penalty": -1.0},
    ]
    assert [row["total"] for row in found["samples"]] == [-1.0, 1.0, -1.0]
    assert [(row["prompt_id"], row["sample_index"]) for row in found["samples"]] == [
        ("prompt-1", 0),
        ("q2", 0),
        ("prompt-1", 1),
    ]
    assert found["summary"]["samples"] == 3
    assert found["summary"]["failed"] == 0
    assert found["summary"]["parts"]["length_penalty"]["mean"] == pytest.approx(-0.5)
    assert found["summary"]["parts"]["length_penalty"]["std"] == pytest.approx((1 / 6) ** 0.5)


def test_a_table_with_failures(spec, write_rows):
    rewards = "rewards=[{type: exact_match}, {type: regex, pattern: '(w|ww)+$', timeout_s: 0.05}]"
    rows = [
        {"prompt": "w9", "response": "w" * 60 + "x", "answer": "w1", "response_tokens": 1},
        {"prompt": "w9", "response": "w1", "answer": "w1", "response_tokens": 1},
    ]
    result = invoke(spec, write_rows(rows, "samples.jsonl"), "--set", rewards)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (bad,) = [line for line in lines if line.split()[:1] == ["1"]]
    assert bad.split()[2:] == ["0", "-", "0"]
    (good,) = [line for line in lines if line.split()[:2] == ["2", "w1"]]
    assert good.split()[2:] == ["1", "0", "1"]
    assert lines[-2] == "samples.jsonl:1: regex failed: the match took longer than timeout_s (0.05 s)"
    assert lines[-1].startswith("2 samples, 1 failed, ")


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": "w1"}, "`response` must be a text, got None"),
        ({"response": "w1"}, "there is neither `prompt` nor `prompt_id`"),
        ({"response": "w1", "prompt": ["w1"]}, "`prompt` must be the text that the policy sees, got ['w1']"),
        ({"response": "w1", "prompt_id": "q9"}, "no prompt of the spec has the id 'q9'"),
        ({"response": "w1", "prompt": "w1", "finish_reason": "eos"}, "`finish_reason` must be `stop` or `length`"),
        ({"response": "w1", "prompt": "w1", "response_tokens": "3"}, "`response_tokens` must be a number of tokens"),
        ("{", "samples.jsonl:2: not JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_line(spec, write_rows, row, part):
    good = {"prompt": "w9", "response": "w1", "answer": "w1"}
    result = invoke(spec, write_rows([good, row], "samples.jsonl"))
    assert result.exit_code == 2
    assert "samples.jsonl:2" in result.stderr
    assert part in result.stderr


def test_a_run_without_rewards_is_refused(spec, write_rows):
    rows = write_rows([{"prompt": "w1", "response": "w2"}], "samples.jsonl")
    spec.write_text(f"type: sft\nmodel: {{path: {spec.parent / 'model'}}}\ndemonstrations: {{path: samples.jsonl}}\n")
    result = invoke(spec, rows)
    assert result.exit_code == 2
    assert "rewards: a run of type sft has none" in result.stderr


def test_a_file_that_is_not_there_is_named(spec, tmp_path):
    result = invoke(spec, tmp_path / "nowhere.jsonl")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


REWARD = """
import os
def score(response, answer):
    raise ValueError(os.fsdecode(b"caf\\xe9") + chr(27) + "[2J " + response + answer)
"""


@pytest.mark.parametrize(
    ("how", "encoding"),
    [((), "ascii"), pytest.param(("--json",), "utf-8", marks=pytest.mark.long)],
    ids=["text", "json"],
)
def test_any_text_in_rows_and_errors_can_be_shown(spec, write_rows, tmp_path, encoding, how):
    (tmp_path / "outside_reward.py").write_text(REWARD)
    rows = [{"prompt": "w9 \ud800", "response": "w1 \udcff\0", "answer": "→\udfff", "note\udcff": "\udcff"}]
    file = write_rows(rows, os.fsdecode(b"sampl\xe9s.jsonl"))
    options = ["--set", "rewards=[{type: python, name: judge, target: 'outside_reward:score'}]"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rlhfless.cli.main import main; main()",
            "rewards",
            "test",
            spec,
            file,
            *options,
            *how,
        ],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode(encoding)
    if how:
        (row,) = json.loads(shown)["samples"]
        cause = row["failures"]["judge"]
    else:
        assert "w1 \\udcff\\x00" in shown
        cause = shown
    arrow = "→" if how else "\\u2192"
    assert f"ValueError: caf\\udce9\\x1b[2J w1 \\udcff\\x00{arrow}\\udfff" in cause


def test_a_reward_model_reads_the_prompt_of_the_row_as_in_a_run(spec, write_rows):
    """docs/supervised.md's `prompt_field: prompt`: a run keeps the prompt in its columns if a template renders it."""
    spec.write_text(
        spec.read_text()
        .replace("id_field: id}", "id_field: id, chat_template: true}")
        .replace(
            "- type: exact_match\n",
            "- {type: reward_model, path: /no/model, prompt_field: prompt, chat_template: true}\n",
        )
    )
    rows = [{"prompt": "w9", "response": "w1"}, {"prompt": 7, "response": "w1"}]
    result = invoke(spec, write_rows(rows[:1], "samples.jsonl"))
    assert "KeyError" not in result.output
    assert "the column `prompt`" not in result.stderr
    result = invoke(spec, write_rows(rows, "samples.jsonl"))
    assert "samples.jsonl:2" in result.stderr
