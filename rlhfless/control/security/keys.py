"""The keys of a service, as requests are checked against them."""

from __future__ import annotations

import time

from sqlalchemy import select

from rlhfless.control.database.access import Database
from rlhfless.control.database.tables import KeyRow
from rlhfless.control.errors import ApiError
from rlhfless.control.security.access import LOCAL, SCOPES, Caller, hashed

KEPT_S = 5.0
"""The keys are read again after this time: a key that the command line has revoked is refused from then on."""


class Keys:
    """Reads the table of keys now and then."""

    def __init__(self, database: Database, *, required: bool) -> None:
        """`required`: ask for a key even when none was ever made, because others reach the service."""
        self._database = database
        self._required = required
        self._known: dict[str, Caller] = {}
        self._any_was_made = False
        self._read_s = 0.0

    @property
    def asked_for(self) -> bool:
        """Whether requests need a key, as far as is known. Once one was made they do: to revoke the last key must not
        open the service to all."""
        return self._required or self._any_was_made

    async def read(self) -> None:
        """Read the table. Raises Unavailable."""
        rows = await self._database.read(lambda session: list(session.scalars(select(KeyRow))))
        self._any_was_made = bool(rows)
        self._known = {row.hash: Caller(row.id, frozenset(row.scopes)) for row in rows if row.revoked_at is None}
        self._read_s = time.monotonic()

    async def caller(self, authorization: str | None) -> Caller:
        """The sender of a request with this header. Raises ApiError (401); Unavailable if the keys cannot be read."""
        if time.monotonic() - self._read_s > KEPT_S:
            await self.read()
        if not self.asked_for:
            return Caller(LOCAL, frozenset(SCOPES))
        scheme, _, secret = (authorization or "").partition(" ")
        key = self._known.get(hashed(secret.strip())) if scheme.lower() == "bearer" else None
        if key is None:
            what = "it does not know this API key, or it was revoked" if secret else "this service asks for an API key"
            message = f"{what}: send `Authorization: Bearer rlk_...`, with a key from its operator"
            raise ApiError(401, "unauthorized", message)
        return key
