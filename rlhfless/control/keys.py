"""API keys and their scopes: created and revoked in the database, and checked with each request."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from fastapi import Request
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rlhfless.control.database.access import Database
from rlhfless.control.database.tables import KeyRow
from rlhfless.control.errors import ApiError
from rlhfless.control.settings import ServiceSettings
from rlhfless.functions.loopback import is_loopback
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest
from rlhfless.util.errors import UserError

Scope = Literal["read", "run", "admin"]

SCOPES: tuple[Scope, ...] = ("read", "run", "admin")
"""The scopes of keys. Each includes the scopes before it."""

PREFIX = "rlk_"

LOCAL = "local"
"""Owner of runs that are created without a key, on loopback."""


KEPT_S = 5.0
"""Seconds after which the keys are read again, so that keys revoked on the command line are refused."""


@dataclass(frozen=True, slots=True)
class Caller:
    owner: str
    scopes: frozenset[str]


def hashed(secret: str) -> str:
    """Return the hash of a secret, for storage. Secrets have 256 random bits, so a slow hash would gain nothing."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key(session: Session, name: str, scope: Scope) -> tuple[KeyRow, str]:
    """Create a key, and return it with its secret. The secret is not stored."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return put_key(session, name, scope, secret, replace=False), secret


def put_key(session: Session, name: str, scope: Scope, secret: str, *, replace: bool = True) -> KeyRow:
    """Make `secret` the key of this name. Idempotent. `replace`: revoke any other key with the name."""
    scopes: list[str] = list(SCOPES[: SCOPES.index(scope) + 1])
    named = select(KeyRow).where(KeyRow.name == name, KeyRow.revoked_at.is_(None))
    others = list(session.scalars(named)) if replace else []
    same = next((row for row in others if row.hash == hashed(secret) and row.scopes == scopes), None)
    for row in others:
        if row is not same:
            row.revoked_at = time.time()
    if same is not None:
        return same
    row = KeyRow(
        id=f"key_{secrets.token_hex(6)}", name=name, hash=hashed(secret), scopes=scopes, created_at=time.time()
    )
    session.add(row)
    return row


def has_keys(session: Session) -> bool:
    """Return whether a key exists that is not revoked."""
    return bool(session.scalar(select(func.count()).select_from(KeyRow).where(KeyRow.revoked_at.is_(None))))


class Keys:
    """The keys of a service, read again every few seconds."""

    def __init__(self, database: Database, *, required: bool) -> None:
        """`required`: require a key even if none was ever created, because other machines can reach the service."""
        self._database = database
        self._required = required
        self._known: dict[str, Caller] = {}
        self._any_was_made = False
        self._read_s = 0.0

    @property
    def are_required(self) -> bool:
        """Whether requests need a key, as of the last read. Once a key was created they do: revoking the last key must
        not open the service."""
        return self._required or self._any_was_made

    async def read(self) -> None:
        """Read the keys. Raises Unavailable."""
        rows = await self._database.read(lambda session: list(session.scalars(select(KeyRow))))
        self._any_was_made = bool(rows)
        self._known = {row.hash: Caller(row.id, frozenset(row.scopes)) for row in rows if row.revoked_at is None}
        self._read_s = time.monotonic()

    async def caller(self, authorization: str | None) -> Caller:
        """Return the sender of a request with this header. Raises ApiError (401) or Unavailable."""
        if time.monotonic() - self._read_s > KEPT_S:
            await self.read()
        if not self.are_required:
            return Caller(LOCAL, frozenset(SCOPES))
        scheme, _, secret = (authorization or "").partition(" ")
        key = self._known.get(hashed(secret.strip())) if scheme.lower() == "bearer" else None
        if key is None:
            what = "it does not know this API key, or it was revoked" if secret else "this service asks for an API key"
            message = f"{what}: send `Authorization: Bearer rlk_...`, with a key from its operator"
            raise ApiError(401, "unauthorized", message)
        return key


def requires(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Return a route dependency that returns the caller if its key has this scope. Raises ApiError (401, 403)."""

    async def caller(request: Request) -> Caller:
        service = request.app.state.service
        known: Caller = await service.keys.caller(request.headers.get("authorization"))
        if scope not in known.scopes:
            raise ApiError(403, "forbidden", f"this key has {', '.join(sorted(known.scopes))}; {scope} is needed")
        return known

    return caller


def require_keys_of_quotas(settings: ServiceSettings, database: Database) -> None:
    """Require that the API keys with quotas exist; they may be revoked, because their runs go on. Raises InputError."""
    with Session(database.engine) as session:
        names = sorted({*session.scalars(select(KeyRow.name))})
    known = ", ".join(names) or "there are none"
    problems = [
        Problem(
            f"--quota {name}",
            f"{name!r} is not the name of an API key (known: {known})",
            f"{nearest(name, names)}`rlhfless keys create {name}` makes a key of this name",
        )
        for name in settings.quotas
        if name not in names
    ]
    if problems:
        raise InputError("the service cannot start", problems)


class NotSafe(UserError):
    """The service would accept requests from anyone."""


def require_safe(settings: ServiceSettings, database: Database) -> None:
    """Require a key if other machines can reach the service. Raises NotSafe."""
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
