"""The settings of a service, and its data folder."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from rlhfless.spec import SizesSpec
from rlhfless.spec.base import MOST_SIZES, SpecModel
from rlhfless.util.folders import OTHERS, NotPrivate, home, private, require_safe_place

DATA_FOLDER = "rlhfless-data"
DATABASE_FILE = "service.sqlite"
SERVICE_FILE = "service.json"
"""File with the service's address, for its drivers and the command line."""

DATABASE_VARIABLE = "RLHFLESS_DATABASE"
"""Environment variable with the database URL, including its password. Alternative to --database."""

SECRETS = (DATABASE_VARIABLE, "PGPASSWORD", "PGPASSFILE", "RLHFLESS_API_KEY")
"""Environment variables that only the service gets."""


LOW_PRIORITY = ("nice", "-n", "5")
"""Command prefix for the processes of runs. The lower priority leaves cores to the service for the milliseconds that an
answer takes, and runs lose nothing because all their processes have the same priority."""


def environment_of_runs() -> dict[str, str]:
    """Return the environment of drivers and of the service's Ray."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


class LimitsOfRequests(SpecModel):
    """Bounds on the requests of clients."""

    body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """Largest body of a request. A spec with its prompts by path is a few KiB; rewards may be tested on some MiB."""
    requests_per_minute: Annotated[int, Field(ge=1)] = 60_000
    """Requests of one key, or one address: far more than a page and its streams need, and too few to starve runs."""
    streams: Annotated[int, Field(ge=1)] = 1_000
    """Most open event streams."""


class Retention(SpecModel):
    """How long ended runs are kept."""

    days: Annotated[float, Field(gt=0)] | None = None
    """An ended run, with its folder, is removed so long after its end. By default only DELETE removes it."""


class ServiceSettings(SpecModel):
    """The settings of one service. All its files are in its data folder, but for a database with a URL of its own."""

    data: str = DATA_FOLDER
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0: any that is free."""
    database: str | None = None
    """`postgresql://user:password@host/name`; by default SQLite in the data folder."""
    ray_address: str | None = None
    """A Ray cluster: `host:port` of one that this machine is a node of, or http://head:8265, the job interface of one
    elsewhere, in which the runs' drivers then are jobs (they find the runs' folder at the same path, and the service at
    `public_url`). By default the service starts one on this machine, which only this machine can reach."""
    ray_cluster: str | None = None
    """In Kubernetes: name of the RayCluster in the service's namespace. The status of runs that wait for devices then
    names its pods that are pending, and why; and worker pods that end are left."""
    watch_nodes: bool = False
    """With `ray_cluster`: also leave worker pods whose node is cordoned, or has a taint that says that it is about to
    go. Needs the right to list the cluster's nodes."""
    capacity: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Devices that runs may hold together, by kind. By default all that the cluster has now; name more where a cluster
    autoscaler brings nodes."""
    max_drivers: Annotated[int, Field(ge=1)] = 4
    """Runs with a driver at a time; others are queued. A driver takes about a gigabyte of host memory."""
    driver_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory that a driver may have; a run that needs more ends. By default a quarter of what the machine or container
    has that the driver is on, and at least 4 GiB, beyond what its program takes."""
    sizes: SizesSpec = MOST_SIZES
    """The largest runs that a spec may ask for, whatever its own `sizes` are."""
    roots: tuple[str, ...] = ()
    """Folders, and URL prefixes, that a spec may name files in, beside the data folder."""
    code: tuple[str, ...] = ()
    """Packages that a spec may name classes and functions of (`mine` allows `mine.rewards:score`)."""
    http_hosts: tuple[str, ...] = ()
    """Loopback and link-local hosts, as `host:port`, that HTTP rewards may reach all the same."""
    trust_remote_code: bool = False
    """Whether a spec may run code that comes with a model."""
    engine_extra: bool = False
    """Whether a spec may give vLLM further arguments, which are passed on unchecked."""
    allow_hub: bool = True
    """Whether a spec may name models and data sets of the hub."""
    public_url: str | None = None
    """Under which clients and drivers reach the service, where that is not its own address."""
    requests: LimitsOfRequests = LimitsOfRequests()
    retention: Retention = Retention()

    @property
    def elsewhere(self) -> bool:
        """The Ray cluster is reached by its job interface alone."""
        return (self.ray_address or "").startswith(("http://", "https://"))

    @property
    def folder(self) -> Path:
        return Path(self.data).absolute()

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


OF_A_SERVICE = frozenset({DATABASE_FILE, SERVICE_FILE, "service.lock", "service.log", "ray.json", "runs"})
"""Names in a service's data folder, including those from before data folders were private."""


def open_data(settings: ServiceSettings) -> Path:
    """Return the private data folder, created if missing.

    Raises NotPrivate if it cannot be made private, or if it is a shared folder with other files, whose mode stays.
    """
    folder = settings.folder
    require_safe_place(folder)
    if folder.is_dir():
        status, names = folder.stat(), set(os.listdir(folder))
        if status.st_mode & OTHERS and names - {"lost+found"} and not names & OF_A_SERVICE:
            raise NotPrivate(
                f"{folder} cannot be the data folder: other users can enter it (mode "
                f"{stat.S_IMODE(status.st_mode):04o}), and it has other files; name a folder of its own with --data, "
                f"or `chmod 700 {folder}`"
            )
        if os.path.ismount(folder) and status.st_uid != os.getuid():
            return folder  # a volume, such as a pod's: access is controlled where it is mounted
    return private(folder)


def read_announcement(data: str | Path) -> dict[str, Any] | None:
    """Return `url` and `pid` as announced by a service of the data folder; None if none has started there."""
    try:
        values: dict[str, Any] = json.loads((Path(data) / SERVICE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return values


def address_of(settings: ServiceSettings) -> str | None:
    """Return the address of the running service of a data folder; None if none is running."""
    service = read_announcement(settings.folder)
    return str(service["url"]) if service is not None and psutil.pid_exists(service["pid"]) else None


def default_roots() -> tuple[str, ...]:
    """Return the current folder and the folder of bundled models."""
    return (str(Path.cwd()), str(home()))
