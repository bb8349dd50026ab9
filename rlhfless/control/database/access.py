"""The service's access to its database: SQLite by default, PostgreSQL by URL.

Only the API process writes, through one thread: writes run in the order of their requests, and later reads see them.
Reads use a few threads. A database that does not answer raises `Unavailable`; drivers keep their items until it is
back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from rlhfless.control.process_limits import raise_priority
from rlhfless.control.settings import DATABASE_FILE, ServiceSettings, open_data
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.errors import UserError

T = TypeVar("T")

log = logging.getLogger(__name__)

READERS = 4
"""Number of reader threads. A read takes a millisecond."""

CONNECT_S = 5
"""Maximum wait for a connection."""

STATEMENT_S = 30
"""Maximum duration of a statement."""

CHANGED = "changed"
"""Key of `Session.info` with the runs that the transaction changed, and their new events."""

ADVISORY_LOCK = 0x726C6866
"""Number of the PostgreSQL advisory lock ("rlhf") held by the one service that writes."""


class Unavailable(Exception):
    """The database does not answer. The request was not executed and may be repeated."""


class SecondService(UserError):
    """Another service writes to this database."""


class Database:
    def __init__(self, url: str) -> None:
        """Create the engine and its threads. Raises InputError for a malformed URL."""
        self.engine = _engine(url)
        self._writer = ThreadPoolExecutor(1, "database-writer", initializer=raise_priority)
        self._readers = ThreadPoolExecutor(READERS, "database-reader", initializer=raise_priority)
        self._queue: deque[tuple[Callable[[Session], Any], Future[Any]]] = deque()
        self._lock: Any = None
        self.on_commit: Callable[[Any], None] | None = None
        """Called in the writer's thread with the runs that a transaction changed (CHANGED)."""

    async def write(self, change: Callable[[Session], T]) -> T:
        """Apply a change in one transaction, and return its result.

        `change` may be called more than once, and its result must not need the session. Raises Unavailable, or any
        error of `change`; nothing is changed then.
        """
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # the change is applied even if its caller is cancelled
        self._queue.append((change, answer))
        self._writer.submit(self._write_all)
        return await asyncio.wrap_future(answer)

    def _write_all(self) -> None:
        """Apply all queued changes in one transaction, because a commit waits for the disk. A failed change is undone
        alone. Watchers are notified before callers, after the commit."""
        queued = [self._queue.popleft() for _ in range(len(self._queue))]
        if not queued:
            return  # an earlier call has applied them
        try:
            with self._reachable(), Session(self.engine, expire_on_commit=False) as session:
                outcomes = [self._do(session, change) for change, _ in queued]
                session.commit()
        except Exception as error:
            for _, answer in queued:
                answer.set_exception(error)
            return
        for (_, answer), (result, fault, changed) in zip(queued, outcomes, strict=True):
            if fault is not None:
                answer.set_exception(fault)
                continue
            if changed and self.on_commit is not None:
                self.on_commit(changed)
            answer.set_result(result)

    def _do(self, session: Session, change: Callable[[Session], Any]) -> tuple[Any, Exception | None, Any]:
        """Apply one change; return its result or its error, and the runs that it changed."""
        session.info.clear()
        try:
            with session.begin_nested():
                result = change(session)
            return result, None, session.info.pop(CHANGED, None)
        except (DBAPIError, PoolTimeout) as error:
            if _is_away(error):
                raise
            return None, error, None
        except Exception as error:
            return None, error, None

    async def read(self, query: Callable[[Session], T]) -> T:
        """Return the result of a query. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._in_transaction, query)

    def _in_transaction(self, query: Callable[[Session], T]) -> T:
        with self._reachable(), Session(self.engine, expire_on_commit=False) as session, session.begin():
            return query(session)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Convert errors of an unreachable database into Unavailable."""
        try:
            yield
        except (DBAPIError, PoolTimeout) as error:
            if _is_away(error):
                log.warning("the database does not answer: %s", error)
                raise Unavailable(f"the database does not answer ({type(error).__name__})") from error
            raise

    def require_only_service(self) -> None:
        """Require that no other service writes here; raises SecondService. The data folder's lock guards SQLite's
        file."""
        if self.engine.dialect.name != "postgresql":
            return
        self._lock = self.engine.connect()
        if not self._lock.execute(text(f"SELECT pg_try_advisory_lock({ADVISORY_LOCK})")).scalar():
            raise SecondService("another rlhfless service uses this database; stop it, or name another with --database")

    def close(self) -> None:
        """Close the database after all queued work."""
        self._writer.shutdown()
        self._readers.shutdown()
        if self._lock is not None:
            self._lock.close()
        self.engine.dispose()


def _is_away(error: DBAPIError | PoolTimeout) -> bool:
    """Return whether the server or file cannot be reached, as opposed to a wrong statement."""
    if isinstance(error, PoolTimeout) or error.connection_invalidated:
        return True
    return type(error).__name__ in {"OperationalError", "InterfaceError"}


def database_of(settings: ServiceSettings) -> Database:
    """Open a service's database: SQLite in the data folder, unless the settings name another. Raises InputError or
    NotPrivate."""
    return Database(settings.database or f"sqlite:///{open_data(settings) / DATABASE_FILE}")


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ArgumentError(f"{parsed.get_backend_name()} is not supported")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(str(parsed))
        options = {"connect_timeout": CONNECT_S, "options": f"-c statement_timeout={STATEMENT_S}s"}
        pool = {"pool_size": READERS + 2, "pool_pre_ping": True, "pool_timeout": CONNECT_S}
        return create_engine(parsed, connect_args=options, **pool)
    except (ArgumentError, NoSuchModuleError) as error:
        what, hint = str(error), "write postgresql://user:password@host/name, or leave it out for SQLite"
        raise InputError("the service", [Problem("database", what, hint)]) from error


def _sqlite(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": CONNECT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        # Python's driver starts transactions by itself, too late for savepoints.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


class NewerDatabase(UserError):
    """A newer rlhfless wrote the database."""


def config_of(engine: Engine | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.attributes["engine"] = engine
    return config


def migrate(engine: Engine) -> None:
    """Migrate the database to the newest version. Raises NewerDatabase."""
    known = {script.revision for script in ScriptDirectory.from_config(config_of()).walk_revisions()}
    with engine.connect() as connection:
        stored = MigrationContext.configure(connection).get_current_revision()
    if stored is not None and stored not in known:
        raise NewerDatabase(
            f"the database is of version {stored}, which this rlhfless does not know; use the rlhfless that wrote it, "
            "or a newer one"
        )
    command.upgrade(config_of(engine), "head")
