"""Helpers that know nothing about runs: processes, files, text, tasks. Imports no other package of rlhfless."""
