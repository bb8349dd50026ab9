"""Fields of a row by dotted name."""

import pytest

from rlhfless.records.fields import MissingField, field_value, find_field

ROW = {
    "prompt": "2 + 2?",
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra.info": {"index": 7},
    "a.b": "literal",
    "a": {"b": "nested", "c": {"d": [10, {"e": 11}]}},
    "answers": ["first", "last"],
    "none": None,
    "text": '{"answer": 4}',
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "2 + 2?"),
        ("reward_model.ground_truth", "4"),
        ("reward_model", {"ground_truth": "4", "style": "rule"}),
        ("extra.info.index", 7),
        ("a.b", "literal"),
        ("a.c.d.0", 10),
        ("a.c.d.1.e", 11),
        ("answers.0", "first"),
        ("answers.-1", "last"),
        ("none", None),
    ],
)
def test_a_field_is_found_by_its_dotted_name(name, value):
    assert field_value(ROW, name) == value


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("promt", "there is no field `promt` (the fields are prompt, reward_model,", "did you mean `prompt`?"),
        (
            "reward_model.ground_thruth",
            "`reward_model` has no field `ground_thruth` (the fields are ground_truth, style)",
            "did you mean `reward_model.ground_truth`?",
        ),
        (
            "reward_modell.ground_truth",
            "there is no field `reward_modell`",
            "did you mean `reward_model.ground_truth`?",
        ),
        ("ground_truth", "there is no field `ground_truth`", "did you mean `reward_model.ground_truth`?"),
        ("a.c.x", "`a.c` has no field `x` (the fields are d)", ""),
        ("answers.2", "`answers` is a list of 2, and `2` is not an index of it", "write `answers.0`"),
        ("answers.first", "`answers` is a list of 2, and `first` is not an index", ""),
        ("none.x", "`none` is null, which has no field `x`", ""),
        ("text.answer", "`text` is a text, which has no field `answer`", ""),
        ("prompt.", "`prompt` is a text, which has no field ``", ""),
        ("", "there is no field ``", ""),
    ],
)
def test_a_missing_field_is_named_with_what_is_there(name, what, hint):
    with pytest.raises(MissingField) as caught:
        field_value(ROW, name)
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert find_field(ROW, name) is None
