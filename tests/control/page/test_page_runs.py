"""Runs side by side: in an order, compared, and planned before they are started."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect
from sqlalchemy.orm import Session

from fakes import filled_database as filled
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.control import store
from rlhfless.control.service import Service
from rlhfless.scaling.prices import PriceBook, load_price_book

COMPARE_MS = 240_000
"""As the page waits."""


def test_the_list_is_put_in_order_by_the_service(opened) -> None:  # type: ignore[no-untyped-def]
    page: Page = opened()
    rows = page.locator("table.runs tbody tr")
    expect(rows.first).to_contain_text("demo")
    cost = page.get_by_role("columnheader", name="Cost")
    cost.get_by_role("button").click()
    expect(cost).to_have_attribute("aria-sort", "descending")
    expect(rows).to_have_count(50)
    page.mouse.wheel(0, 20_000)
    expect(rows).to_have_count(67)  # the cheapest are on the second page
    texts = rows.locator("td[data-title=Cost]").all_inner_texts()
    values = [float(text.strip("$").replace(",", "")) for text in texts if text.startswith("$")]
    assert values == sorted(values, reverse=True)
    cost.get_by_role("button").click()
    expect(cost).to_have_attribute("aria-sort", "ascending")
    expect(cost.get_by_role("button")).to_be_focused()
    expect(rows.first.locator("td[data-title=Cost]")).to_have_text("–")  # noqa: RUF001


def test_other_tables_are_sorted_by_their_columns_and_stay_so(opened) -> None:  # type: ignore[no-untyped-def]
    page: Page = opened(f"#/runs/{filled.RUN_ID}")
    names = page.get_by_role("table", name="Cost by function").locator("td.name")
    expect(names).to_have_text(["generation", "learner", "reference"])
    page.get_by_role("button", name="Starts", exact=True).click()
    expect(names).to_have_text(["generation", "reference", "learner"])
    page.get_by_role("link", name="Logs").click()
    page.get_by_role("link", name="Overview").click()
    expect(names).to_have_text(["generation", "reference", "learner"])


def test_a_table_that_is_drawn_again_while_its_button_is_pressed_is_still_sorted(opened) -> None:  # type: ignore[no-untyped-def]
    page: Page = opened(f"#/runs/{filled.RUN_ID}")
    names = page.get_by_role("table", name="Cost by function").locator("td.name")
    expect(names).to_have_text(["generation", "learner", "reference"])
    page.get_by_role("button", name="Starts", exact=True).hover()
    page.mouse.down()
    drawn_again = """async () => {
        const { refill } = await import("/page/dom.js"), bill = document.querySelector(".bill");
        refill(bill, () => [...bill.children].map((one) => (window.redrawn = true, one)));
    }"""
    page.evaluate(drawn_again)
    page.mouse.up()
    expect(names).to_have_text(["generation", "reference", "learner"])
    assert page.evaluate("window.redrawn") is True


def test_runs_are_chosen_and_drawn_over_each_other(opened) -> None:  # type: ignore[no-untyped-def]
    page: Page = opened()
    for run in (filled.RUN_ID, filled.EARLIER_ID):
        page.get_by_role("checkbox", name=f"Compare math-grpo {run.removeprefix('math-grpo-')}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    for name in ("reward_mean", "reward/math", "eval/math", "loss", "entropy", "learning_rate", "cost_usd"):
        chart = page.locator(".chart", has=page.get_by_role("heading", name=name, exact=True))
        expect(chart.locator(".legend li")).to_have_count(2)
        assert chart.locator(".plot").evaluate("({uplot}) => uplot.series.length") == 3
    assert chart.locator(".plot").evaluate("({uplot}) => uplot.scales.x.max") == 400
    page.get_by_role("link", name="Leave out math-grpo aa10be71").click()
    expect(chart.locator(".legend li")).to_have_count(1)
    expect(page).to_have_url(re.compile(f"#/compare/{filled.RUN_ID}$"))


def test_runs_are_compared_by_settings_time_and_cost(opened, site: tuple[str, Service]) -> None:  # type: ignore[no-untyped-def]
    service = site[1]

    def change(session: Session) -> None:
        run = store.run_of(session, filled.EARLIER_ID)
        rewards = [run.spec["rewards"][0], {**run.spec["rewards"][1], "pattern": "7"}]
        run.spec = {**run.spec, "name": "other", "seed": 7, "optimizer": {"learning_rate": 3e-6}, "rewards": rewards}
        store.touch(session, run)

    asyncio.run_coroutine_threadsafe(service.database.write(change), service.run_events.loop).result(20)
    page: Page = opened(f"#/compare/{filled.RUN_ID},{filled.EARLIER_ID}")
    table = page.get_by_role("table", name="Settings that differ")
    expect(table).to_be_visible()
    rows = {
        texts[0]: texts[1:] for row in table.locator("tbody tr").all() if (texts := row.locator("td").all_inner_texts())
    }
    assert rows["seed"] == ["0", "7"]
    assert rows["optimizer.eps"] == ["1e-8", "\N{EN DASH}"]
    assert rows["optimizer.learning_rate"][1] == "0.000003"
    assert rows["rewards.1.pattern"][1] == "7"
    assert "rewards.0.type" not in rows
    assert not rows.keys() & {"name", "steps", "model.path"}
    plot = page.locator(".chart", has=page.get_by_role("heading", name="reward_mean", exact=True)).locator(".plot")
    last = "({uplot}) => [1, 2].map((at) => uplot.data[0].findLast((_, place) => uplot.data[at][place] != null))"
    assert plot.evaluate(last)[1] == 400
    axes = page.get_by_role("group", name="X axis")
    at, cost = next(
        (at, row["cost_usd"]) for _, at, row in reversed(filled.measured(400, 300, 0.0, seed=8)) if "cost_usd" in row
    )
    axes.get_by_role("button", name="Cost").click()
    _wait_for_end(plot, lambda end: end < 200)
    assert plot.evaluate(last)[1] == pytest.approx(cost, rel=1e-6)
    axes.get_by_role("button", name="Time").click()
    _wait_for_end(plot, lambda end: end > 1000)
    assert plot.evaluate(last)[1] == pytest.approx(at, rel=0.01)
    plot.hover()
    expect(plot.locator(".tip b").first).to_have_text(re.compile("^[0-9]+ (h|min)"))
    axes.get_by_role("button", name="Steps").click()
    _wait_for_end(plot, lambda end: end == 400)
    assert Axe().run(page).response["violations"] == []


def test_a_spec_is_planned_and_then_started(opened, site: tuple[str, Service]) -> None:  # type: ignore[no-untyped-def]
    folder = Path(site[1].settings.roots[0])
    build_random(folder / "model", seed=0, size=SMALLEST)
    text = f"name: pasted # as YAML\nmodel: {{path: {folder}/model}}\nprompts: {{path: {folder}/prompts.jsonl}}\n"
    text += "rewards: [{type: exact_match}]\nsteps: 3\noptimizer: {learning_rate: 1e-6}\n"
    text += "prompts_per_step: 8\nsamples_per_prompt: 2\ngeneration: {max_tokens: 64}\n"
    # Fewer kinds than are known, so that they are soon compared.
    prices = PriceBook.model_validate(
        {"devices": [load_price_book().device(kind) for kind in ("cpu-core", "h100", "h200")]}
    )
    (folder / "prices.json").write_text(prices.model_dump_json())
    text += f"scaling: {{prices: {folder}/prices.json}}\n"
    page: Page = opened("#/new")
    spec, plan = page.get_by_role("textbox", name="Spec"), page.get_by_role("status", name="Plan")
    start = page.get_by_role("button", name="Start the run")
    spec.fill(text.replace("steps: 3", "steps: 0").replace("exact_match", "exactmatch"))
    page.get_by_role("button", name="Plan").click()
    expect(page.get_by_role("alert")).to_contain_text("steps")
    expect(page.get_by_role("alert").locator("code")).to_have_text(["rewards.0.type", "steps"])
    expect(start).to_be_disabled()
    spec.fill(text)
    page.get_by_role("button", name="Plan").click()
    for shown in ("Run time", "Run cost", "$", "Memory per device and phase", "learner", "Response lengths: assumed"):
        expect(plan).to_contain_text(shown, timeout=60_000)
    expect(page.get_by_role("alert")).to_be_empty()
    page.get_by_role("button", name="Compare other devices").click()
    front = page.get_by_role("img", name="Run time and cost")
    expect(front).to_be_visible(timeout=COMPARE_MS)
    assert front.locator("circle.best").count() >= 1
    expect(page.get_by_role("table", name="Other devices")).to_contain_text("on the front")
    expect(page.get_by_role("list", name="If prices or lengths are others")).to_contain_text("responses of 130%")
    assert Axe().run(page).response["violations"] == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    start.click()
    expect(page.get_by_role("heading", name="pasted")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the run").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the run").click()
    expect(page).to_have_url(re.compile("#/runs$"))


def test_what_is_no_spec_is_said(opened) -> None:  # type: ignore[no-untyped-def]
    page: Page = opened("#/new")
    for text, said in (("model: [", "line 1"), ("just words", "a spec has keys")):
        page.get_by_role("textbox", name="Spec").fill(text)
        page.get_by_role("button", name="Plan").click()
        expect(page.get_by_role("alert")).to_contain_text(said)


def _wait_for_end(plot: Locator, ends: Callable[[float], bool]) -> None:
    """Wait until the x axis ends so. The page's policy forbids the strings that `wait_for_function` evaluates."""
    for _ in range(100):
        if ends(end := plot.evaluate("(plot) => plot.uplot.scales.x.max")):
            return
        plot.page.wait_for_timeout(50)
    raise AssertionError(f"the x axis ends at {end}")
