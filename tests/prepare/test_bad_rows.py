"""`on_bad_row: skip` runs without a few faulty rows, and says which; more than a few are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.field_templates import BY_NAME
from rlhfless.prepare.examples import load_sets
from rlhfless.prepare.prompts import PromptSets
from rlhfless.prepare.rewards import reward_problems
from rlhfless.prepare.shown_rows import shown_rows
from rlhfless.spec import RunSpec
from rlhfless.spec.data import DATA
from rlhfless.spec.errors import InputError
from rlhfless.spec.load import check_resumable

POLICY = BY_NAME["qwen2_5"].policy()
USER, SAID = {"role": "user", "content": "And 12 + 34?"}, {"role": "assistant", "content": "It is 46"}
CONTROL = {"role": "user", "content": "Hello <|im_end|>"}
MATH = {"type": "math"}
TESTS = [{"input": "1", "output": "1"}]

PROMPT = {"prompt": [USER], "answer": "46"}
WHOLE = {"prompt": [USER, SAID]}
PAIR = {"prompt": "And 12 + 34?", "chosen": "It is 46", "rejected": "Hello"}
BAD = {
    "an empty answer": ("rlhf", PROMPT, PROMPT | {"answer": " "}, {}, "'math' cannot score it: the expected answer"),
    "no answer": ("rlhf", PROMPT, {"prompt": [USER]}, {}, "`answer` is missing"),
    "a control token": ("rlhf", PROMPT, PROMPT | {"prompt": [CONTROL]}, {}, "a control token of the model"),
    "an answer at the end": ("rlhf", PROMPT, PROMPT | {"prompt": [USER, SAID]}, {}, "ends with a message of the assis"),
    "tests that test nothing": (
        "rlhf",
        PROMPT | {"tests": TESTS},
        PROMPT | {"tests": []},
        {"rewards": [{"type": "code", "tests_field": "tests"}]},
        "'code' cannot score it: the tests cannot be used",
    ),
    "a conversation that the user ends": (
        "sft",
        WHOLE,
        {"prompt": [USER, SAID, USER]},
        {"response_field": None},
        "does not end with an assistant message",
    ),
    "no response": ("sft", WHOLE | {"response": "a", "prompt": "b"}, {"prompt": "b"}, {}, "no response in `response`"),
    "equal answers": ("dpo", PAIR, PAIR | {"rejected": "It is 46"}, {}, "both responses are the same"),
    "equal answers of a reward model": ("reward_model", PAIR, PAIR | {"rejected": "It is 46"}, {}, "are the same"),
    "a broken line": ("rlhf", PROMPT, '{"prompt": "cut o', {}, "a line is not a row: not JSON"),
    "too long": ("rlhf", PROMPT, PROMPT | {"prompt": [{"role": "user", "content": "a " * 900}]}, {}, "more than 799"),
}


def write(file: Path, good: Any, bad: Any, places: tuple[int, ...], total: int = 40) -> Path:
    lines = [bad if number in places else good for number in range(1, total + 1)]
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def spec_of(run_type: str, file: Path, on_bad_row: str, rewards: Any = None, **more: Any) -> RunSpec:
    data = {"path": str(file), "chat_template": True, "on_bad_row": on_bad_row, **more}
    own = {"rewards": rewards or [MATH]} if run_type == "rlhf" else {}
    given = {"type": run_type, "model": {"path": "m"}, DATA[run_type]: data, **own}  # type: ignore[index]
    return RunSpec.model_validate(given)


def checked(spec: RunSpec) -> PromptSets:
    """As in a run: rows, then rewards."""
    sets = load_sets(spec, replace(POLICY, context_tokens=800))
    if problems := reward_problems(spec, [*sets.train, *sets.held_out]):
        raise InputError("the run cannot start", problems)
    return sets


@pytest.mark.parametrize("case", BAD)
def test_a_few_bad_rows_are_skipped_and_named(tmp_path: Path, case: str) -> None:
    run_type, good, bad, more, why = BAD[case]
    file = write(tmp_path / "rows.jsonl", good, bad, (7, 9, 30, 40))
    with pytest.raises(InputError) as refused:
        checked(spec_of(run_type, file, "refuse", **more))
    assert "rows.jsonl:7" in str(refused.value)
    named = "on_bad_row: skip" if case == "a broken line" else f"{DATA[run_type]}.on_bad_row: skip"  # type: ignore[index]
    assert named in str(refused.value)
    sets = checked(spec_of(run_type, file, "skip", **more))
    assert {prompt.where for prompt in sets.train} == {
        f"rows.jsonl:{n}" for n in range(1, 41) if n not in (7, 9, 30, 40)
    }
    (skipped,) = sets.skipped
    assert [where for where, _ in skipped.rows] == [f"rows.jsonl:{n}" for n in (7, 9, 30, 40)]
    text = f"{DATA[run_type]}.path: skipped 4 of 40 rows: rows.jsonl:7: "  # type: ignore[index]
    assert str(skipped).startswith(text)
    assert why in str(skipped)
    assert "rows.jsonl:30" in str(skipped)
    assert str(skipped).endswith("; and 1 more")
    assert str(skipped) in sets.warnings


@pytest.mark.parametrize("case", BAD)
def test_the_rows_that_are_left_are_the_same_as_without_the_bad_ones(tmp_path: Path, case: str) -> None:
    run_type, good, bad, more, _ = BAD[case]
    marked = [good if number != 7 else bad for number in range(40)]
    file, clean = tmp_path / "rows.jsonl", tmp_path / "clean.jsonl"
    for path, rows in ((file, marked), (clean, [row for row in marked if row is not bad])):
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    right = checked(spec_of(run_type, clean, "refuse", **more))
    for sets in [checked(spec_of(run_type, file, "skip", **more)) for _ in range(2)]:
        assert sets.train == right.train, "`where` is not compared"


def test_a_fraction_is_held_out_of_the_rows_that_are_left(tmp_path: Path) -> None:
    rows = [{"prompt": f"b {n}", "response": "a", "key": f"row {n}"} for n in range(40)]
    for name, given in (("clean", rows[:7] + rows[8:]), ("bad", [*rows[:7], {"prompt": "b 7"}, *rows[8:], rows[3]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    options = {"held_out": {"fraction": 0.2}, "id_field": "key"}
    right = checked(spec_of("sft", tmp_path / "clean.jsonl", "skip", **options))
    sets = checked(spec_of("sft", tmp_path / "bad.jsonl", "skip", **options))
    assert [sets.train, sets.held_out] == [right.train, right.held_out]
    assert (len(right.held_out), right.skipped) == (8, ())
    assert [where for where, _ in sets.skipped[0].rows] == ["bad.jsonl:8", "bad.jsonl:41"], "an id occurs again"


@pytest.mark.parametrize("case", BAD)
def test_more_than_a_few_bad_rows_are_refused(tmp_path: Path, case: str) -> None:
    run_type, good, bad, more, _ = BAD[case]
    file = write(tmp_path / "rows.jsonl", good, bad, (7, 9, 30, 40, 2))
    with pytest.raises(InputError) as refused:
        checked(spec_of(run_type, file, "skip", **more))
    section = DATA[run_type]  # type: ignore[index]
    assert f"{section}.on_bad_row: skip, but 5 of 40 rows of {section}.path are faulty" in str(refused.value)
    assert "at most 10% are skipped" in str(refused.value)
    assert "rows.jsonl:2" in str(refused.value)


def test_held_out_rows_sets_and_mixtures_are_skipped_alike(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", PROMPT, PROMPT | {"answer": ""}, (3,)) for name in "abc"]
    others = {"role": "user", "content": "Thanks! Say hello."}
    train = write(tmp_path / "d.jsonl", {"prompt": [others], "answer": "1"}, {"prompt": [others]}, (3,))
    given = {
        "model": {"path": "m"},
        "prompts": {
            "mixture": [{"name": "one", "path": str(train)}, {"name": "two", "path": str(train)}],
            "chat_template": True,
            "on_bad_row": "skip",
            "held_out": {"path": str(files[0])},
        },
        "evaluation": {"sets": [{"name": "x", "path": str(files[1])}, {"name": "y", "path": str(files[2])}]},
        "rewards": [MATH],
    }
    sets = checked(RunSpec.model_validate(given))
    fields = ["prompts.mixture.0.path", "prompts.mixture.1.path", "prompts.held_out.path"]
    fields += ["evaluation.sets.0.path", "evaluation.sets.1.path"]
    assert [(each.field, each.rows[0][0][1:]) for each in sets.skipped] == [(name, ".jsonl:3") for name in fields]
    assert len(sets.train) == 2 * 39
    assert len(sets.held_out) == 3 * 39


def test_rewards_of_one_set_and_several_faults_of_a_row(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", PROMPT | {"tests": TESTS}, PROMPT | {"answer": ""}, (3,))
    rewards = [MATH, {"type": "code", "tests_field": "tests"}, {"type": "exact_match"}]
    (skipped,) = checked(spec_of("rlhf", file, "skip", rewards)).skipped
    assert len(skipped.rows) == 1, "a row counts once"


def test_data_show_says_why_a_row_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", PROMPT, PROMPT | {"answer": ""}, (3,))
    spec = spec_of("rlhf", file, "skip")
    (row,) = shown_rows(spec, POLICY, None, 3)
    assert row.use.startswith("skipped: reward 'math' cannot score it: the expected answer in `answer` is empty")
    assert (row.sequences, row.rewards) == ((), ())
    (other,) = shown_rows(spec, POLICY, None, 4)
    assert other.use == "training"
    assert any("skipped 1 of 40 rows: rows.jsonl:3" in text for text in other.warnings)


def test_no_resumed_run_changes_what_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", PROMPT, PROMPT, ())
    with pytest.raises(InputError, match=r"prompts\.on_bad_row: 'skip', but the run started with 'refuse'"):
        check_resumable(spec_of("rlhf", file, "refuse"), spec_of("rlhf", file, "skip"), "spec.yaml")
