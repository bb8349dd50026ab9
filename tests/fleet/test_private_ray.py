"""Files of a private Ray are readable only by its user, whatever the length of its path, and are removed at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes.commands import as_other_user
from rlhfless.fleet import private_ray
from rlhfless.util.folders import NotPrivate

REWARD = "def score(**_): return 1.0\n"

HOST = """
import asyncio, sys
from pathlib import Path
from rlhfless.fleet.cluster import Cluster
from rlhfless.spec import PlacementSpec

async def main():
    cluster = await Cluster.start(PlacementSpec(), Path(sys.argv[1]))
    print(cluster.address, flush=True)
    sys.stdin.readline()
    await cluster.stop()

asyncio.run(main())
"""

RUN = """
import sys
from pathlib import Path
import ray
from rlhfless.fleet import ray_session

ray_session.join(sys.argv[1], Path(sys.argv[2]))
where = ray.remote(lambda: __import__("travelling").__file__)
print(ray.get(where.remote(), timeout=120), flush=True)
sys.stdin.readline()
"""

ATTACK = """
import os, sys
from pathlib import Path
module = Path(sys.argv[1])
try:
    module.parent.rename(module.parent.with_name("aside"))
    module.parent.mkdir()
    module.write_text("def score(**_): return os.getuid()")
except OSError as error:
    print(type(error).__name__)
else:
    print("replaced")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that all users can enter, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_short_path_is_used_as_it_is_and_a_long_one_by_a_link(open_folder: Path) -> None:
    assert private_ray.make(open_folder) == open_folder / "ray" / "session"
    assert (open_folder / "ray").stat().st_mode & 0o7777 == 0o700
    long = open_folder / ("long" * 20)
    given = private_ray.make(long)
    assert len(os.fsencode(given / private_ray.LONGEST_SOCKET)) <= private_ray.SOCKET_BYTES
    assert given.resolve() == long / "ray" / "session"
    assert given.parent.stat().st_mode & 0o7777 == 0o700
    again = private_ray.make(long)
    assert not given.parent.exists()
    private_ray.remove(long)
    private_ray.remove(long)
    assert not again.parent.exists()
    assert list(long.iterdir()) == []


def test_a_path_that_nothing_makes_short_is_said(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_ray, "SOCKET_BYTES", 80)
    with pytest.raises(NotPrivate, match=r"too long for Ray's sockets.* a path of at most 4 bytes"):
        private_ray.make(open_folder)


def test_a_place_where_any_user_can_put_another_folder_is_refused(open_folder: Path) -> None:
    open_folder.chmod(0o777)
    with pytest.raises(NotPrivate, match=r"any user can replace files in .* \(mode 0777\)"):
        private_ray.make(open_folder / "data")
    assert not (open_folder / "data").exists()


@contextmanager
def asked(script: str, *words: object, **environment: str) -> Iterator[str]:
    """Start a script and yield the line that it prints; at the end of the block, let it finish."""
    command = [sys.executable, "-c", script, *map(str, words)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, umask=0o022, env=os.environ | environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            assert process.wait(60) == 0


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_another_user_cannot_change_the_code_that_ray_runs(open_folder: Path) -> None:
    code, data, shared = (open_folder / name for name in ("code", "data" * 20, "tmp"))
    code.mkdir()
    (code / "travelling.py").write_text(REWARD)
    shared.mkdir()
    shared.chmod(0o1777)
    with asked(HOST, data, TMPDIR=str(shared)) as address, asked(RUN, address, code, RAY_AUTH_MODE="token") as file:
        module = Path(file)
        assert module.read_text() == REWARD
        assert "runtime_resources" in str(module)
        assert module.resolve().is_relative_to(data / "ray")
        assert (data / "ray").stat().st_mode & 0o7777 == 0o700, "Ray opens those below it whenever a worker starts"
        assert [path for path in shared.iterdir() if path.stat().st_mode & 0o077] == []
        attack = as_other_user(sys.executable, "-c", ATTACK, str(module))
        done = subprocess.run(attack, capture_output=True, text=True, timeout=60)
        assert done.stdout == "PermissionError\n", done.stderr
    assert not module.exists()
    assert list(data.iterdir()) == []
