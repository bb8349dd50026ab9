"""What reading cannot show of a machine, in minutes: does all that a run needs work here, and how fast is it?

A registry of checks (`checks`) is run in order on a subject (`subject`): the bundled model, or the user's run. Each has
an outcome with what it measured. The checks call the parts that a run is made of: engine, learner ranks, store,
memory plan. They add no mechanism, and what they measure is what `rlhfless plan --measured` plans with (`report`).
"""
