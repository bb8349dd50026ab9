"""The process that drives one run of the service."""
