"""The curves of a run: which there are, and what can be done with them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from fakes import filled_database as filled

RUN = f"#/runs/{filled.RUN_ID}"


def chart(page: Page, title: str) -> Locator:
    """A chart that is drawn."""
    found = page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))
    expect(found).to_have_attribute("data-drawn", "")
    return found


def steps_of(found: Locator) -> list[float]:
    """First and last step on a chart's axis."""
    scale: list[float] = found.locator(".plot").evaluate("({uplot}) => [uplot.scales.x.min, uplot.scales.x.max]")
    return scale


@pytest.mark.parametrize(
    ("title", "lines"),
    {
        "Rewards by name": ["format 0.936", "math 0.6"],
        "Held out": ["math 0.6", "math_greedy 0.6"],
        "Loss": ["loss 0.0", "policy 0.0"],
        "Gradient norm": ["mean 0.", "largest 0."],
        "Entropy": ["policy 0.2"],
        "Clipped share": ["lower clip 0.", "upper clip 0."],
        "Learning rate": ["rate 1.0e-6"],
    }.items(),
)
def test_what_is_looked_for_first_is_there(opened, title: str, lines: list[str]) -> None:  # type: ignore[no-untyped-def]
    found = chart(opened(RUN), title)
    expect(found.locator(".legend li")).to_have_count(len(lines))
    for line in lines:
        expect(found.locator(".legend")).to_contain_text(line)
    assert found.locator(".plot").evaluate("({uplot}) => uplot.series.length") == len(lines) + 1


def test_dragging_over_a_chart_shows_those_steps_in_all_and_reads_them_anew(opened) -> None:  # type: ignore[no-untyped-def]
    page = opened(RUN)
    loss, entropy = chart(page, "Loss"), chart(page, "Entropy")
    assert steps_of(loss) == [1, 231]
    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.252 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 70, steps=4)
    with page.expect_response(lambda answer: "until_step=116" in answer.url) as answered:
        page.mouse.up()
    found = {one["name"]: one["steps"] for one in answered.value.json()["series"]}
    assert (found["loss"][0], found["loss"][-1]) == (59, 116)
    expect(page.get_by_role("spinbutton", name="First step")).to_have_value("59")
    assert steps_of(loss) == steps_of(entropy) == [59, 116]
    loss.locator(".u-over").dblclick()
    expect(page.get_by_role("spinbutton", name="Last step")).to_have_value("231")
    assert steps_of(entropy) == [1, 231]


def test_steps_can_be_chosen_without_dragging(opened) -> None:  # type: ignore[no-untyped-def]
    page = opened(RUN)
    entropy = chart(page, "Entropy")
    page.get_by_role("button", name="Last 100", exact=True).click()
    expect(page.get_by_role("spinbutton", name="First step")).to_have_value("132")
    assert steps_of(entropy)[0] == 132
    page.get_by_role("spinbutton", name="First step").fill("140")
    page.get_by_role("spinbutton", name="Last step").fill("150")
    page.keyboard.press("Enter")
    entropy.get_by_role("button", name="Data of Entropy as a table").click()
    expect(entropy.locator("tbody tr")).to_have_count(11)
    assert steps_of(entropy) == [140, 150]
    page.get_by_role("spinbutton", name="Last step").fill("10")
    page.keyboard.press("Enter")
    expect(page.get_by_text("must be after the first one")).to_be_visible()


def test_lines_are_smoothed_and_what_was_measured_stays(opened) -> None:  # type: ignore[no-untyped-def]
    page = opened(RUN)
    loss = chart(page, "Loss")
    page.get_by_role("slider", name="Smoothing").fill("0.9")
    expect(loss.locator(".u-over")).to_be_visible()
    loss.locator(".u-over").hover()
    expect(loss.locator(".tip")).to_contain_text("(")
    assert loss.locator(".plot").evaluate("({uplot}) => uplot.series.length") == 5  # steps, two lines, twice
    # Worked by hand: 4; (0.5 * 4 / 2 + 8 / 2) / 0.75; a gap; (0.5 * 5 + 2 / 2) / 0.875.
    found = page.evaluate("import('/page/curves.js').then(({averages}) => averages([4, 8, null, 2], 0.5))")
    assert found == [4, pytest.approx(20 / 3), None, 4]


def test_a_line_is_hidden_by_its_name(opened) -> None:  # type: ignore[no-untyped-def]
    rewards = chart(opened(RUN), "Rewards by name")
    name = rewards.get_by_role("button", name="format")
    name.click()
    expect(name).to_have_attribute("aria-pressed", "false")
    low, high = rewards.locator(".plot").evaluate("({uplot}) => [uplot.scales.y.min, uplot.scales.y.max]")
    assert (low, high) == (pytest.approx(0.17, abs=0.05), pytest.approx(0.74, abs=0.05))  # of `math` alone
    name.click()
    assert rewards.locator(".plot").evaluate("({uplot}) => uplot.scales.y.max") > 0.93
