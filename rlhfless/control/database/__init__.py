"""The service's database: tables, migrations, and access."""


class Unavailable(Exception):
    """The database does not answer. The request was not executed and may be repeated."""
