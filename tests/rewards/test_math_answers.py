"""Answers that libraries of mathematics drop parts of, or read as another value."""

# ruff: noqa: RUF001 (characters that look like others are what it is about)

import pytest

from fakes.builders import value_of
from rlhfless.records import Prompt
from rlhfless.rewards.mathematics import MathReward
from rlhfless.spec import MathSpec
from rlhfless.util.text import WrittenFloat


@pytest.fixture(scope="module")
def reward():
    made = MathReward(MathSpec(type="math"))
    made.prepare()
    return made


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        (1e-05, "\\boxed{0.00001}", 1.0),
        (1e-05, "\\boxed{-5+e}", 0.0),
        ("0.00001", "\\boxed{10^{-5}}", 1.0),
        (1e-05, "\\boxed{1e-5}", 1.0),
        (1e-07, "\\boxed{0}", 0.0),
        (1e-07, "\\boxed{2e-7}", 0.0),
        (0, "\\boxed{0.0000001}", 0.0),
        (0, "\\boxed{0.0}", 1.0),
        ("1.6\\times 10^{-19}", "\\boxed{3\\times 10^{-19}}", 0.0),
        ("1.6\\times 10^{-19}", "\\boxed{1.6 \\cdot 10^{-19}}", 1.0),
        ("1.6e-19", "\\boxed{1.6\\times10^{-19} \\text{ C}}", 1.0),
        ("2√3", "2", 0.0),
        ("2√3", "\\boxed{2}", 0.0),
        ("2√3", "\\boxed{2\\sqrt{3}}", 1.0),
        ("2√3", "The answer is 2√3.", 1.0),
        ("2", "The answer is 2√3.", 0.0),
        ("2√3", "so x = 2√3 here", 1.0),
        ("2", "so x = 2√3 here", 0.0),
        ("\\$1500", "\\boxed{1500}", 1.0),
        ("\\$1500", "\\boxed{\\$1500}", 1.0),
        ("\\$1500", "It costs \\$1500.", 1.0),
        ("$1,500", "\\boxed{1500}", 1.0),
        ("3", "\\boxed{3}. Wait, \\boxed{4}", 0.0),
        ("4", "\\boxed{3}. Wait, \\boxed{4}", 1.0),
        ("1,2", "$\\boxed{1}, \\boxed{2}$", 1.0),
        ("2", "$\\boxed{1}, \\boxed{2}$", 0.0),
        ("x=1 or x=2", "\\boxed{x=1} \\text{ and } \\boxed{x=2}", 1.0),
        ("4", "<think>\\boxed{4}</think> The answer is 5.", 0.0),
        ("5", "<think>\\boxed{4}</think> The answer is 5.", 1.0),
        ("5", "<think>\\boxed{4}</think> \\boxed{5}", 1.0),
        ("1/3", "\\boxed{0.333333}", 1.0),
        ("0.333333", "\\boxed{\\frac13}", 1.0),
        ("0.5", "\\boxed{50\\%}", 1.0),
        ("50%", "\\boxed{0.5}", 1.0),
        ("½", "\\boxed{0.5}", 1.0),
        ("1 1/2", "\\boxed{1.5}", 1.0),
        ("3 1/2", "\\boxed{2}", 0.0),
        ("(-∞, 3]", "\\boxed{(-\\infty,3]}", 1.0),
        ("(-∞, 3]", "\\boxed{3}", 0.0),
        ("(1,2)", "\\boxed{(1,2)}", 1.0),
        ("(1,2)", "\\boxed{(2,1)}", 0.0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
        ("[1,2]", "\\boxed{(1,2)}", 0.0),
        ("yes", "\\boxed{yes}", 1.0),
        ("yes", "\\boxed{\\text{Yes}}", 1.0),
        ("yes", "\\boxed{sey}", 0.0),
        ("Tuesday", "The answer is Tuesday.", 1.0),
        ("Tuesday", "The answer is Thursday.", 0.0),
        (True, "\\boxed{True}", 1.0),
        (True, "\\boxed{False}", 0.0),
        ("\\text{(A)}", "\\boxed{A}", 1.0),
        ("A", "\\boxed{B}", 0.0),
        ("C", "\\boxed{\\text{(C)}}", 1.0),
        ("2t", "\\boxed{2}", 0.0),
        ("2t", "\\boxed{2t}", 1.0),
        ("5 cm", "\\boxed{5}", 1.0),
        ("5 cm", "\\boxed{5\\text{ cm}}", 1.0),
        ("5", "\\boxed{5 \\text{ cm}}", 1.0),
        ("16π cm²", "\\boxed{16\\pi}", 1.0),
        ("16", "\\boxed{16\\pi}", 0.0),
        ("12 345", "\\boxed{12345}", 1.0),
        ("12 345", "\\boxed{357}", 0.0),
        ("2516_8", "\\boxed{2516_8}", 1.0),
        ("2516_8", "\\boxed{2516}", 0.0),
        ("0.\\overline{3}", "\\boxed{\\frac{1}{3}}", 1.0),
        ("0.333...", "\\boxed{1/3}", 1.0),
        ("x^2-1", "$(x-1)(x+1)$", 1.0),
        ("7", "it is 7", 1.0),
        ("1234", "that makes 1234 apples", 1.0),
        ("7", "first 3, then \\boxed{7}, as 5 says", 1.0),
        ("18", "<answer>17</answer> or 18", 0.0),
        ("10", "The answer is 5 + 5 = 10", 1.0),
        ("10", "**Answer:** 10", 1.0),
        ("10", "Answer: $10$", 1.0),
        ("10", "The final answer is $\\frac{20}{2}$. I hope it is correct.", 1.0),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", 1.0),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}2\\\\1\\end{pmatrix}}", 0.0),
        ("x>3", "\\boxed{x > 3}", 1.0),
        ("x>3", "\\boxed{(3,\\infty)}", 1.0),
        ("y=2x+1", "\\boxed{2x+1}", 1.0),
        ("5", "\\boxed{x=5}", 1.0),
        ("x=5", "\\boxed{5}", 1.0),
        ("123456789012345678", "\\boxed{123456789012345679}", 0.0),
        (12345678901234567890, "\\boxed{12345678901234567890}", 1.0),
        ("\\sin 30^\\circ", "\\boxed{0.5}", 1.0),
        ("30^\\circ", "\\boxed{30}", 1.0),
        ("30", "\\boxed{30^\\circ}", 1.0),
        ("90°", "The angle is 90°", 1.0),
        ("no solution", "\\boxed{\\text{No solution}}", 1.0),
        ("\\emptyset", "\\boxed{\\varnothing}", 1.0),
        ("1.50", "\\boxed{1.5}", 1.0),
        (WrittenFloat(1.5, "1.50"), "1.5", 1.0),
        ("A and B are 3 + 4 = 7\n#### 1,234", "So \\boxed{1234}", 1.0),
        ("We get $x$ is $\\boxed{\\frac{3}{4}}$.", "\\boxed{0.75}", 1.0),
        ("7", "the sum 3+4 equals 7", 1.0),
        ("16", "the area is 16 cm²", 1.0),
        ("3", "She has\n3", 1.0),
        ("2", "\\boxed{1}\n\n\\boxed{2}", 1.0),
        ("1, 2", "\\boxed{1}\n\n\\boxed{2}", 1.0),
        ("-3 1/2", "\\boxed{-3.5}", 1.0),
        ("2\\pi", "\\boxed{6.283185}", 1.0),
        ("e", "\\boxed{2.718282}", 1.0),
        ("4343_6", "\\boxed{4343_{6}}", 1.0),
        ("11\\sqrt2", "\\boxed{11\\sqrt{2}}", 1.0),
        ("3R^2", "\\boxed{3R^2}", 1.0),
        ("10,000", "\\boxed{10{,}000}", 1.0),
        ("6 \\text{ and } 7", "\\boxed{6,7}", 1.0),
        ("9", "\\boxed{9} is the answer, not \\boxed{", 0.0),
        ("12", "\\boxed{12", 0.0),
        ("4:30 p.m.", "\\boxed{4:30\\text{ p.m.}}", 1.0),
        ("x", "\\boxed{x}", 1.0),
        ("10:30", "\\boxed{10:30}", 1.0),
        ("14\\frac{6}{7}\\%", "\\boxed{\\frac{104}{7}\\%}", 1.0),
        ("1.36 \\text{ million}", "\\boxed{1360000}", 1.0),
        ("1.36 \\text{ million}", "\\boxed{1.36}", 0.0),
        ("1,00,000", "\\boxed{100000}", 1.0),
        ("1,00,000", "\\boxed{1}", 0.0),
        ("\\$32,\\!348", "\\boxed{32348}", 1.0),
        ("3rd", "\\boxed{3}", 1.0),
        ("June 20", "\\boxed{\\text{June 20}}", 1.0),
        ("June 20", "\\boxed{\\text{July 20}}", 0.0),
        ("June 20", "The answer is June 20.", 1.0),
        ("5", "\\boxed{\\textcolor{red}{5}}", 1.0),
        ("5", "\\boxed{5 ✓}", 0.0),
        ("2", "\\boxed{2 foo 3}", 0.0),
        ("(2,5)", "\\boxed{(2,5)+1}", 0.0),
        ("A", "\\boxed{A)}", 1.0),
        ("A", "\\boxed{(A) 7}", 1.0),
        ("5", "<think>\nIs it 4? \\boxed{4}\n</think>\n\nThe answer is $\\boxed{5}$.", 1.0),
        ("5", "I think \\boxed{5}. Hmm, \\boxed{6}? No: \\boxed{5}", 1.0),
        ("6", "\\boxed{5}, no, wait, \\boxed{6}", 1.0),
        ("5", "\\boxed{5}, no, wait, \\boxed{6}", 0.0),
        ("5, 6", "\\boxed{5}, no, wait, \\boxed{6}", 0.0),
        ("7", "<answer>5</answer> no <answer>7</answer>", 1.0),
        ("7", "<answer>\\boxed{5} then \\boxed{7}</answer>", 1.0),
        ("5", "<answer>\\boxed{5} then \\boxed{7}</answer>", 0.0),
        ("7", "The answer is 5. Wait, I made a mistake. The answer is 7.", 1.0),
        ("5", "The answer is 5. Wait, I made a mistake. The answer is 7.", 0.0),
        ("5", "x = \\boxed{5}.", 1.0),
        ("2,3", "x=\\boxed{2}, y=\\boxed{3}", 1.0),
        ("12", "\\[\\boxed{12}\\]", 1.0),
        ("1/2", "$$\\boxed{\\dfrac12}$$", 1.0),
        ("1/2", "\\boxed{\\tfrac{1}{2}\\text{ hour}}", 1.0),
        ("-5", "\\boxed{−5}", 1.0),
        ("-5", "The answer is −5.", 1.0),
        ("5", "The answer is −5.", 0.0),
        ("1000", "\\boxed{1 000}", 1.0),
        ("1000", "\\boxed{1,000}", 1.0),
        ("1000", "\\boxed{1_000}", 1.0),
        ("3.5", "\\boxed{3,5}", 0.0),
        ("0.5", "\\boxed{.5}", 1.0),
        ("1e10", "\\boxed{10^{10}}", 1.0),
        ("1e10", "\\boxed{10000000000}", 1.0),
        ("6.02e23", "\\boxed{6.02 \\times 10^{23}}", 1.0),
        ("6.02e23", "\\boxed{6.03 \\times 10^{23}}", 0.0),
        ("1e-9", "\\boxed{10^{-9}}", 1.0),
        ("1e-9", "\\boxed{10^{-10}}", 0.0),
        ("1e-9", "\\boxed{0}", 0.0),
        ("3e8", "3e8", 1.0),
        ("e", "\\boxed{1}", 0.0),
        ("√2/2", "\\boxed{\\frac{1}{\\sqrt2}}", 1.0),
        ("√2/2", "\\boxed{1}", 0.0),
        ("∛8", "\\boxed{2}", 1.0),
        ("x³", "\\boxed{x^3}", 1.0),
        ("⅔", "\\boxed{2/3}", 1.0),
        ("2⅓", "\\boxed{7/3}", 1.0),
        ("π/2", "\\boxed{\\frac{\\pi}{2}}", 1.0),
        ("∞", "\\boxed{\\infty}", 1.0),
        ("5·3", "\\boxed{15}", 1.0),
        ("x ≤ 3", "\\boxed{x \\leq 3}", 1.0),
        ("x ≤ 3", "\\boxed{x < 3}", 0.0),
        ("{1, 2}", "\\boxed{\\{1,2\\}}", 1.0),
        ("30°", "\\boxed{30^\\circ}", 1.0),
        ("{1,2,3}", "\\boxed{1,2,3}", 1.0),
        ("(1,2,3)", "\\boxed{(1,2,3)}", 1.0),
        ("(1,2,3)", "\\boxed{(3,2,1)}", 0.0),
        ("2:3", "\\boxed{2:3}", 1.0),
        ("5 ± 2", "\\boxed{3, 7}", 1.0),
        ("|x|", "\\boxed{|x|}", 1.0),
        ("3/4 cup", "\\boxed{\\frac34}", 1.0),
        ("−∞", "\\boxed{-\\infty}", 1.0),
        (False, "\\boxed{false}", 1.0),
        (False, "\\boxed{0}", 0.0),
        ("true", "true", 1.0),
        ("true", "The statement is true.", 0.0),
        ("no", "\\boxed{no}", 1.0),
        ("no", "\\boxed{on}", 0.0),
        ("no", "\\boxed{yes}", 0.0),
        ("is", "\\boxed{\\text{si}}", 0.0),
        ("O(n log n)", "\\boxed{O(n \\log n)}", 1.0),
        ("10", "10 apples", 1.0),
        ("10", "I have 10.", 1.0),
        ("10", "10.\n", 1.0),
        ("10", "**10**", 1.0),
        ("10", "$10$ dollars", 1.0),
        ("10", "\\text{10}", 1.0),
        ("10", "", 0.0),
        ("0.1", "\\boxed{10\\%}", 1.0),
        ("-1", "\\boxed{1}", 0.0),
        ("8", "\\boxed{2^3}", 1.0),
        ("8", "\\boxed{{8}}", 1.0),
        ("x=3", "\\boxed{y=3}", 0.0),
    ],
)
def test_an_answer_has_the_value_that_its_text_says(reward, answer, response, expected):
    assert value_of(reward, response, {"answer": answer}) == expected


def prompts_of(*answers):
    return [
        Prompt(str(i), (), f"prompt {i}", {"answer": each}, where=f"train.jsonl:{i}") for i, each in enumerate(answers)
    ]


def test_expected_answers_that_can_be_read_are_no_problem(reward):
    answers = [
        "2√3",
        "\\$1500",
        "1e-05",
        "½",
        "x²",
        "(-∞, 3]",
        "Tuesday",
        "\\text{no solution}",
        "16π cm²",
        "12 345",
        True,
    ]
    answers += [
        "A",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "Then 3 + 4 is 7.\n#### 7",
        "So $x$ is $\\boxed{\\frac{1}{2}}$.",
    ]
    assert reward.problems(prompts_of(*answers)) == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("$ $", "its lack of mathematics"),
        ("1.234.567", "the number `1.234.567`"),
        ("3.14159...", "the number `3.14159...`"),
        ("3 4", "two numbers side by side, `3 4`"),
        ("5_2", "the subscript of `5_`"),
        ("We get 5 and add 2, so it is large", "the word `get`"),
        ("\\heartsuit 5", "the command `\\heartsuit`"),
        ("5 ♥", "the character `♥`"),
        ("\\frac{1}{", "braces that do not match"),
        ("A. 7 and B. 8", "a choice and its value, `A. 7, B. 8`"),
        ("1,02", "the zeros of `,02`"),
        ("1e500", "the exponent of `1e500`"),
        ("3 hours 20 minutes", "the word `hours`"),
        ("1 +", "does not read '1 +' as a whole"),
        ("1+" * 600, "its length of 1200 characters"),
    ],
)
def test_an_expected_answer_that_is_not_read_as_a_whole_is_named_with_its_place(reward, answer, said):
    assert reward.problems(prompts_of("1", answer)) == []
    (problem,) = reward.warnings(prompts_of("1", answer))
    assert (
        "the expected answers in `answer` cannot be read as mathematics in 1 of 2 prompts: train.jsonl:1: " in problem
    )
    assert said.replace("\\", "\\") in problem
    assert "writes the same text" in problem


def test_a_column_of_solutions_without_a_final_answer_is_refused(reward):
    solution = "First we note that the two lines are parallel, so their slopes agree. " * 4
    (problem,) = reward.problems(prompts_of("1", solution, solution + "Then we are done."))
    assert "are long texts that cannot be read as mathematics in 2 of 3 prompts: train.jsonl:1: " in problem
    assert "`answer_pattern`" in problem


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("3 hours 20 minutes", "3 \\text{ hours } 20 \\text{ minutes}", "3 \\text{ hours } 30 \\text{ minutes}"),
        ("3 hours 20 minutes", "3 Hours  20 Minutes", "3 hours 20 seconds"),
        ("2 hours and 30 minutes", "2 \\text{ hours } 30 \\text{ minutes}", "2 \\text{ hours } 3 \\text{ minutes}"),
        ("3 4", "3  4", "34"),
        ("1, 2, 3, \\ldots, 10", "1,2,3,\\dots,10", "1, 2, \\ldots, 10"),
        ("n \\equiv 1 \\pmod{4}", "n \\equiv 1 \\pmod 4", "n \\equiv 3 \\pmod 4"),
        ("10和11之间", "10和11之间", "10和12之间"),
        ("\\text{All odd } n > 2", "\\text{all odd }n>2", "n > 2"),
        ("\\textcircled{1}\\textcircled{3}", "\\textcircled{1} \\textcircled{3}", "\\textcircled{1}"),
        ("x = 0 \\text{ where } t > 1", "x=0 \\text{ where } t>1", "x=0"),
    ],
)
def test_an_answer_that_no_parser_reads_is_compared_as_text(reward, answer, right, wrong):
    (warning,) = reward.warnings(prompts_of(answer))
    assert "cannot be read as mathematics in 1 of 1 prompts: train.jsonl:0: " in warning
    assert reward.problems(prompts_of(answer)) == []
    boxes = (f"\\boxed{{{answer}}}", f"so $\\boxed{{{right}}}$.", f"\\boxed{{{wrong}}}", "no idea")
    assert [value_of(reward, response, {"answer": answer}) for response in boxes] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "said", "expected"),
    [
        ("(B) 7", ["B", "(B)", "\\text{(B) }7", "\\textbf{(B)}\\ 7", "7", "7.0", "B. 7", "\\mathrm{(B)}"], 1.0),
        ("(B) 7", ["A", "(A) 7", "(B) 8", "8", "AB", "(A) or (B)"], 0.0),
        ("\\textbf{(C)}\\ \\frac{1}{2}", ["C", "0.5", "\\text{C. }\\frac12"], 1.0),
        ("D", ["(D) 12", "\\textbf{(D)}", "D. the population is stable", "\\text{D}"], 1.0),
        ("D", ["B", "(B) D", "(C),(D)", "D = 7", "D: 7, E: 8"], 0.0),
        ("(A),(C)", ["(A), (C)"], 1.0),
        ("(A),(C)", ["A", "C", "(A)"], 0.0),
        ("x \\in [-2,7]", ["[-2,7]", "-2 \\le x \\le 7"], 1.0),
        ("(-\\infty,2)", ["x<2", "(-\\infty, 2)"], 1.0),
        ("(-\\infty,2)", ["x \\le 2", "2"], 0.0),
        ("(1,2)", ["1<x<2"], 0.0),
        ("\\{x \\mid -2 \\leqslant x<1\\}", ["[-2,1)", "-2 \\le x < 1"], 1.0),
        ("\\frac{-1 \\pm \\sqrt{5}}{2}", ["\\frac{-1+\\sqrt5}{2}, \\frac{-1-\\sqrt5}{2}"], 1.0),
        ("\\frac{-1 \\pm \\sqrt{5}}{2}", ["\\frac{-1+\\sqrt5}{2}", "-1"], 0.0),
        ("0, \\pm 2", ["-2, 0, 2", "0, 2, -2"], 1.0),
        ("1:2:3", ["1:2:3", "2:4:6"], 1.0),
        ("1:2:3", ["1:3:2", "1:6"], 0.0),
        ("3pm", ["3 p.m.", "3:00 PM", "3\\text{ PM}"], 1.0),
        ("3pm", ["3am", "3", "4pm"], 0.0),
        ("7.5\\%", ["7.5", "0.075", "7.5%"], 1.0),
        ("7.5\\%", ["75", "7", "0.75"], 0.0),
        ("10", ["10\\%"], 1.0),
        ("\\text{B, C}", ["B,C", "\\text{B and C}"], 1.0),
        ("\\text{B, C}", ["B", "B, D"], 0.0),
        ("\\$\\frac{1}{2}", ["0.5", "\\$0.50"], 1.0),
        ("9.8 \\mathrm{~m} / \\mathrm{s}^{2}", ["9.8", "9.8\\text{ m/s}^2"], 1.0),
        ("\\log_2 3", ["\\log_{2}{3}", "\\frac{\\ln 3}{\\ln 2}"], 1.0),
        ("\\langle 1, 2\\rangle", ["\\langle 1,2 \\rangle"], 1.0),
        ("\\langle 1, 2\\rangle", ["\\langle 2,1 \\rangle"], 0.0),
        ("e^{i\\pi/3}", ["\\frac{1}{2}+\\frac{\\sqrt{3}}{2}i"], 1.0),
        ("1-\\mathrm{i}", ["1-i"], 1.0),
        (
            "\\left[\\begin{array}{rr}1 & 2 \\\\ 3 & 4\\end{array}\\right]",
            ["\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"],
            1.0,
        ),
        ("f(x) = x \\text{ for all } x", ["f(x)=x", "x", "f(x) = x for all x"], 1.0),
        ("f(x) = x \\text{ for all } x", ["f(x)=2x", "x^2"], 0.0),
        ("5", ["\\text{Area} = 5", "\\text{Total: } 5", "\\text{about } 5", "5 \\text{ red balls}"], 1.0),
        ("n", ["\\text{All odd } n", "\\text{not } n"], 0.0),
        ("30 \\mathrm{mph}, 40 \\mathrm{mph}", ["30, 40", "30\\text{ mph},40\\text{ mph}"], 1.0),
        ("\\lambda_{\\text{red}} / \\sqrt{2}", ["\\frac{\\lambda_{\\text{red}}}{\\sqrt{2}}"], 1.0),
        ("10:30", ["10:30", "10:30\\text{ a.m.}"], 1.0),
        ("10:30", ["1:3", "\\frac{1}{3}", "10:31", "3:30"], 0.0),
        ("4:25", ["4:25", "\\frac{4}{25}", "8:50"], 1.0),
        ("\\dbinom{5}{2}", ["10", "{5 \\choose 2}", "\\tbinom52"], 1.0),
        ("3^\\text{rd}", ["3", "3rd", "3^{rd}"], 1.0),
        ("5", ["\\text{The answer is }5"], 1.0),
        ("n!", ["n"], 0.0),
        ("10!", ["10"], 0.0),
        ("10!", ["3628800"], 1.0),
        ("-1./3", ["-\\frac13"], 1.0),
    ],
)
def test_other_ways_to_write_the_answers_of_the_field(reward, answer, said, expected):
    assert reward.warnings(prompts_of(answer)) == [] or answer == "(A),(C)"
    assert {each: value_of(reward, f"\\boxed{{{each}}}", {"answer": answer}) for each in said} == dict.fromkeys(
        said, expected
    )


def test_many_faulty_answers_are_counted_and_the_first_are_named(reward):
    (problem,) = reward.warnings(prompts_of("1", *(f"{i} {i}" for i in range(1, 9))))
    assert "in 8 of 9 prompts" in problem
    assert "train.jsonl:5" in problem
    assert "train.jsonl:6" not in problem
    assert "and 3 more" in problem


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("1234", "3*400=1200\n#### 1,234", 1.0),
        ("1234", "#### 1,234\nI used 3 steps", 1.0),
        ("3", "#### 1,234\nI used 3 steps", 0.0),
        ("2√3", "so\n#### 2√3", 1.0),
        ("2", "so\n#### 2√3", 0.0),
        ("5", "**Final Answer**\n\n5", 1.0),
        ("A", "**Answer: A**", 1.0),
        ("(A)", "**Answer: (A)**", 1.0),
        ("B", "**Answer: A**", 0.0),
        ("5", "The final answer is: $\\boxed{5}$. I hope it is correct.", 1.0),
        ("north", "**Answer:** North", 1.0),
        ("5", "The answer is 5, not 6.", 1.0),
        ("6", "The answer is 5, not 6.", 0.0),
        ("5", "The answer is 5.5", 0.0),
        ("5", "The answer is -5", 0.0),
        ("5", "The answer is 5 or 6", 0.0),
        ("5, 6", "The answer is 5 or 6", 1.0),
    ],
)
def test_an_answer_without_a_box_is_what_is_said_last(reward, answer, response, expected):
    assert value_of(reward, response, {"answer": answer}) == expected
