"""Signals, sent to a process that stands in for a run: each phase, and each number of signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fakes.repository import SCENARIOS

# What a run does with its signals: orderly work that `{work}` says, and a clean-up that `{clean_up}` says. It starts a
# process that ignores SIGTERM, and that one another in a session of its own, as Ray, vLLM and reward workers do.
RUN = """
import asyncio, pathlib, signal, subprocess, sys, time
from rlhfless.util.signals import Interrupted, OrderlyStop

NESTED = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
OUTER = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    f"subprocess.Popen([sys.executable, '-c', {{NESTED!r}}], start_new_session=True);"
    "print('children', flush=True); time.sleep(600)"
)

def say(text):
    print(text, flush=True)

async def compute():
    while True:
        pass

async def main():
    if {children}:
        await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", OUTER])
        while "children" not in pathlib.Path("log").read_text():
            await asyncio.sleep(0.01)
    say("working")
    try:
        {work}
    finally:
        {clean_up}
        say("cleaned up")
    return "done"

stop = OrderlyStop({grace_s}, say, lambda: pathlib.Path("removed").touch())
try:
    say(stop.run(main()))
except Interrupted as interrupted:
    say("interrupted")
    sys.exit(interrupted.exit_code)
"""

FOREVER = "await asyncio.sleep(600)"


class Process:
    def __init__(self, program: list[str], folder: Path) -> None:
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                program,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 60
        while text not in self.text:
            assert self.popen.poll() is None, self.text
            assert time.monotonic() < end, f"{text!r} did not come:\n{self.text}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def ends(self) -> int:
        return self.popen.wait(timeout=60)


@contextmanager
def started(program: list[str], folder: Path) -> Iterator[Process]:
    process = Process(program, folder)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


@contextmanager
def run(
    folder: Path, work: str = FOREVER, clean_up: str = "pass", grace_s: float = 600, children: bool = False
) -> Iterator[Process]:
    program = RUN.format(work=work, clean_up=clean_up, grace_s=grace_s, children=children)
    with started([sys.executable, "-c", program], folder) as process:
        yield process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_stops_in_order(number: int, code: int, tmp_path: Path) -> None:
    with run(tmp_path) as process:
        process.wait_for("working")
        process.send(number)
        assert process.ends() == code
        assert f"{signal.Signals(number).name}: shutting down, for at most 600 s" in process.text
        assert process.text.split()[-3:] == ["cleaned", "up", "interrupted"]
        assert not (tmp_path / "removed").exists()


def test_a_closed_terminal_stops_in_order_however_often_it_says_so(tmp_path: Path) -> None:
    """The kernel and the shell both send SIGHUP; the third signal of a person would end everything at once."""
    clean_up = "say('cleaning')\n        while not pathlib.Path('go').exists(): await asyncio.sleep(0.01)"
    with run(tmp_path, clean_up=clean_up) as process:
        process.wait_for("working")
        process.send(signal.SIGHUP)
        process.wait_for("cleaning")
        for _ in range(3):
            process.send(signal.SIGHUP)
            time.sleep(0.05)
        (tmp_path / "go").touch()
        assert process.ends() == 129
        assert "cleaned up" in process.text
        assert "one more signal" not in process.text


def test_a_run_under_nohup_goes_on(tmp_path: Path) -> None:
    work = "while not pathlib.Path('go').exists(): await asyncio.sleep(0.01)"
    program = RUN.format(work=work, clean_up="pass", grace_s=600, children=False)
    with started(["nohup", sys.executable, "-c", program], tmp_path) as process:
        process.wait_for("working")
        process.send(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert process.ends() == 0
        assert "shutting down" not in process.text


def test_processes_of_rays_thread_outlive_a_closed_terminal(tmp_path: Path) -> None:
    """Ray's processes are in the run's process group, to which the kernel sends SIGHUP."""
    program = (
        "import subprocess, sys, threading, time; from rlhfless.util.signals import hangups_blocked\n"
        "def start():\n"
        "    hangups_blocked()\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    print('child', child.pid, flush=True)\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join(); time.sleep(600)"
    )
    with started([sys.executable, "-c", program], tmp_path) as process:
        process.wait_for("child ")
        child = psutil.Process(int(process.text.split()[1]))
        try:
            child.send_signal(signal.SIGHUP)
            process.send(signal.SIGHUP)
            assert process.ends() == -signal.SIGHUP  # the thread alone blocks it
            assert child.is_running()
            assert child.status() != psutil.STATUS_ZOMBIE
        finally:
            child.kill()


def test_a_second_signal_does_not_break_the_clean_up(tmp_path: Path) -> None:
    """`timeout` and shells pass the same signal on twice."""
    clean_up = "say('cleaning')\n        while not pathlib.Path('go').exists(): await asyncio.sleep(0.01)"
    with run(tmp_path, clean_up=clean_up) as process:
        process.wait_for("working")
        process.send(signal.SIGTERM)
        process.wait_for("cleaning")
        process.send(signal.SIGINT)
        process.wait_for("one more signal kills all processes at once")
        (tmp_path / "go").touch()
        assert process.ends() == 143
        assert "cleaned up" in process.text


@pytest.mark.parametrize("busy", ["for _ in iter(int, 1): pass", "await asyncio.gather(asyncio.sleep(600), compute())"])
def test_a_run_that_computes_without_end_is_broken_off(busy: str, tmp_path: Path) -> None:
    """Its event loop hears no signal: it builds a list of 2^31 samples, for example."""
    with run(tmp_path, work=busy) as process:
        process.wait_for("working")
        process.send(signal.SIGTERM)
        process.wait_for("SIGTERM: shutting down")
        assert process.ends() == 143
        assert process.text.split()[-3:] == ["cleaned", "up", "interrupted"]


def test_a_fault_of_the_clean_up_is_no_other_ending(tmp_path: Path) -> None:
    with run(tmp_path, clean_up="raise OSError('Ray is gone')") as process:
        process.wait_for("working")
        process.send(signal.SIGTERM)
        assert process.ends() == 143
        assert "interrupted" in process.text


def test_a_run_that_was_done_is_done(tmp_path: Path) -> None:
    with run(tmp_path, work="pass") as process:
        assert process.ends() == 0
        assert "done" in process.text


@pytest.mark.parametrize("hangs", ["await asyncio.sleep(600)", "time.sleep(600)"])
def test_the_third_signal_ends_everything_at_once(hangs: str, tmp_path: Path) -> None:
    """Also a clean-up that blocks the event loop."""
    with run(tmp_path, clean_up=f"say('hanging'); {hangs}", children=True) as process:
        process.wait_for("working")
        found = psutil.Process(process.popen.pid).children(recursive=True)
        assert len(found) == 2
        process.send(signal.SIGTERM)
        process.wait_for("hanging")
        process.send(signal.SIGTERM)
        time.sleep(0.2)  # signals of one number that are not delivered yet are one
        process.send(signal.SIGINT)
        assert process.ends() == 143
        assert "stopped at once" in process.text
        assert (tmp_path / "removed").exists()
        _, alive = psutil.wait_procs(found, timeout=60)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("hangs", ["await asyncio.sleep(600)", "time.sleep(600)"])
def test_a_stop_that_takes_too_long_is_ended(hangs: str, tmp_path: Path) -> None:
    with run(tmp_path, clean_up=f"say('hanging'); {hangs}", grace_s=0.5, children=True) as process:
        process.wait_for("working")
        found = psutil.Process(process.popen.pid).children(recursive=True)
        process.send(signal.SIGINT)
        assert process.ends() == 130
        assert "the stop took longer than 0.5 s" in process.text
        assert (tmp_path / "removed").exists()
        _, alive = psutil.wait_procs(found, timeout=60)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


# The command itself, held in a phase that has no event loop.
COMMAND = """
import sys, time
from rlhfless.cli import main
from rlhfless.{module} import {function} as _
import rlhfless.{module} as module

def hold(*_, **__):
    try:
        print("working", flush=True)
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)

module.{function} = hold
sys.argv = ["rlhfless", *sys.argv[1:]]
main.main()
"""


@pytest.mark.parametrize(
    ("module", "function", "arguments", "number", "code"),
    [
        ("planning.preflight", "preflight", ["run", "{spec}"], signal.SIGTERM, 143),
        pytest.param(
            "planning.preflight", "preflight", ["validate", "{spec}"], signal.SIGINT, 130, marks=pytest.mark.long
        ),
        ("sim.experiment.compare", "compare", ["simulate", "{scenario}"], signal.SIGINT, 130),
        ("sim.experiment.compare", "compare", ["simulate", "{scenario}"], signal.SIGHUP, 129),
        pytest.param(
            "prepare.reward_trial",
            "try_rewards",
            ["rewards", "test", "{spec}", "{spec}"],
            signal.SIGTERM,
            143,
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_command_ends_with_the_signals_own_code(
    module: str, function: str, arguments: list[str], number: int, code: int, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: {path: m}\nprompts: {path: p.jsonl}\nrewards:\n- type: exact_match\n")
    scenario = SCENARIOS / "gsm8k-3b-h100.yaml"
    typed = [argument.format(spec=spec, scenario=scenario) for argument in arguments]
    with started([sys.executable, "-c", COMMAND.format(module=module, function=function), *typed], tmp_path) as process:
        process.wait_for("working")
        process.send(number)
        assert process.ends() == code, process.text
        assert "cleaned up" in process.text
        assert "Traceback" not in process.text


def test_a_second_signal_on_the_way_out_changes_nothing(tmp_path: Path) -> None:
    """Two Ctrl-C before a run has its own handlers: the second one ended the interpreter with a traceback."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("model: {path: m}\nprompts: {path: p.jsonl}\nrewards:\n- type: exact_match\n")
    last = "import atexit, time\natexit.register(lambda: (print('leaving', flush=True), time.sleep(1)))\n"
    program = last + COMMAND.format(module="planning.preflight", function="preflight")
    with started([sys.executable, "-c", program, "run", str(spec)], tmp_path) as process:
        process.wait_for("working")
        process.send(signal.SIGINT)
        process.wait_for("leaving")
        process.send(signal.SIGINT)
        assert process.ends() == 130, process.text
        assert "Traceback" not in process.text


def test_workers_of_a_simulation_end_with_it(tmp_path: Path) -> None:
    """Those that are at work are not waited for: SIGTERM reaches the command alone."""
    scenario = SCENARIOS / "gsm8k-3b-h100.yaml"
    program = [str(Path(sys.executable).with_name("rlhfless")), "simulate", str(scenario), "--jobs", "2"]
    with started([*program, "--out", str(tmp_path / "out")], tmp_path) as process:
        parent = psutil.Process(process.popen.pid)
        end = time.monotonic() + 60
        while len(workers := [p for p in parent.children() if "spawn_main" in " ".join(p.cmdline())]) < 2:
            assert process.popen.poll() is None, process.text
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send(signal.SIGTERM)
        assert process.ends() == 143
        assert "Traceback" not in process.text
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
