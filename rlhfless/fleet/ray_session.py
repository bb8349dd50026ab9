"""The only Ray session of this process: a private Ray on loopback, or a joined cluster.

The APIs of Ray and Serve start a Ray instance implicitly if there is none. A late call, such as a deletion after the
end of the run, would thus start a second instance that is never stopped. Therefore only this module starts Ray, and
`ray.init` raises NoRay afterwards.

A private Ray serves only this run: it listens on loopback, and requires a token that only the user can read. The
administrator of a joined cluster decides on which addresses it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants, worker
from ray.exceptions import RayError

from rlhfless.fleet.private_ray import FOLDER, remove
from rlhfless.functions.loopback import is_loopback
from rlhfless.spec import PlacementSpec
from rlhfless.util.errors import UserError
from rlhfless.util.signals import hangups_blocked

T = TypeVar("T")

log = logging.getLogger(__name__)

REACH_S = 10.0
"""Timeout for a connection to a cluster's port. Ray itself would retry for a quarter of an hour. START_S is the timeout
for Ray to start, or to accept this process."""

START_S = 180.0

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_FOLDER = ".ray"
TOKEN_FILE = "auth_token"

SIGACTION_BYTES = 1024
"""Larger than `struct sigaction` on any system."""

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}

_init = ray.init


class NoCluster(UserError):
    """There is no usable cluster: none answers at the address, or joining it is not safe."""


class NoRay(RuntimeError):
    """A call would have started a second Ray instance, after the run's Ray had ended."""


async def started(start: Callable[[], T], address: str | None, folder: Path) -> T:
    """Run `start`, which starts a session, in its own thread, and return its result. `folder`: files of a private Ray.

    Raises NoCluster after START_S, and abandons the thread, in which Ray may still be trying. If the start of a private
    Ray is cancelled, wait for it and then stop Ray, because a start cannot be interrupted.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    results: list[T | Exception] = []

    def attempt() -> None:
        hangups_blocked()
        try:
            results.append(start())
        except Exception as error:
            results.append(error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(done.set)
        # Keep the thread: the kernel ends Ray's processes with the thread that started them (PR_SET_PDEATHSIG).
        threading.Event().wait()

    threading.Thread(target=attempt, name="start-ray", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), START_S)
    except TimeoutError:
        where = f"at placement.ray_address {address!r} to let this run in" if address else "to start on this machine"
        logs = "" if address else f"; see the logs in {folder / FOLDER}"
        raise NoCluster(f"waited {START_S:.0f} s for Ray {where}{logs}") from None
    except asyncio.CancelledError:
        if not address:
            await asyncio.wait_for(done.wait(), START_S)
            await asyncio.to_thread(end)
            await asyncio.to_thread(remove, folder)
        raise
    if isinstance(results[0], ConnectionError):
        raise NoCluster(f"no Ray cluster at placement.ray_address {address!r}: {results[0]}") from results[0]
    if isinstance(results[0], RayError):  # for example, its head was replaced while this process joined
        raise NoCluster(f"Ray did not let this run in: {type(results[0]).__name__}: {results[0]}") from results[0]
    if type(results[0]) is Exception:  # raised by Ray if one of its processes does not start in time
        raise NoCluster(
            f"Ray did not start: {results[0]} See the logs in {folder / FOLDER}, and start again."
        ) from results[0]
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


async def reach(address: str) -> None:
    """Raise NoCluster if nothing listens at `host:port`. Ray checks other forms of addresses itself."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), REACH_S)
    except (OSError, TimeoutError, OverflowError) as error:
        raise NoCluster(
            f"no Ray cluster answers at placement.ray_address {address!r} ({error or type(error).__name__}); start it "
            "there (`ray start --head --port=...`), or leave the key out for a private one"
        ) from error
    writer.close()


def require_token(spec: PlacementSpec, environment: Mapping[str, str]) -> None:
    """Raise NoCluster if the run would join a cluster that other machines can reach without a token."""
    address, mode = spec.ray_address or "", environment.get(AUTH_MODE, "")
    host = address.removeprefix("ray://").rpartition(":")[0]
    if not host and address not in ("auto", "local"):
        raise NoCluster(f"placement.ray_address {address!r} has no port; write HOST:PORT, such as '{address}:6379'")
    if mode.lower() != "disabled" or is_loopback(host) or spec.trusted_network:
        return
    raise NoCluster(
        f"{AUTH_MODE} is {mode!r}, and placement.ray_address {address!r} is not on loopback: whatever reaches its "
        f"ports can run code there. Set {AUTH_MODE}=token, with the cluster's token in RAY_AUTH_TOKEN or in "
        "the file that RAY_AUTH_TOKEN_PATH names; or, where the network is closed to all others, set "
        "`placement.trusted_network: true`"
    )


def join(address: str, code: Path | None = None) -> None:
    """Connect this process to a cluster. `code`: working directory for all processes of the run. Raises ConnectionError
    if there is no cluster."""
    environment: dict[str, Any] = {} if code is None else {"runtime_env": {"working_dir": str(code)}}
    with _own_handler(), _known_by_loopback() if _only_on_loopback(address) else contextlib.nullcontext():
        _init(address=address, **environment, **_QUIET)
    _after_start()


def start_private(folder: Path, cores: int) -> None:
    """Start Ray on this machine, unreachable from other machines and for other users, with its files in `folder`
    (rlhfless.fleet.private_ray), `cores` CPU cores, and all GPUs that it finds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The default is a folder with a guessable name below /tmp, and it contains code.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    # Ray's default is niceness 15; here the workers are the run itself, so give them normal priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Without the variable Ray requires a token; "disabled" may come from the environment of another cluster.
    os.environ.pop(AUTH_MODE, None)
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        private_token(Path.home())
    with _own_handler(), _known_by_loopback():
        _init(address="local", include_dashboard=False, num_cpus=cores, _temp_dir=str(folder), **_QUIET)
    _after_start()


def end() -> None:
    """Leave the cluster; a private one stops with all its processes."""
    # Serve's callbacks for calls in progress would log stack traces, because Ray is gone.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    ray.shutdown()


def is_lost() -> bool:
    """Return whether any process of a private Ray has ended, such as by a signal to its process group."""
    node = worker._global_node
    return node is None or bool(node.dead_processes())


def private_token(home: Path) -> Path:
    """Return the file of Ray's token; create it if missing, and make it readable only by the user, because the token
    allows running code. Raises NoCluster if that fails."""
    file = home / TOKEN_FOLDER / TOKEN_FILE
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            _write_token(file)
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            file.chmod(0o600)
    except OSError as error:
        raise NoCluster(
            f"Ray's token {str(file)!r} could not be made a file that the user alone can read ({error}); correct that, "
            "or set RAY_AUTH_TOKEN to a secret text"
        ) from error
    return file


def _write_token(file: Path) -> None:
    descriptor, new = tempfile.mkstemp(dir=file.parent)  # mode 0600, whatever the umask
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # another run has created it meanwhile
        os.link(new, file)
    os.unlink(new)


@contextmanager
def _own_handler() -> Iterator[None]:
    """Restore this process's SIGTERM handler after the block: Ray's core sets one that prints a stack trace and aborts
    the process three seconds later. Uses libc, because Python sets handlers only in its main thread."""
    sigaction, saved = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(SIGACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, saved)
    try:
        yield
    finally:
        sigaction(int(signal.SIGTERM), saved, None)


def _only_on_loopback(address: str) -> bool:
    """Return whether a cluster listens only on loopback of this machine. Ray would look for it at the machine's network
    address."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not is_loopback(host):
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), REACH_S).close()
    except OSError:
        return True
    return False


@contextmanager
def _known_by_loopback() -> Iterator[None]:
    """Make Ray use the loopback address for its node within the block, so that its processes listen there. On Linux,
    Ray would otherwise use the network address, even if given 127.0.0.1."""
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    outside = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if outside is None:
            del os.environ[name]
        else:
            os.environ[name] = outside


def _after_start() -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    ray.init = _refused
    errors_to_log()


def _refused(*_: Any, **__: Any) -> Any:
    raise NoRay("the Ray of this run has ended, and nothing may start another")


def errors_to_log() -> None:
    """Redirect Ray's messages about dead workers to the log. Ray prints them to standard output and ignores
    `log_to_driver` (`listen_error_messages` in ray/_private/worker.py)."""

    def to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 (Ray's signature)
        for line in data["lines"]:
            log.info("%s: %s", data["pid"], line)

    worker.print_to_stdstream = to_log
