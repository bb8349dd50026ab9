"""The service's database: tables, migrations, and access."""
