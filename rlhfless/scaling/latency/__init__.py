"""How long engines take: roofline from data sheets, measured kernel tables, and fits to the run's own ledger.

Import the modules themselves: `shape` is wanted where the others, which bring pyarrow along, are not.
"""
