"""Answers compared as mathematics."""

import time

import pytest

from fakes.builders import samples_of
from rlhfless.rewards import Failed
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import Done
from rlhfless.spec import MathSpec


def value(response, answer, **options):
    reward = MathReward(MathSpec(type="math", **options))
    reward.prepare()
    (event,) = [event for event in reward.run(samples_of(response, answer=answer)) if isinstance(event, Done)]
    return event.outcome


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        (42, "the answer is 42", 1.0),
        ("42", "the answer is 42.0", 1.0),
        ("42", "the answer is 43", 0.0),
        ("1,234", "that makes 1234 apples", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("$\\frac{1}{2}$", "so $\\frac{2}{4}$", 1.0),
        ("\\boxed{x^2-1}", "$(x-1)(x+1)$", 1.0),
        ("She has 3 + 15 = 18 left.\n#### 18", "<think>17?</think><answer>18</answer>", 1.0),
        ("18", "<answer>17</answer> or 18", 0.0),
        ("7", "first 3, then \\boxed{7}, as 5 says", 1.0),
        ("7", "no idea", 0.0),
        ("7", "", 0.0),
    ],
)
def test_answers(answer, response, expected):
    assert value(response, answer) == expected


def test_only_a_boxed_answer_counts_if_asked_for():
    assert value("it is 7", "7", extraction="boxed") == 0.0
    assert value("it is \\boxed{7}", "7", extraction="boxed") == 1.0


@pytest.mark.parametrize("answer", [None, ["7"], ""])
def test_an_answer_that_is_none_marks_the_sample(answer):
    assert isinstance(value("7", answer), Failed)


@pytest.mark.parametrize("cpu_s", [0.02, 5.0])
def test_an_answer_that_takes_too_much_cpu_time_is_wrong(monkeypatch, cpu_s):
    import math_verify

    def slow(*_, **__):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return True

    monkeypatch.setattr(math_verify, "verify", slow)
    assert value("it is 7", 7, cpu_s=cpu_s) == float(cpu_s == 5.0)
