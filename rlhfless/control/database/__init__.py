"""The database of the service: its tables, their migrations, and how they are read and written."""
