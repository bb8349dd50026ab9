"""When a run that chooses its schedule overlaps steps, by times worked by hand."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fakes.schedule_steps import Steps
from rlhfless.loop.overlap import OverlapChoice, OverlapTrial, TimedStep
from rlhfless.loop.schedules import schedule_of
from rlhfless.spec import AutoSpec


def apart(draw_s: float, learn_s: float) -> TimedStep:
    return TimedStep(draw_s, learn_s, draw_s + learn_s)


def driven(
    trial: OverlapTrial, steps: int, times: Callable[[bool], TimedStep]
) -> tuple[list[bool], list[OverlapChoice]]:
    """Whether each step overlapped, and the choices."""
    overlaps, choices = [], []
    for _ in range(steps):
        overlaps.append(trial.overlap)
        choice = trial.observe(times(trial.overlap))
        choices += [choice] if choice is not None else []
    return overlaps, choices


def test_an_overlap_that_saves_enough_stays() -> None:
    """6 + 4 s apart, 7 s overlapped. The first step warms up; the first overlap is of a step drawn apart."""
    trial = OverlapTrial(AutoSpec())
    overlaps, choices = driven(trial, 10, lambda overlap: TimedStep(6, 4, 7) if overlap else apart(6, 4))
    assert overlaps == 4 * [False] + 6 * [True]
    (choice,) = choices
    assert choice == OverlapChoice(
        True,
        "an overlap saves 30% of a step",
        {"draw_s": 6, "learn_s": 4, "step_s": 10, "overlapped_step_s": 7},
    )


def test_an_overlap_that_loses_is_taken_back() -> None:
    """As published for a model whose learner and engines shared a network: 225 s apart, 244 s overlapped."""
    trial = OverlapTrial(AutoSpec())
    overlaps, choices = driven(trial, 12, lambda overlap: TimedStep(150, 94, 244) if overlap else apart(150, 75))
    assert overlaps == 4 * [False] + 4 * [True] + 4 * [False]
    assert [choice.reason for choice in choices] == ["an overlap costs 8% of a step; 3% is wanted"]


def test_nothing_is_tried_where_one_part_takes_nearly_all() -> None:
    trial = OverlapTrial(AutoSpec(least_saving=0.05))
    overlaps, choices = driven(trial, 9, lambda _: apart(97, 3))
    assert overlaps == 9 * [False]
    assert [choice.reason for choice in choices] == ["generation takes 97% of a step, and an overlap no less"]


def test_both_ways_are_tried_again_and_the_middle_step_counts() -> None:
    """Learning grows from 1 to 10 s beside 10 s of draws; one step in three is longer by an evaluation."""
    trial, count = OverlapTrial(AutoSpec(again_after_steps=5, least_saving=0.2)), 0

    def times(overlap: bool) -> TimedStep:
        nonlocal count
        count += 1
        learn_s = (1 if count < 6 else 10) + 30 * (count % 3 == 0)
        return TimedStep(10, learn_s, 10 if overlap else 10 + learn_s)

    overlaps, choices = driven(trial, 20, times)
    assert [choice.overlap for choice in choices] == [False, True]
    assert overlaps[:12] == 12 * [False]
    assert all(overlaps[13:])


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 200)), max_size=60))
def test_whatever_the_times_a_choice_has_its_reason(times: list[tuple[float, float, float]]) -> None:
    trial = OverlapTrial(AutoSpec(again_after_steps=3))
    for draw_s, learn_s, overlapped_s in times:
        overlap = trial.overlap
        choice = trial.observe(TimedStep(draw_s, learn_s, overlapped_s if overlap else draw_s + learn_s))
        if choice is not None:
            saved = 1 - choice.measured.get("overlapped_step_s", choice.measured["step_s"]) / choice.measured["step_s"]
            assert choice.overlap == (saved >= 0.03) == trial.overlap


async def test_the_schedule_learns_each_step_once_and_says_what_it_chose() -> None:
    steps = Steps({f"{what} {step}": 40 for what in ("draw", "learn") for step in range(1, 21)})
    await schedule_of(AutoSpec()).drive(steps, 1, 20)
    assert sorted(steps.done) == sorted(f"{what} {step}" for what in ("draw", "learn") for step in range(1, 21))
    assert [steps.behind[step] for step in range(1, 6)] == 5 * [0]
    assert max(steps.behind.values()) == 1
    assert [step for step, _ in steps.choices] == [8]
