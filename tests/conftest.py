"""Configuration and fixtures of all tests."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from rlhfless.util.text import storable

# Makes `fakes` importable here and in every process that a test starts. The fork server and Ray's workers do not
# inherit this process's sys.path.
sys.path.append(str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)])

pytest_plugins = ["fakes.prompt_inputs", "fakes.fake_service", "fakes.set_clock"]

# Timings never decide a test, because code is compiled in the first example that calls it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for pytest-xdist (with --no-loadscope-reorder): by the longest `timeout` mark of their tests,
    then by the number of tests. A long file that starts last would delay the whole run."""
    if not hasattr(config, "workerinput"):
        return
    limits, tests = dict[Path, float](), Counter(item.path for item in items)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), mark.args[0] if mark else 0)
    items.sort(key=lambda item: (-limits[item.path], -tests[item.path]))


class _FilesOfLostWorkers(LoadFileScheduling):
    """Scheduler that survives lost workers (killed for memory, crashed).

    A lost worker returns only files with remaining tests, and its replacement is told when no more files follow.
    pytest-xdist also returns finished files and does not tell the replacement, which then waits forever for its first
    test, or runs all tests but its last.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work[node]
        self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
        lost: str | None = super().remove_node(node)
        return lost

    def schedule(self) -> None:
        super().schedule()
        if not self.workqueue:
            for node in self.nodes:
                node.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler for `--dist loadfile`; None selects pytest-xdist's own."""
    return _FilesOfLostWorkers(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Escape a report's sections. Tests of arbitrary text print and log any characters, but pytest-xdist's workers must
    send valid Unicode."""
    report = yield
    report.sections = [(name, storable(text)) for name, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append the reasons of skipped tests to the file named by RLHFLESS_SKIPPED, for one list at the end of `make
    test`."""
    path = os.environ.get("RLHFLESS_SKIPPED")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have their own summaries
        reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())]
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{reason}\n" for reason in reasons)


class _InProcess:
    """A rank actor without Ray: `rank.method.remote(...)` runs the method in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *given: _answer(getattr(self._actor, name), *given))})


async def _answer(method: Callable[..., Any], *given: Any) -> Any:
    return method(*given)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, Any], Awaitable[Any]]:
    """Return `await in_process(Function, settings)`, which starts a function with its single rank in this process."""

    async def start(kind: Any, settings: Any) -> Any:
        monkeypatch.setattr("ray.put", lambda value: value)
        monkeypatch.setattr(kind, "_rank_actor", lambda front, given, rank: _InProcess(front.actor(given, rank)))
        function = kind.__new__(kind)
        await function.__init__(settings)  # Serve awaits the constructor, too
        return function

    return start


class Listener(ThreadingHTTPServer):
    """A loopback server that counts connections and answers each request with an empty JSON object."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.connections = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def verify_request(self, *_: Any) -> bool:
        self.connections += 1
        return True


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Start a server that is named in user input and must not receive requests."""
    server = Listener()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
