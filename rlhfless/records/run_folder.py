"""Names of what is in the folder of a run, for those that read it from outside; this module imports nothing."""

TRACE_FOLDER = "trace"

JOURNAL_FILE = "journal.sqlite"
