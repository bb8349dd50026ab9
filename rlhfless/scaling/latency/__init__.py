"""Engine latencies: roofline from data sheets, measured kernel tables, and fits to the run's own ledger.

Import the modules directly: some users of `shape` must not import the others, which import pyarrow.
"""
