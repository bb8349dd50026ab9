"""A critic has charts, a time and a name of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from fakes import filled_database as filled

Opened = Callable[..., Page]


@pytest.mark.parametrize(
    ("title", "text"),
    [
        ("Critic loss", "values 0.1"),
        ("Explained variance", "returns 0."),
        ("Critic's gradient norm", "largest 0."),
        ("Learning rate", "critic 5.0e-6"),
        ("Time by stage", "critic 3.4 s"),
    ],
)
def test_a_run_with_a_critic_has_its_charts(opened: Opened, title: str, text: str) -> None:
    page = opened(f"#/runs/{filled.PPO_ID}")
    found = page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))
    expect(found).to_have_attribute("data-drawn", "")
    expect(found.locator(".legend")).to_contain_text(text)


def test_a_run_without_a_critic_has_no_empty_charts_of_one(opened: Opened) -> None:
    page = opened(f"#/runs/{filled.RUN_ID}")
    page.wait_for_selector(".chart[data-drawn]")
    expect(page.get_by_role("heading", name="Critic loss")).to_be_hidden()


def test_the_devices_name_what_the_critic_did(opened: Opened) -> None:
    page = opened(f"#/runs/{filled.PPO_ID}")
    page.wait_for_selector(".chart[data-drawn]")
    page.locator(".chart.tall").scroll_into_view_if_needed()
    legend = page.locator(".chart.tall .legend")
    for name in ("reference", "critic computes values", "critic learns", "learns"):
        expect(legend.get_by_text(name, exact=True)).to_be_visible()
    assert "cpu-1: critic computes values, step" in (page.locator(".chart.tall svg").text_content() or "")


def test_runs_are_compared_by_their_critics(opened: Opened) -> None:
    page = opened(f"#/compare/{filled.PPO_ID},{filled.RUN_ID}")
    for name in ("value_loss", "explained_variance", "critic_s"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
