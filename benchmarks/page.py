"""How long the page takes in Chromium: the list with many runs, and a run of many steps.

    python benchmarks/page.py [--runs 1000] [--steps 10000] [--loads 7] [--smoke]

From the start of the navigation until the view is complete: the list until its first page of rows is there; the run
until its figures and every chart on the screen (1440 x 900) is drawn. *First*: nothing is in the browser's cache.
*Again*: the files of the page are. Median, fastest and slowest; on two cores browser and service share them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from smoke import parsed
from where import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from playwright.sync_api import BrowserContext, ViewportSize, sync_playwright

from fakes import filled
from fakes.standing import NoDrivers, served
from rlhfless.control.settings import ServiceSettings

CHROMIUM = "/usr/bin/chromium"
SCREEN: ViewportSize = {"width": 1440, "height": 900}

COMPLETE = {
    "list": "document.querySelectorAll('table.runs tbody tr').length >= wanted",
    "run": """document.querySelector('.tiles b') && [...document.querySelectorAll('.chart')].length > 0 &&
        [...document.querySelectorAll('.chart')].every(
            (chart) => 'drawn' in chart.dataset || chart.hidden || chart.getBoundingClientRect().top > innerHeight)""",
}

WATCH = """
const wanted = %d;
window.complete = new Promise((done) => {
  const look = () => { if (%s) done(performance.now()); else requestAnimationFrame(look); };
  requestAnimationFrame(look);
});
"""

LONGEST_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--loads", type=int, default=7)
    options = parsed(parser, runs=5, steps=20, loads=1)
    if not Path(CHROMIUM).exists():
        sys.exit("chromium is not installed (apt-get install -y chromium)")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="rlhfless-page-") as folder:
        settings = ServiceSettings(data=folder, port=0, max_drivers=2)
        filled.fill(
            settings,
            lambda session, at: filled.fill_run(session, at, options.steps, options.steps + 500),
            lambda session, at: filled.fill_crowd(session, at, options.runs - 1),
        )
        with served(settings, NoDrivers()) as (client, service):
            service.replicas[filled.RUN_ID] = filled.replicas(time.time())
            url = str(client.base_url).rstrip("/")
            views = {
                "list": (f"{options.runs} runs", f"{url}/#/runs", min(options.runs, 50)),
                "run": (f"{options.steps} steps", f"{url}/#/runs/{filled.RUN_ID}", 0),
            }
            for view, (text, address, wanted) in views.items():
                for how, times in measured(address, WATCH % (wanted, COMPLETE[view]), options.loads).items():
                    middle = statistics.median(times)
                    span = f"{min(times):.2f} to {max(times):.2f} s, {len(times)} loads"
                    print(f"{view}, {text}, {how}: {middle:.2f} s ({span})")


def measured(address: str, script: str, loads: int) -> dict[str, list[float]]:
    """Seconds of each load, with an empty cache and with a full one."""
    found: dict[str, list[float]] = {"first": [], "again": []}
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        for _ in range(loads):
            context = browser.new_context(viewport=SCREEN)
            context.add_init_script(script)
            found["first"].append(load_s(context, address))
            found["again"].append(load_s(context, address))
            context.close()
        browser.close()
    return found


def load_s(context: BrowserContext, address: str) -> float:
    """Open the view in a new tab."""
    page = context.new_page()
    page.goto(address)
    late = f"new Promise((_, fail) => setTimeout(() => fail(new Error('not complete')), {1000 * LONGEST_S}))"
    took_ms: float = page.evaluate(f"Promise.race([window.complete, {late}])")
    page.close()
    return took_ms / 1000


if __name__ == "__main__":
    main()
