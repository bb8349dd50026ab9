"""How long engines take: roofline from data sheets, measured kernel tables, and fits to the run's own ledger.

Import the modules themselves: some users of `shape` must not import the others, which import pyarrow.
"""
