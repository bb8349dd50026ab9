"""Answers compared as mathematics, with units and double signs, which parsers drop: another one is wrong."""

from __future__ import annotations

import time

import pytest

from fakes.builders import value_of
from rlhfless.rewards import Failed
from rlhfless.rewards.answers import units_of
from rlhfless.rewards.mathematics import MathReward
from rlhfless.spec import MathSpec


@pytest.fixture(scope="module")
def reward():
    made = MathReward(MathSpec(type="math"))
    made.prepare()
    return made


def boxed(reward, answer, response):
    return value_of(reward, f"\\boxed{{{response}}}", {"answer": answer})


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
def test_answers(reward, answer, response, expected):
    assert value_of(reward, response, {"answer": answer}) == expected


def test_only_a_boxed_answer_counts_if_asked_for():
    boxed_only = MathReward(MathSpec(type="math", extraction="boxed"))
    assert value_of(boxed_only, "it is 7", {"answer": "7"}) == 0.0
    assert value_of(boxed_only, "it is \\boxed{7}", {"answer": "7"}) == 1.0


@pytest.mark.parametrize("answer", [None, ["7"], ""])
def test_an_answer_that_is_none_marks_the_sample(reward, answer):
    assert isinstance(value_of(reward, "7", {"answer": answer}), Failed)


@pytest.mark.parametrize("cpu_s", [0.02, 5.0])
def test_an_answer_that_takes_too_much_cpu_time_is_wrong(monkeypatch, cpu_s):
    import math_verify

    def slow(*_, **__):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return True

    monkeypatch.setattr(math_verify, "verify", slow)
    made = MathReward(MathSpec(type="math", cpu_s=cpu_s))
    assert value_of(made, "it is 7", {"answer": 7}) == float(cpu_s == 5.0)


# -- units and signs


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        ("12\\text{ cm}", ["12", "12 cm", "12cm", "12\\,\\mathrm{cm}", "12\\ \\text{centimeters}", "12~\\text{cm}"]),
        ("12", ["12 cm", "12 m", "12\\text{ apples}", "\\$12"]),
        ("5 cm^2", ["5", "5 cm²", "5\\text{ cm}^2", "5\\text{ square centimeters}", "5 sq cm", "5\\mathrm{cm}^{2}"]),
        ("16\\pi\\text{ cm}^3", ["16\\pi", "16π cm³", "16\\pi\\text{ cubic centimetres}", "16\\pi \\text{ cc}"]),
        ("60 mph", ["60", "60 miles per hour", "60 mi/h", "60\\text{ miles/hour}", "60\\ \\text{mi/hr}"]),
        ("60 km/h", ["60 kmh", "60 km/hr", "60\\text{ kilometers per hour}", "60 kph"]),
        ("9.8 m/s^2", ["9.8 m/s/s", "9.8\\text{ meters per second squared}", "9.8\\text{ m s}^{-2}", "9.8 N/kg"]),
        ("10\\text{ m/s}", ["10 m/s", "10\\text{ meters per second}", "10 metres per second", "10\\,\\text{m/s}"]),
        ("3 hours", ["3", "3 h", "3 hr", "3 hrs", "3\\text{ hours}"]),
        ("45 sec", ["45 s", "45 seconds", "45\\text{ secs}"]),
        ("5 minutes", ["5 min", "5 mins", "5 m"]),
        ("\\$5", ["5", "5 dollars", "\\$5.00", "5 USD", "US\\$5", "5\\text{ dollars}"]),
        ("5 cents", ["5", "5\\text{ cents}"]),
        ("£7", ["7", "7 pounds", "7\\text{ pounds}"]),
        ("7 lbs", ["7 pounds", "7 lb"]),
        ("Rs. 500", ["500", "500 rupees", "₹500"]),
        ("30^\\circ", ["30", "30 degrees", "30°", "30\\text{ degrees}", "30^{\\circ}", "30 deg"]),
        ("25^\\circ C", ["25", "25°C", "25 degrees Celsius", "25^\\circ\\text{C}", "25^\\circ", "25\\text{ C}"]),
        ("2 L", ["2 l", "2 liters", "2\\text{ litres}", "2 dm^3"]),
        ("250 ml", ["250 mL", "250 cm^3", "250 milliliters"]),
        ("6 N", ["6 newtons", "6\\text{ N}", "6\\text{ kg m/s}^2"]),
        ("6 J", ["6 joules", "6 N m", "6\\text{ W s}"]),
        ("20 ft", ["20 feet", "20\\text{ foot}", "20\\text{ ft}"]),
        ("4 in", ["4 inches", "4 inch"]),
        ("5\\text{ apples}", ["5", "5\\text{ fruits}", "5 oranges"]),
        ("12\\text{ square units}", ["12", "12\\text{ units}^2", "12 cm^2"]),
        ("12 cm", ["12\\text{ units}", "12\\text{ cm long}", "12\\text{ wide}"]),
        ("3 weeks", ["3 wk", "3"]),
        ("5 m", ["5 meters", "5 metres", "5 minutes"]),
        ("50\\%", ["50", "0.5", "50 percent"]),
        ("x \\pm 1", ["x \\pm 1", "x+1, x-1", "x \\mp 1", "x-1, x+1"]),
        ("(\\pm 1, \\mp 2)", ["(\\pm 1, \\mp 2)", "(1,-2),(-1,2)", "(\\mp 1, \\pm 2)"]),
        ("(\\pm 1, 2)", ["(1,2), (-1,2)", "(-1,2),(1,2)"]),
        ("\\frac{1 \\mp \\sqrt{5}}{2}", ["\\frac{1 \\pm \\sqrt{5}}{2}", "\\frac{1+\\sqrt5}{2}, \\frac{1-\\sqrt5}{2}"]),
        ("a \\pm b \\mp c", ["a+b-c, a-b+c", "a \\mp b \\pm c"]),
    ],
)
def test_right_answers_are_right_with_and_without_their_unit(reward, answer, responses):
    wrong = [response for response in responses if boxed(reward, answer, response) != 1.0]
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        ("12 cm", ["12 m", "12 mm", "12\\text{ km}", "12 inches", "12 cm^2", "12\\text{ kg}", "12\\,\\mathrm{m}"]),
        ("12\\text{ cm}", ["12 m", "12\\text{ m}", "13 cm", "0.12 cm", "12\\text{ square centimeters}"]),
        ("5 cm^2", ["5 cm", "5 m^2", "5\\text{ cm}^3", "5\\text{ square meters}"]),
        ("16\\pi\\text{ cm}^3", ["16\\pi\\text{ cm}^2", "16\\pi\\text{ m}^3"]),
        ("60 km/h", ["60 mph", "60 m/s", "60 km", "60\\text{ km/min}"]),
        ("10\\text{ m/s}", ["10 m/s^2", "10 km/s", "10\\text{ meters per hour}", "10\\text{ meters}"]),
        ("3 hours", ["3 minutes", "3 days", "3\\text{ seconds}", "3 min"]),
        ("3 weeks", ["3 days", "3 months"]),
        ("\\$5", ["5 cents", "5\\text{ euros}", "€5", "£5", "6 dollars"]),
        ("5 cents", ["\\$5", "5 dollars"]),
        ("30^\\circ", ["30\\text{ radians}", "30 rad", "31 degrees"]),
        ("25^\\circ C", ["25^\\circ F", "25°F", "25\\text{ K}"]),
        ("2 L", ["2 mL", "2\\text{ gallons}", "2 ml"]),
        ("6 N", ["6 J", "6\\text{ kg}"]),
        ("6 J", ["6 kJ", "6\\text{ watts}"]),
        ("5 kg", ["5 g", "5 pounds", "5\\text{ lb}"]),
        ("(\\pm 1, \\mp 2)", ["(\\pm 1, \\pm 2)", "(1,-2)", "(1,2),(-1,-2)"]),
        ("(1 \\pm a, 2 \\mp b)", ["(1 \\pm a, 2 \\pm b)"]),
        ("(\\pm 1, 2)", ["(1, 2)", "(1,2),(1,-2)"]),
        ("x \\pm 1", ["x + 1", "x - 1", "x \\pm 2"]),
        ("a \\pm b \\mp c", ["a \\pm b \\pm c"]),
    ],
)
def test_another_unit_or_sign_is_wrong(reward, answer, responses):
    assert [response for response in responses if boxed(reward, answer, response) != 0.0] == []


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("12 cm", "The answer is 12 cm.", 1.0),
        ("12 cm", "The answer is 12 m.", 0.0),
        ("12 cm", "#### 12", 1.0),
        ("12 cm", "#### 12 m", 0.0),
        ("12 cm", "So the rope must have a length of 12 m", 0.0),
        ("12 cm", "So the rope must have a length of 12 cm", 1.0),
        ("\\$12", "It costs 12 dollars", 1.0),
    ],
)
def test_a_unit_without_a_box(reward, answer, response, right):
    assert value_of(reward, response, {"answer": answer}) == right


@pytest.mark.parametrize(
    "text",
    [
        *(
            "12",
            "x + 1",
            "12 apples",
            "12 kg of rice",
            "5 J/mol K",
            "12\\text{ miles an hour}",
            "\\$5 per kg",
            "",
            "3m",
        ),
        "3 " + "m " * 300,
        "3\\text{ min^999999999}",
        "3\\text{ min" + "^9" * 300 + "}",
        "3\\text{ h^" + "9" * 900 + "}",
    ],
)
def test_what_is_not_known_in_full_names_no_unit(text):
    assert units_of(text) == frozenset()
