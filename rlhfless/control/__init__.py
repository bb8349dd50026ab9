"""The control API: runs that are POSTed, their life cycle, the database, events, and the page."""
