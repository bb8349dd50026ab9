"""Tests in minutes whether everything that a run needs works on this machine, and how fast it is.

The checks (`report.CHECKS`) are run in order on a subject (`subject`): the bundled model, or the user's run. Each has
an outcome with its measurements. The checks call the parts that a run is made of: engine, learner ranks, store, memory
plan. They add no mechanism, and `rlhfless plan --measured` plans with their measurements (`report`).
"""
