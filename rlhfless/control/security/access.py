"""API keys and their scopes."""

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

from rlhfless.control.database.tables import KeyRow
from rlhfless.control.errors import ApiError

Scope = Literal["read", "run", "admin"]

SCOPES: tuple[Scope, ...] = ("read", "run", "admin")
"""Each has all that those before it have."""

PREFIX = "rlk_"

LOCAL = "local"
"""The owner of what is done without a key, on loopback."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    owner: str
    scopes: frozenset[str]


def hashed(secret: str) -> str:
    """What is kept of a secret of 256 random bits: such a one cannot be guessed, so a slow hash would gain nothing."""
    return hashlib.sha256(secret.encode()).hexdigest()


def make_key(session: Session, name: str, scope: Scope) -> tuple[KeyRow, str]:
    """A new key, and its secret, which is told this once."""
    return _new(session, name, list(SCOPES[: SCOPES.index(scope) + 1]), PREFIX + secrets.token_urlsafe(32))


def _new(session: Session, name: str, scopes: list[str], secret: str) -> tuple[KeyRow, str]:
    row = KeyRow(
        id=f"key_{secrets.token_hex(6)}",
        name=name,
        hash=hashed(secret),
        scopes=scopes,
        created_at=time.time(),
        revoked_at=None,
    )
    session.add(row)
    return row, secret


def put_key(session: Session, name: str, scope: Scope, secret: str) -> KeyRow:
    """Make a secret that exists already the key of this name; another one that the name had is revoked. Idempotent."""
    rows = list(session.scalars(select(KeyRow).where(KeyRow.name == name, KeyRow.revoked_at.is_(None))))
    scopes: list[str] = list(SCOPES[: SCOPES.index(scope) + 1])
    same = [row for row in rows if row.hash == hashed(secret) and row.scopes == scopes]
    for row in rows:
        if row not in same:
            row.revoked_at = time.time()
    if same:
        return same[0]
    row, _ = _new(session, name, scopes, secret)
    return row


def has_keys(session: Session) -> bool:
    """Whether any key can be used."""
    return bool(session.scalar(select(func.count()).select_from(KeyRow).where(KeyRow.revoked_at.is_(None))))


def requires(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: the caller, who has this scope. Raises ApiError (401, 403)."""

    async def caller(request: Request) -> Caller:
        service = request.app.state.service
        known: Caller = await service.keys.caller(request.headers.get("authorization"))
        if scope not in known.scopes:
            raise ApiError(403, "forbidden", f"this key has {', '.join(sorted(known.scopes))}; {scope} is needed")
        return known

    return caller
