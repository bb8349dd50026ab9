"""The page in headless Chromium, of a service whose database is filled as by some days of work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fakes import filled_database as filled
from fakes.fake_service import NoDrivers, served
from rlhfless.control.service import Service
from rlhfless.control.settings import ServiceSettings

PATIENCE_MS = 60_000
"""Longest wait for what a page is about to show, on a machine that does other work, too."""

CHROMIUM = Path("/usr/bin/chromium")

WIDTHS = {390: 844, 1440: 900}
"""Of a phone, and of a laptop, with their heights."""


# Of a module, because Playwright's loop runs as long as it is there, and other modules' tests have loops of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("chromium is not installed (Debian: chromium): the page is not tested")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    roots = (str(tmp_path_factory.mktemp("inputs")),)
    settings = ServiceSettings(data=str(tmp_path_factory.mktemp("site")), port=0, max_drivers=2, roots=roots)
    filled.fill(
        settings, filled.fill_run, filled.fill_others, filled.fill_ppo, lambda *at: filled.fill_crowd(*at, count=59)
    )
    with served(settings, NoDrivers()) as (client, service):
        service.replicas[filled.RUN_ID] = filled.replicas(time.time())
        yield str(client.base_url).rstrip("/"), service


Opened = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, site: tuple[str, Service]) -> Iterator[Opened]:
    """Opens a view; afterwards nothing may have failed in the browser that the test did not expect."""
    contexts, faults = [], []

    def hear(text: str) -> None:
        if not text.startswith("Failed to load resource"):  # what is answered with 4xx is what some tests are about
            faults.append(text)

    def open_view(view: str = "", width: int = 1440, dark: bool = False, scripts: tuple[str, ...] = ()) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": WIDTHS[width]},
            color_scheme="dark" if dark else "light",
            has_touch=width == 390,
            reduced_motion="reduce",
        )
        contexts.append(context)
        for script in scripts:
            context.add_init_script(script)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: hear(line.text) if line.type == "error" else None)
        page.goto(f"{site[0]}/{view}")
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def shots() -> Path | None:
    """Where screenshots go: RLHFLESS_SCREENSHOTS, if it is set."""
    folder = os.environ.get("RLHFLESS_SCREENSHOTS")
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
