"""The control API: POSTed runs, their life cycle, the database, events, and the page."""
