"""How the page looks: no element wider than the screen, axe-core finds nothing serious; screenshots to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from fakes import filled_database as filled

RUN = f"#/runs/{filled.RUN_ID}"

VIEWS = {
    "runs": "#/runs",
    "run": RUN,
    "samples": f"{RUN}/samples",
    "events": f"{RUN}/events",
    "logs": f"{RUN}/logs",
    "checkpoints": f"{RUN}/checkpoints",
    "spec": f"{RUN}/spec",
    "fleet": "#/fleet",
    "compare": f"#/compare/{filled.RUN_ID},{filled.EARLIER_ID}",
    "new": "#/new",
    "failed": "#/runs/gsm-typo-20261121-120000-00c0ffee",
}

THERE = {
    "runs": "table.runs a",
    "run": ".chart[data-drawn]",
    "samples": ".response",
    "events": ".events li",
    "logs": ".log",
    "checkpoints": "td.name",
    "spec": ".spec",
    "fleet": "td.name",
    "compare": ".chart[data-drawn]",
    "new": "textarea",
    "failed": ".failure",
}
"""What is there when a view is complete."""


# Colours do not depend on the width, nor the width on colours: two of the four pairs find what all would.
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1440, False)], ids=["390-dark", "1440-light"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_its_screen_and_is_accessible(
    opened, shots: Path | None, view: str, width: int, dark: bool
) -> None:  # type: ignore[no-untyped-def]
    page = opened(VIEWS[view], width, dark)
    settle(page, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shoot(page, shots, f"{view}-{width}-{'dark' if dark else 'light'}.png", width)
    found = Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert serious == [], [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in serious]


def shoot(page: Page, folder: Path | None, name: str, width: int) -> None:
    """The whole view, if somebody wants to look at it. The window is made as high: what Chromium puts together from
    pieces lacks charts."""
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    if folder is not None:
        page.wait_for_timeout(200)
        page.screenshot(path=folder / name)


def settle(page: Page, view: str) -> None:
    """Wait until all of a view is there."""
    page.wait_for_selector("#live[data-state=on]")
    page.wait_for_selector(THERE[view])
    if view == "run":
        page.locator(".chart.tall").scroll_into_view_if_needed()
        left = page.locator(".chart:not([data-drawn], [hidden])")
        expect(left).to_have_count(0, timeout=60_000)  # the devices come from a process of its own
        page.evaluate("scrollTo(0, 0)")
    page.wait_for_load_state("load")
