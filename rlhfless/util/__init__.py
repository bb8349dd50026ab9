"""Helpers without knowledge of runs: processes, files, text, tasks. Imports nothing of rlhfless."""
