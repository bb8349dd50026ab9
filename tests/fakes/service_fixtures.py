"""Fixtures of a service with fake drivers and Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fakes.fake_service import NoDrivers, served, there_is_ray
from rlhfless.control.service import Service
from rlhfless.control.settings import ServiceSettings


@pytest.fixture
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> ServiceSettings:
    """Return the service's settings. A test that lowers `sizes` passes them as parameter."""
    given = {"sizes": request.param} if hasattr(request, "param") else {}
    return ServiceSettings(data=str(tmp_path / "data"), port=0, roots=(str(tmp_path),), **given)


@pytest.fixture
def drivers() -> NoDrivers:
    return NoDrivers()


@pytest.fixture
def service(settings: ServiceSettings, drivers: NoDrivers) -> Iterator[tuple[httpx.Client, Service]]:
    there_is_ray(settings.folder)
    with served(settings, drivers) as pair:
        yield pair


@pytest.fixture
def client(service: tuple[httpx.Client, Service]) -> httpx.Client:
    return service[0]


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of one service for all tests of a module that leave it unchanged, because a start takes longer
    than these tests."""
    folders = tmp_path_factory.mktemp("shared"), tmp_path_factory.getbasetemp()
    settings = ServiceSettings(data=str(folders[0] / "data"), port=0, roots=tuple(map(str, folders)))
    there_is_ray(settings.folder)
    with served(settings, NoDrivers()) as (client, _):
        yield client
