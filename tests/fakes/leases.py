"""Leases of functions that tests make in their own process."""

from rlhfless.functions.lease import LeaseTerms

DAY_S = 86_400
LONG = LeaseTerms(DAY_S, DAY_S)
"""Longer than any session of tests: a function whose lease runs out ends its process, here the one that tests."""
