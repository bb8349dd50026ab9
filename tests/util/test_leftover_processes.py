"""What user code has started is found and killed by a variable that it inherits, whoever has adopted it."""

import os
import subprocess
import sys

import psutil

from rlhfless.util import processes, worker_process


def sleeping(value: str, name: str = "RLHFLESS_TEST_MARK") -> psutil.Process:
    """Start a process in a session of its own, whose parent has ended."""
    command = "setsid sleep 1234 </dev/null >/dev/null 2>&1 & echo $!"
    started = subprocess.run(command, shell=True, stdout=subprocess.PIPE, env={**os.environ, name: value}, check=True)
    process = psutil.Process(int(started.stdout))
    while process.name() != "sleep":  # its shell is of the same pid
        pass
    return process


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_processes_are_killed_by_their_variable():
    mine, other = sleeping("one"), sleeping("one-more")
    try:
        found = processes.started_with("RLHFLESS_TEST_MARK")
        assert (found[mine.pid], found[other.pid]) == ("one", "one-more")
        assert processes.kill_started_with("RLHFLESS_TEST_MARK", "one", 10.0)
        assert (is_running(mine), is_running(other)) == (False, True)
        assert processes.kill_started_with("RLHFLESS_TEST_MARK", "one", 10.0)
    finally:
        processes.kill_started_with("RLHFLESS_TEST_MARK", "one-more", 10.0)


FORKS = """
import os
while True:
    if len(os.listdir("/proc")) < 300 + int(os.environ["BEFORE"]):
        os.fork()
"""


def test_processes_that_start_others_all_the_time_are_all_killed():
    variables = {**os.environ, "RLHFLESS_TEST_MARK": "bomb", "BEFORE": str(len(os.listdir("/proc")))}
    bomb = subprocess.Popen([sys.executable, "-S", "-E", "-c", FORKS], env=variables, start_new_session=True)
    while len(processes.started_with("RLHFLESS_TEST_MARK")) < 20:
        assert bomb.poll() is None
    assert processes.kill_started_with("RLHFLESS_TEST_MARK", "bomb", 60.0)
    assert bomb.wait(10) == -9


def test_a_worker_kills_what_those_of_ended_parents_have_left():
    code = "from rlhfless.util import processes; print(processes.identity())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    own = processes.identity()
    assert (processes.is_gone(ended), processes.is_gone(own), processes.is_gone("odd")) == (True, False, False)
    assert not processes.is_gone("1-" + ended.partition("-")[2]), "another pid namespace"
    left, kept = sleeping(f"{ended}-1", worker_process.MARK), sleeping(f"{own}-1", worker_process.MARK)
    try:
        worker_process._kill_orphans()
        assert (is_running(left), is_running(kept)) == (False, True)
    finally:
        processes.kill_started_with(worker_process.MARK, f"{own}-1", 10.0)
