"""What the policy's code cannot reach: secrets of the run, other processes, more disk than is its own.

Each protection is switched off by itself too, because a machine may lack it: what remains has to hold, or be said.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from confinement_probe import MARKER

from fakes.commands import USER, as_other_user
from rlhfless.rewards import confinement
from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.confinement import (
    CodeEnded,
    CodeTask,
    Measures,
    Protection,
    filters,
    protection_with,
    run_confined,
)
from rlhfless.spec import CodeSpec

PROBE = Path(__file__).with_name("confinement_probe.py")
SPEC = CodeSpec(type="code", timeout_s=60, cpu_s=20)

PR_GET_DUMPABLE = 3

OFF = dict.fromkeys(("namespaces", "landlock", "own_user", "filters"), False)
SETS = {
    "all": {},
    **{f"without {name}": {name: False} for name in OFF},
    "own_user alone": {**OFF, "own_user": True},
    "landlock alone": {**OFF, "landlock": True},
    "namespaces alone": {**OFF, "namespaces": True},
    "landlock and filters": {**OFF, "landlock": True, "filters": True},
    "none": OFF,
}

ROOT = os.getuid() == 0
FULL = ROOT and protection_with(Measures()).disk
"""Root that may mount: every protection can be had."""


def hunt(home, wrap, owner):
    """What the probe finds, by set of measures; and the paths that it looks for."""
    secrets = {
        "token": home / ".ray" / "auth_token",
        "key": home / ".ssh" / "id_ed25519",
        "store": home / "run" / "store.token",
        "public": home / "run" / "steps.jsonl",
    }
    for path in secrets.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # the probe writes it
        if ROOT:
            for part in (home, path.parent, path):
                os.chown(part, owner, owner)
    for folder in (home, home / "run"):
        folder.chmod(0o755)
    files = ":".join(map(str, secrets.values()))
    shell = ("sh", "-c", '"$@"; exit $?', "sh")  # one more process that has the secret
    command = wrap(*shell, sys.executable, str(PROBE), str(home), files, json.dumps(SETS))
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "SECRET": MARKER, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=home / "run", capture_output=True, timeout=280, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["uid"] == owner
    return answer, {name: str(path) for name, path in secrets.items()}


@pytest.fixture(scope="module")
def by_root():
    if not ROOT:
        pytest.skip("the tests are not run by root")
    with tempfile.TemporaryDirectory() as home:
        yield hunt(Path(home), lambda *command: command, 0)


@pytest.fixture(scope="module")
def by_other():
    with tempfile.TemporaryDirectory() as home:  # not below pytest's own folder, which only its user may enter
        yield hunt(Path(home), as_other_user, USER if ROOT else os.getuid())


def found_by(answer, name):
    result = answer["results"][name]
    assert result["output"] is not None, result["cause"]
    *found, last = result["output"].splitlines() or [""]
    assert last == "the end"
    return found, Protection(**result["held"])


PRIVATE = [name for name in SETS if name not in ("none", "own_user alone", "landlock alone")]


@pytest.mark.skipif(not FULL, reason="needs root with CAP_SYS_ADMIN, and Landlock")
@pytest.mark.parametrize("name", PRIVATE)
def test_code_run_by_root_finds_no_secret_and_changes_nothing(by_root, name):
    answer, _ = by_root
    found, held = found_by(answer, name)
    assert [line for line in found if not line.startswith("kill")] == []
    assert held.files
    assert held.environment
    if held.processes and held.user == "own":
        assert found == []


@pytest.mark.skipif(not FULL, reason="needs root with CAP_SYS_ADMIN, and Landlock")
def test_another_user_alone_keeps_root_s_secrets_and_says_what_it_cannot_keep(by_root):
    answer, secrets = by_root
    found, held = found_by(answer, "own_user alone")
    assert secrets["public"] in found
    assert not {secrets["token"], secrets["key"], secrets["store"]} & set(found)
    assert not [line for line in found if line.startswith(("/proc", "kill", "changed"))]
    assert (held.user, held.files, held.environment, held.disk) == ("own", False, True, False)


def test_without_any_protection_the_secrets_are_found_so_the_probe_can_find_them(by_other):
    answer, secrets = by_other
    found, held = found_by(answer, "none")
    assert set(secrets.values()) <= set(found)
    own, *others = answer["pids"]
    assert [f"/proc/{pid}/environ" for pid in others if f"/proc/{pid}/environ" in found]
    assert [held.files, held.environment, held.network, held.disk] == [False] * 4
    # The process that starts the tests has hidden itself.
    assert not {f"/proc/{own}/environ", f"/proc/{own}/mem"} & set(found)


@pytest.mark.parametrize("name", PRIVATE)
def test_code_run_by_another_user_finds_no_secret_where_it_is_said_to_find_none(by_other, name):
    answer, _ = by_other
    found, held = found_by(answer, name)
    lost = [line for line in found if not line.startswith("kill")]
    assert lost == [] or not (held.files and held.environment)
    if SETS[name].get("filters", True) and filters()[0] is not None:
        assert found == lost
    if FULL and name != "namespaces alone":  # user namespaces may be forbidden; this kernel has Landlock
        assert held.files


def test_landlock_alone_hides_contents_and_says_that_attributes_can_be_changed(by_other):
    if not protection_with(Measures(namespaces=False)).files:
        pytest.skip("this kernel has no Landlock")
    answer, _ = by_other
    found, held = found_by(answer, "landlock alone")
    assert [line for line in found if not line.startswith(("kill", "changed"))] == []
    assert [held.files, held.environment] == [False, True]


# -- the folder


FILL = "import os\nfor i in range(40):\n    open(f'f{i}', 'wb').write(os.urandom(2**20))\n    SLEEP\n"
MANY = "import os\nfor i in range(600):\n    os.mkdir(str(i))\n    if i > 200:\n        SLEEP\n"
UNNAMED = """
import os, tempfile
files = [tempfile.TemporaryFile(dir='.') for _ in range(40)]
for file in files:
    file.write(os.urandom(2**20)); file.flush()
    SLEEP
"""


@pytest.mark.parametrize("source", [FILL, MANY, UNNAMED])
@pytest.mark.parametrize("namespaces", [True, False])
def test_all_files_of_a_folder_count_together(monkeypatch, source, namespaces):
    limits = {"FOLDER_BYTES": 16 << 20, "FILE_BYTES": 4 << 20, "FOLDER_FILES": 200}
    for name, most in limits.items():
        monkeypatch.setattr(confinement, name, most)
    spec = CodeSpec(type="code", timeout_s=60, cpu_s=20)
    fits = "import os\nfor i in range(10):\n    open(f'f{i}', 'wb').write(os.urandom(2**20))\nprint('done')"
    measures = Measures(namespaces=namespaces)
    assert run_confined(CodeTask(fits), spec, measures).output == "done\n"
    # A file without a name is seen by looks only, so the code waits to be looked at.
    waiting = source.replace("SLEEP", "import time; time.sleep(0.02)") + "print('done', flush=True)\ntime.sleep(0.5)"
    ended = run_confined(CodeTask(waiting), spec, measures)
    if namespaces and protection_with(measures).disk:
        assert ended == CodeEnded(b"", "")  # no space left on the device
    elif source == MANY:
        assert ended == CodeEnded(b"", None, "the test's folder holds more than 200 files and folders")
    else:
        assert ended == CodeEnded(b"", None, "the test's folder holds more than 16 MiB")


def test_a_folder_that_outgrew_its_limit_within_one_look_is_no_pass(monkeypatch):
    monkeypatch.setattr(confinement, "FOLDER_FILES", 5)
    spec = CodeSpec(type="code", timeout_s=60)
    source = "for i in range(9): open(str(i), 'w')"
    ended = run_confined(CodeTask(source, token="passed"), spec, Measures(namespaces=False))
    assert ended.output is None
    assert ended.cause == "the test's folder holds more than 5 files and folders"


# -- processes


DAEMON = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        open('started', 'w').close()
        time.sleep(600)
    os._exit(0)
while not os.path.exists('started'):
    time.sleep(0.01)
print(os.getcwd(), flush=True)
"""


def processes_in(folder):
    """Processes that were started in a folder which may be removed by now."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            link = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        if link.startswith(folder):
            found.append(int(pid))
    return found


@pytest.mark.skipif(not ROOT, reason="only root's processes are not counted, and can be started without a filter")
@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("after", ["", "time.sleep(600)"])
def test_what_started_its_own_session_is_ended_where_there_is_no_filter(namespaces, after, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tests that run beside this one have folders of their own
    measures = Measures(namespaces=namespaces, own_user=False, filters=False)
    spec = CodeSpec(type="code", timeout_s=3 if after else 8)
    ended = run_confined(CodeTask(DAEMON + after), spec, measures)
    if after:
        assert ended.cause == "the test took longer than timeout_s (3 s)"
    else:
        assert ended.output.strip().startswith(str(tmp_path))
    assert processes_in(str(tmp_path)) == []


@pytest.mark.parametrize("filters", [True, False])
def test_how_the_program_ended_is_known(filters):
    measures = Measures(filters=filters)
    assert run_confined(CodeTask("exit(3)"), SPEC, measures).exit_code == 3
    assert run_confined(CodeTask("print(1)"), SPEC, measures).exit_code == 0
    assert run_confined(CodeTask("import os; os.abort()"), SPEC, measures).exit_code != 0


def test_a_change_of_user_does_not_let_a_test_outlive_its_worker(request):
    source = (
        "import sys\nfrom rlhfless.rewards.confinement import *\n"
        "code = 'import time, os; time.sleep(600)'\n"
        "run_confined(CodeTask(code), CodeSpec(type='code', timeout_s=600))\n"
    )
    folder = tempfile.mkdtemp()  # a killed worker leaves its test's folder behind
    request.addfinalizer(lambda: shutil.rmtree(folder))
    os.chmod(folder, 0o755)
    environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    worker = subprocess.Popen([sys.executable, "-c", source], env=environment)

    def children():
        tasks = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def eventually(what, longest_s=60):
        deadline = time.monotonic() + longest_s
        while not what() and time.monotonic() < deadline:
            time.sleep(0.05)
        return what()

    def confined():  # no new privileges: it has gone through
        return [pid for pid in children() if "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()]

    assert eventually(confined)
    time.sleep(1)  # into the code's sleep; too little would only make the test milder
    (pid,) = confined()
    worker.kill()
    worker.wait(60)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_other_processes_cannot_be_signalled_and_own_signals_work():
    source = """
import os, resource, signal, socket
def refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return True
print(refused(os.kill, os.getppid(), 0), refused(resource.prlimit, os.getppid(), resource.RLIMIT_CPU))
print(refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM), socket.socketpair()[0].type.name)
print(resource.prlimit(os.getpid(), resource.RLIMIT_CORE), flush=True)
signal.signal(signal.SIGUSR1, lambda *_: print("raised", flush=True))
signal.raise_signal(signal.SIGUSR1)
os.abort()
"""
    if filters()[0] is None:
        pytest.skip("this kernel has no filters")
    output = run_confined(CodeTask(source), SPEC).output
    assert output.splitlines() == ["True True", "True SOCK_STREAM", "(0, 0)", "raised"]


def test_a_worker_with_a_code_reward_hides_its_memory_and_environment():
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None)
        before = libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
        CodeReward(SPEC).prepare()
        os._exit(10 * before + libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10


# -- what is said


def test_all_that_is_missing_is_said_in_one_sentence():
    assert Protection("own", True, True, True, True, True).warnings() == []
    assert Protection("same", True, True, True, True, True).warnings() == []
    (warning,) = Protection("root", False, False, False, False, False).warnings()
    assert warning == (
        "code that the policy writes can reach the network, can start processes, can read and write all files that "
        "the run's user can, can read the environment variables of the run's processes and runs as root, without "
        "root's capabilities here: the kernel grants no more (docs/rewards.md, Code)"
    )
    (warning,) = Protection("own", True, True, True, True, False).warnings()
    assert "can fill its folder beyond 64 MiB or 1,024 files for up to 0.05 s before it is ended" in warning
