"""The database of the service: its tables, their migrations, and how they are read and written."""


class Unavailable(Exception):
    """The database does not answer. What was asked for was not done, and may be asked for again."""
