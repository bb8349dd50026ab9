"""What must hold before a service listens."""

from __future__ import annotations

from sqlalchemy.orm import Session

from rlhfless.control.database.access import Database
from rlhfless.control.security.access import has_keys
from rlhfless.control.settings import ServiceSettings
from rlhfless.functions.loopback import is_loopback
from rlhfless.spec.errors import UserError


class NotSafe(UserError):
    """The service would let anyone in."""


def require_safe(settings: ServiceSettings, database: Database) -> None:
    """Raises NotSafe if others reach the service and it would ask them for no key."""
    if is_loopback(settings.host):
        return
    with Session(database.engine) as session:
        if has_keys(session):
            return
    where = "--database ..." if settings.database else f"--data {settings.data}"
    raise NotSafe(
        f"{settings.host} can be reached from other machines, and this service has no API key: anyone could run code "
        f"here. Make one (`rlhfless keys create NAME --scope admin {where}`), or listen on 127.0.0.1"
    )
