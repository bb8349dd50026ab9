"""Tests in minutes whether everything a run needs works on this machine, and how fast.

The checks (`report.CHECKS`) run in order on a subject (`subject`): the bundled model, or the user's run. Each has an
outcome with its measurements. The checks call the parts of a real run: engine, learner ranks, store, memory plan. They
add no mechanism, and `rlhfless plan --measured` plans with their measurements (`report`).
"""
