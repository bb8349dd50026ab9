"""A PostgreSQL server for a single test."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

USER = "rlhfless"


def binaries() -> Path | None:
    """Return the folder of the server's programs; None if it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    return Path(program).parent if program else None


class Postgres:
    """A server in a folder that the server's user can access."""

    def __init__(self, folder: Path) -> None:
        found = binaries()
        assert found is not None
        self._bin, self._data = found, folder / "data"
        # The server refuses to run as root.
        self._as = ["runuser", "-u", "postgres", "--"] if getpass.getuser() == "root" else []
        if self._as:
            shutil.chown(folder, "postgres")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._call("initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self._call("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "runs")

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/runs"

    def _call(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._bin / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/", timeout=60)

    def start(self) -> None:
        options = ["-D", str(self._data), "-p", str(self.port), "-h", "127.0.0.1", "-k", "", "-F"]
        command = [*self._as, str(self._bin / "postgres"), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True
        )
        end = time.monotonic() + 60
        while True:
            try:
                self._call("pg_isready", "-h", "127.0.0.1", "-p", str(self.port))
                return
            except subprocess.CalledProcessError:
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server at once, which breaks connections."""
        postmaster = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        os.kill(postmaster, signal.SIGQUIT)
        assert self._process is not None
        self._process.wait(30)
