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
    """Limits on clients' requests."""

    body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    """Maximum size of a request body. A spec with its prompts by path takes a few KiB; reward trials may take some
    MiB."""
    requests_per_minute: Annotated[int, Field(ge=1)] = 60_000
    """Maximum rate per key or per address: far more than a page and its streams need, and too few to starve runs."""
    streams: Annotated[int, Field(ge=1)] = 1_000
    """Maximum number of open event streams."""


class Quota(SpecModel):
    """Devices of the runs of one API key."""

    max_devices: Annotated[int, Field(ge=1)] | None = None
    """Most devices that they may have together."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of the devices, relative to those of the other keys that have runs. What others leave is borrowed, and
    returned first."""


class Retention(SpecModel):
    """How long ended runs are kept."""

    days: Annotated[float, Field(gt=0)] | None = None
    """Days after which an ended run is removed with its folder. By default only DELETE removes it."""


class ServiceSettings(SpecModel):
    """The settings of one service. All its files are in its data folder, except a database with its own URL."""

    data: str = DATA_FOLDER
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0 selects any free port."""
    database: str | None = None
    """`postgresql://user:password@host/name`; by default SQLite in the data folder."""
    ray_address: str | None = None
    """A Ray cluster: `host:port` of one that includes this machine as a node, or http://head:8265, the job API of a
    remote cluster. In a remote cluster the runs' drivers are jobs, which need the runs' folder at the same path and
    reach the service at `public_url`. By default the service starts a cluster on this machine, reachable only from this
    machine."""
    ray_cluster: str | None = None
    """In Kubernetes: name of the RayCluster in the service's namespace. The status of runs that wait for devices then
    names the cluster's pending pods and the reasons, and terminating worker pods are drained."""
    watch_nodes: bool = False
    """With `ray_cluster`: also drain worker pods whose node is cordoned or has a taint that announces its removal.
    Needs the right to list the cluster's nodes."""
    capacity: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Most devices that runs may hold together, by kind, where a cluster autoscaler adds nodes. By default those that
    the cluster has now."""
    quotas: dict[str, Quota] = Field(default_factory=dict)
    """Quotas of devices by the name of an API key."""
    max_drivers: Annotated[int, Field(ge=1)] = 4
    """Maximum number of runs with a driver at a time; others are queued. A driver takes about 1 GiB of host memory."""
    driver_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory limit of a driver; a run that needs more ends. The default is a quarter of the memory of the driver's
    machine or container, at least 4 GiB, in addition to the memory of its program."""
    sizes: SizesSpec = MOST_SIZES
    """The largest runs that a spec may request, regardless of its own `sizes`."""
    roots: tuple[str, ...] = ()
    """Folders and URL prefixes below which a spec may name files, in addition to the data folder."""
    code: tuple[str, ...] = ()
    """Packages whose classes and functions a spec may name (`mine` allows `mine.rewards:score`)."""
    http_hosts: tuple[str, ...] = ()
    """Loopback and link-local hosts, as `host:port`, that HTTP rewards may reach nevertheless."""
    trust_remote_code: bool = False
    """Whether a spec may run code that comes with a model."""
    engine_extra: bool = False
    """Whether a spec may pass additional, unchecked arguments to vLLM."""
    allow_hub: bool = True
    """Whether a spec may name models and data sets of the hub."""
    public_url: str | None = None
    """URL at which clients and drivers reach the service, if it differs from the service's own address."""
    requests: LimitsOfRequests = LimitsOfRequests()
    retention: Retention = Retention()

    @property
    def elsewhere(self) -> bool:
        """Whether the Ray cluster is reached only through its job API."""
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
