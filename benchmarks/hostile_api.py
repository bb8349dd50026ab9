"""The hostile trial of the service: thousands of malformed and outsized requests, and what they cost the machine.

    python benchmarks/hostile_api.py MODEL_FOLDER [--calls 10000] [--stateful 2000] [--seed 0] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote. A service of its own (`rlhfless up`, with a TMPDIR of its own) gets
`--stateful` calls that schemathesis chains from the OpenAPI document, and `--calls` calls that each change one value of
a valid document: every number becomes each of 2^31 to 10^30, every text each of the TEXTS below. Runs that are accepted
are cancelled and deleted. The table says how many calls there were, answers of 5xx, answers over a second, the
largest memory of the service's process, and which processes and files were left after `rlhfless down`; the exit code is
1 if any count is above what is allowed. Some minutes on two cores; `--smoke` takes one, and judges no time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from api import COMMAND, demo
from smoke import parsed
from where import machine

NUMBERS = (-1, 0, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 1e308, 1e-320)
TEXTS = (
    "\ud800",
    "a\0b",
    "x" * (1 << 20),
    "../../../../etc/passwd",
    "/dev/zero",
    "/proc/self/environ",
    "http://169.254.169.254/latest/meta-data/",
    "http://user:secret@127.0.0.1:1/",
    "a{99999999999}",
    "99999999xh100",
    "(" * 5000,
    "",
)
OTHERS: tuple[Any, ...] = (None, [], {}, True, "1", {"$ref": "file:///etc/passwd"}, [[[]]])

SLOW_S = 1.0
MOST_MIB = 1024
COMPUTES = ("/v1/runs:plan", "/v1/rewards:test", "/v1/simulations", "timeline")
"""Routes whose accepted questions are computed for seconds, in a process of their own; refusals must be quick."""
STREAM = "/v1/events"
"""A stream without an end."""
QUIET_S = 30.0
"""Longest wait until what was cancelled is gone, before the service is stopped."""

REWARDS = (
    {"type": "exact_match", "name": "exact"},
    {"type": "regex", "name": "regex", "pattern": "answer: (.*)", "answer_field": "answer"},
    {"type": "http", "name": "http", "url": "http://127.0.0.1:9/score"},
    {"type": "math", "name": "math"},
    {"type": "json_schema", "name": "json", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"type": "length", "name": "length"},
    {"type": "code", "name": "code"},
)
CONTRACTS = (
    {"type": "cheapest", "deadline_s": 60.0},
    {"type": "fastest", "budget_usd": 1.0},
    {"type": "weighted", "time_weight": 0.5},
)


@dataclass
class Calls:
    """What was asked and answered."""

    client: httpx.Client
    count: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def note(self, method: str, path: str, status: int, took_s: float, asked: str) -> None:
        """Count one answer."""
        self.count += 1
        self.statuses[status] += 1
        computed = status < 400 and any(part in path for part in COMPUTES)
        if status >= 500:
            self.faults.append(f"{status} {method} {path} {asked[:200]}")
        if not computed:
            self.slowest_s = max(self.slowest_s, took_s)
            if took_s > SLOW_S:
                self.slow.append(f"{took_s:.1f} s {status} {method} {path} {asked[:200]}")

    def ask(self, method: str, path: str, body: Any = None, changed: str = "") -> httpx.Response:
        """One call, with what was changed in its body."""
        content = None if body is None else json.dumps(body).encode()
        began_s = time.perf_counter()
        answer = self.client.request(method, path, content=content, headers={"Content-Type": "application/json"})
        self.note(method, path, answer.status_code, time.perf_counter() - began_s, changed)
        return answer


# -- one value of a valid document, changed


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that holds no other."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from leaves(one, (*path, key))
    if not isinstance(value, dict | list) and path:
        yield path


def changed(document: dict[str, Any], path: Sequence[Any], new: Any) -> dict[str, Any]:
    """A copy with another value at a path."""
    made = copy.deepcopy(document)
    *parents, last = path
    here: Any = made
    for key in parents:
        here = here[key]
    here[last] = new
    return made


def hostile(old: Any) -> Sequence[Any]:
    """What takes the place of a value."""
    if isinstance(old, bool) or old is None:
        return (*NUMBERS[:4], *OTHERS, TEXTS[0])
    return (*NUMBERS, *OTHERS) if isinstance(old, int | float) else (*TEXTS, *OTHERS)


def documents(model: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and body of valid requests, which together have every key of a spec and of a scenario."""
    from rlhfless.spec import RunSpec

    kept = {"output", "ray_address", "trusted_network", "http_hosts", "metrics_port"}
    base = {name: value for name, value in demo(model, 2).items() if name not in kept}
    full = RunSpec.model_validate(base).model_dump(mode="json")
    for section, own in (("placement", kept), ("scoring", kept), ("logging", kept)):
        full[section] = {name: value for name, value in full[section].items() if name not in own}
    del full["output"]
    yield "POST", "/v1/runs", full
    for reward in REWARDS:
        yield "POST", "/v1/runs", base | {"rewards": [reward]}
        sample = {"prompt": "2+2=", "response": "4", "answer": "4"}
        yield "POST", "/v1/rewards:test", {"rewards": [reward], "samples": [sample]}
    for contract in CONTRACTS:
        yield "POST", "/v1/runs", base | {"scaling": {"contract": contract}}
    yield "POST", "/v1/runs:plan", {"spec": base, "devices": ["8xh100"], "deadline_s": 100.0}
    scenario = yaml.safe_load((Path(__file__).parents[1] / "examples/scenarios/paper-3b-l40s.yaml").read_text())
    yield "POST", "/v1/simulations", {"scenario": scenario, "policies": []}


def mutations(model: Path, seed: int) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Requests with one value changed, in an order that a seed decides; then again with two."""
    chance = random.Random(seed)
    made = [
        (method, path, body, place, new)
        for method, path, body in documents(model)
        for place in leaves(body)
        for new in hostile(_at(body, place))
    ]
    chance.shuffle(made)
    for method, path, body, place, new in made:
        yield method, path, changed(body, place, new), _named(place, new)
    while True:
        method, path, body, place, new = chance.choice(made)
        second = chance.choice([other for other in leaves(body) if other != place])
        other = chance.choice(hostile(_at(body, second)))
        both = changed(changed(body, place, new), second, other)
        yield method, path, both, f"{_named(place, new)}, {_named(second, other)}"


def _at(body: Any, place: Sequence[Any]) -> Any:
    for key in place:
        body = body[key]
    return body


def _named(place: Sequence[Any], new: Any) -> str:
    return f"{'.'.join(map(str, place))}={new!r}"[:120]


def queries(run: str, seed: int) -> Iterator[str]:
    """Paths with hostile parameters."""
    chance = random.Random(seed)
    texts = [text[:2000] for text in TEXTS if storable(text)] + [str(number) for number in NUMBERS]
    names = ("events", "metrics", "rollouts", "logs", "checkpoints", "usage", "timeline", "trace", "")
    keys = ("after", "limit", "step", "after_step", "name", "lines", "prompt_id", "metadata[a]", "status", "x")
    while True:
        text = str(httpx.QueryParams({chance.choice(keys): chance.choice(texts)}))
        name = chance.choice(names)
        yield chance.choice((f"/v1/runs/{run}/{name}?{text}", f"/v1/runs?{text}", f"/v1/runs/{text}/{name}"))


def storable(text: str) -> bool:
    """Whether a URL can hold it."""
    return "\ud800" not in text


def trial(calls: Calls, model: Path, many: int, seed: int) -> None:
    """`many` changed requests; what they started is removed."""
    run = calls.ask("POST", "/v1/runs", demo(model, 2) | {"name": "kept"}).json()["id"]
    calls.ask("POST", f"/v1/runs/{run}/cancel")
    asked, bodies = queries(run, seed), mutations(model, seed)
    for number in range(many):
        if number % 5 == 4:
            calls.ask("GET", next(asked))
            continue
        method, path, body, what = next(bodies)
        answer = calls.ask(method, path, body, what)
        if path == "/v1/runs" and answer.status_code == 201:
            made = answer.json()["id"]
            calls.ask("POST", f"/v1/runs/{made}/cancel")
            calls.ask("DELETE", f"/v1/runs/{made}")


def stateful(calls: Calls, many: int, seed: int) -> None:
    """Calls that schemathesis chains, until there were `many`."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.errors import Flaky

    schema = schemathesis.openapi.from_url(f"{calls.client.base_url}/openapi.json").exclude(path=STREAM)

    class Chained(schema.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            case.headers = {name: text for name, text in (case.headers or {}).items() if name.lower() != "accept"}
            return {"timeout": 150}

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            calls.note(case.method, case.path, response.status_code, response.elapsed, repr(case.body))

    until = calls.count + many
    for attempt in range(1000):
        if calls.count >= until:
            return
        chosen = settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=False,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        random.seed(seed + attempt)
        with suppress(Flaky):  # a chain follows what the service answers, which changes between two rounds
            Chained.run(settings=chosen)


# -- what it costs the machine


@contextmanager
def watched(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """Largest resident memory of a process, in MiB, while the block runs."""
    ended, most = threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.05):
            most[0] = max(most[0], process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most[0] >> 20
    finally:
        ended.set()
        thread.join()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those that name a folder in their command line or their environment, apart from this one."""
    named = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            named.append(process)
    return named


def shared_memory() -> set[str]:
    """Names in /dev/shm that could be a run's, or its Ray's."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def settled(client: httpx.Client) -> None:
    """Delete the runs that are left, once their drivers have gone."""
    end_s = time.monotonic() + QUIET_S
    while time.monotonic() < end_s:
        runs = client.get("/v1/runs", params={"limit": 100}).json()["data"]
        for run in runs:
            client.post(f"/v1/runs/{run['id']}/cancel")
            client.delete(f"/v1/runs/{run['id']}")
        if not runs:
            return
        time.sleep(0.5)


def up(data: Path, temporary: Path, model: Path) -> tuple[str, psutil.Process]:
    """Start a service, and wait for its Ray; returns its address and its process."""
    temporary.mkdir()
    command = [COMMAND, "up", "--detach", "--port", "0", "--data", data, "--max-drivers", "1", "--root", model]
    subprocess.run(list(map(str, command)), check=True, env=os.environ | {"TMPDIR": str(temporary)})
    url = str(json.loads((data / "service.json").read_text())["url"])
    port = int(url.rpartition(":")[2])
    end_s = time.monotonic() + 120
    while not httpx.get(f"{url}/readyz", timeout=10).is_success and time.monotonic() < end_s:
        time.sleep(0.2)
    listening = [one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid]
    return url, psutil.Process(listening[0])


def left_behind(folder: Path, data: Path, temporary: Path, shared_before: set[str]) -> tuple[list[str], list[str]]:
    """Processes, and files outside of what the data folder is meant to keep, 5 s after the service has stopped."""
    end_s = time.monotonic() + 5
    while (processes := processes_of(folder)) and time.monotonic() < end_s:
        time.sleep(0.2)
    ours = [name for name in shared_memory() - shared_before if folder.name in name]
    files = [str(path) for path in (*temporary.iterdir(), *(data / "runs").glob("*"))]
    return [f"{one.pid} {' '.join(one.cmdline())[:80]}" for one in processes], [*files, *ours]


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--stateful", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parsed(parser, calls=500, stateful=50)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="rlhfless-hostile-") as name:
        folder = Path(name)
        data, temporary, shared_before = folder / "data", folder / "tmp", shared_memory()
        try:
            url, process = up(data, temporary, asked.model)
            with httpx.Client(base_url=url, timeout=150) as client, watched(process) as most_mib:
                calls = Calls(client)
                began_s = time.monotonic()
                trial(calls, asked.model, asked.calls, asked.seed)
                stateful(calls, asked.stateful, asked.seed)
                settled(client)
                took_s = time.monotonic() - began_s
                peak_mib = most_mib()
        finally:
            subprocess.run([COMMAND, "down", "--data", str(data)], check=False, stderr=subprocess.DEVNULL)
        processes, files = left_behind(folder, data, temporary, shared_before)
    statuses = ", ".join(f"{status}: {count:,}" for status, count in sorted(calls.statuses.items()))
    print(f"{calls.count:,} calls in {took_s:.0f} s ({statuses})")
    rows = [
        ("answers of 5xx", len(calls.faults), 0, calls.faults),
        ("answers over 1 s", len(calls.slow), len(calls.slow) if asked.smoke else 0, calls.slow),
        ("processes left", len(processes), 0, processes),
        ("files left", len(files), 0, files),
        ("service's memory, MiB", peak_mib, MOST_MIB, ()),
    ]
    for what, seen, allowed, which in rows:
        print(f"{what:<24} {seen:>6}   allowed {allowed}")
        for line in which[:20]:
            print(f"    {line}")
    print(f"slowest answer that is not computed: {calls.slowest_s:.2f} s")
    failed = sum(seen > allowed for _, seen, allowed, _ in rows)
    print(f"{len(rows)} bounds, {failed} did not hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
