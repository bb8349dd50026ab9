"""What the page does: it follows runs live, asks for a key, acts, and can be used by keyboard."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from playwright.sync_api import Locator, Page, Route, expect
from sqlalchemy.orm import Session

from fakes import filled_database as filled
from rlhfless.control import store
from rlhfless.control.database.tables import MetricsRow
from rlhfless.control.keys import make_key
from rlhfless.control.lifecycle import Status
from rlhfless.control.service import Service

RUN = f"#/runs/{filled.RUN_ID}"


def write(service: Service, change) -> None:  # type: ignore[no-untyped-def]
    """Change the database as the service does, which tells those that watch."""
    asyncio.run_coroutine_threadsafe(service.database.write(change), service.run_events.loop).result(20)


def live(page: Page) -> Page:
    page.wait_for_selector("#live[data-state=on]")
    return page


def chart(page: Page, title: str) -> Locator:
    return page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))


def test_the_list_shows_runs_newest_first_and_more_of_them_on_the_way_down(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened())
    rows = page.locator("table.runs tbody tr")
    expect(rows.first).to_contain_text("demo")
    running = rows.filter(has_text=filled.RUN_ID.removeprefix("math-grpo-"))
    for text in ("running", "231 / 400", "$", "team=reasoning", "0.587"):
        expect(running).to_contain_text(text)
    assert "±" not in running.inner_text()  # the scatter of a step's samples says nothing about the run
    page.mouse.wheel(0, 20_000)
    expect(rows).to_have_count(67)  # 59, 6 in the other statuses, one with a critic, and the one at work


def test_the_list_can_be_filtered_by_status_and_text(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened())
    page.get_by_role("button", name="Paused").click()
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    expect(page.locator("table.runs tbody tr")).to_contain_text("raise it to resume")
    page.get_by_role("button", name="All").click()
    page.get_by_role("searchbox").fill("sweep=lr-3")
    expect(page.locator("table.runs tbody tr:visible")).to_have_count(1)
    page.get_by_role("searchbox").fill("no such run")
    expect(page.get_by_text("No run matches.")).to_be_visible()


def test_a_run_that_changes_changes_in_the_list(opened, site) -> None:  # type: ignore[no-untyped-def]
    page = live(opened())
    row = page.locator("table.runs tbody tr", has_text="20261121-083000-5eed5eed")
    expect(row).to_contain_text("cancelled")

    def rename(session: Session) -> None:
        run = store.run_of(session, "lr-sweep-20261121-083000-5eed5eed")
        run.status_reason = "cancelled by its owner"
        store.touch(session, run)

    write(site[1], rename)
    expect(row).to_contain_text("cancelled by its owner")


def test_a_new_step_is_drawn_without_a_reload(opened, site) -> None:  # type: ignore[no-untyped-def]
    page = live(opened(RUN))
    reward = chart(page, "Reward")
    expect(reward).to_have_attribute("data-drawn", "")

    def step(session: Session) -> None:
        run = store.run_of(session, filled.RUN_ID)
        values = run.latest | {"reward_mean": 0.987, "reward_std": 0.125}
        session.add(MetricsRow(run_id=run.id, step=232, kind="step", at=time.time(), values=values))
        run.latest, run.step = values, 232
        store.add_event(session, run, "metrics", "step 232 of 400", data={"step": 232})

    write(site[1], step)
    expect(reward.locator(".legend")).to_contain_text("0.987")
    expect(page.locator(".tiles")).to_contain_text("held out 0.587")
    expect(page.locator(".head .progress")).to_contain_text("232 / 400")


LATE = """(() => {
  const now = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await now(path, options);
    if (String(path).split("?")[0] === "PATH" && !window.late) {
      document.documentElement.dataset.late = "";
      await new Promise((go) => { window.late = go; });
    }
    return answer;
  };
})()"""
"""The first answer of a path comes only when the test says so."""


NEWEST = "code-ppo-20261123-101200-7d0e11c4"
"""The list shows it as soon as the stream names it; older runs come with their page."""


@pytest.mark.parametrize("view", [RUN, ""])
def test_an_answer_that_comes_late_does_not_replace_what_the_stream_told(opened, site, view: str) -> None:  # type: ignore[no-untyped-def]
    run, path = (filled.RUN_ID, f"/v1/runs/{filled.RUN_ID}") if view else (NEWEST, "/v1/runs")
    page = live(opened(view, scripts=(LATE.replace("PATH", path),)))
    page.wait_for_selector("html[data-late]")  # the page's security policy forbids to wait for a function
    told = f"told at {time.time()}"

    def say(session: Session) -> None:
        row = store.run_of(session, run)
        row.status_reason = told
        store.touch(session, row)

    write(site[1], say)
    expect(page.locator("#main")).to_contain_text(told)
    page.evaluate("window.late()")
    if view:
        page.wait_for_timeout(500)  # nothing shows that an answer was left aside
    else:
        expect(page.locator("table.runs tbody tr")).not_to_have_count(1)
    expect(page.locator("#main")).to_contain_text(told)


def test_a_chart_tells_its_values_at_the_pointer_by_key_and_as_a_table(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened(RUN))
    cost = chart(page, "Cost")
    expect(cost).to_have_attribute("data-drawn", "")
    cost.locator(".plot").hover()
    for text in ("step ", "this run $", "best static fleet $", "planned $"):
        expect(cost.locator(".tip")).to_contain_text(text)
    cost.locator(".plot").focus()
    page.mouse.move(2, 2)
    page.keyboard.press("ArrowLeft")
    expect(cost.locator(".tip")).to_be_visible()
    cost.get_by_role("button", name="Data of Cost as a table").click()
    expect(cost.locator("table tbody tr")).to_have_count(100)


def test_what_was_predicted_is_beside_what_was_measured(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened(RUN))
    expect(page.get_by_text(re.compile(r"400 steps planned, 23\d measured"))).to_be_visible()
    table = page.get_by_role("table", name="Predicted and measured")
    for text in ("Step time", "Step cost", "Run time", "Run cost", " to $"):
        expect(table).to_contain_text(text)
    expect(table.locator("tbody tr").first.locator("td").last).to_contain_text("%")


def test_pause_and_resume(opened, site) -> None:  # type: ignore[no-untyped-def]
    page = live(opened("#/runs/demo-20261123-102907-c3a855f0"))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".title .pill")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".title .pill")).to_have_text("queued")


def test_cancel_asks_first(opened, site) -> None:  # type: ignore[no-untyped-def]
    def add(session: Session) -> None:
        session.add(filled.run_row(site[1].settings.folder, "gone-20261123-110000-0badcafe", Status.PAUSED, "paused"))

    write(site[1], add)
    page = live(opened("#/runs/gone-20261123-110000-0badcafe"))
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Back").click()
    expect(page.locator(".title .pill")).to_have_text("paused")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator(".title .pill")).to_have_text("cancelled")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the run").click()
    expect(page).to_have_url(re.compile("#/runs$"))


def test_a_run_is_started_from_a_checkpoint_and_wrong_fields_are_named(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened(f"{RUN}/checkpoints"))
    posted = []

    def answer(route: Route) -> None:
        posted.append(route.request)
        problem = {"param": "steps", "message": "steps is 0", "hint": "write 1 or more"}
        error = {"code": "invalid_spec", "message": "the spec", "param": "steps", "problems": [problem]}
        route.fulfill(status=422, json={"error": error})

    page.route(lambda url: url.endswith("/v1/runs"), answer)
    page.get_by_role("button", name="Start a run from step-000200").click()
    page.get_by_role("textbox", name="Name").fill("second")
    page.get_by_role("spinbutton", name="Steps").fill("50")
    page.get_by_role("button", name="Start the run").click()
    expect(page.get_by_role("alert")).to_contain_text("steps: steps is 0 — write 1 or more")
    body = posted[0].post_data_json
    assert (body["name"], body["steps"]) == ("second", 50)
    assert body["model"]["path"].endswith("/checkpoints/step-000200")
    assert "output" not in body
    assert "ray_address" not in body["placement"]
    assert posted[0].headers["idempotency-key"]


def test_money_has_two_significant_digits(opened) -> None:  # type: ignore[no-untyped-def]
    values = [0.000032, 0.0042, 0.4149, 0.999, 4.126, 43.1, 1234.4, 0]
    shown = opened().evaluate("(values) => import('/page/format.js').then(({usd}) => values.map(usd))", values)
    assert shown == ["$0.000032", "$0.0042", "$0.41", "$1.00", "$4.13", "$43.10", "$1,234", "$0.00"]


def test_the_page_works_by_keyboard(opened) -> None:  # type: ignore[no-untyped-def]
    page = live(opened())
    page.wait_for_selector("table.runs a")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('table.runs td a')"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(".tabs a[aria-current]")).to_have_text("Overview")


def test_what_is_not_there_is_said(opened) -> None:  # type: ignore[no-untyped-def]
    page = opened("#/runs/no-such-run")
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()


def test_a_key_is_asked_for_once_and_kept_for_the_tab(opened, site) -> None:  # type: ignore[no-untyped-def]
    made = []
    write(site[1], lambda session: made.append(make_key(session, "page", "run")))
    site[1].keys._read_s = -1e9
    try:
        page = opened(RUN)
        page.get_by_role("textbox", name="API key").fill("rlk_wrong")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("is not known, or has been revoked")).to_be_visible()
        page.get_by_role("textbox", name="API key").fill(made[0][1])
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".title .pill")).to_have_text("running")
        live(page)
        page.reload()
        expect(page.locator(".title .pill")).to_have_text("running")
        assert page.evaluate("localStorage.length") == 0
    finally:
        write(site[1], lambda session: session.delete(session.merge(made[0][0])))
        site[1].keys._read_s = -1e9
