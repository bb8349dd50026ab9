"""The sources of batches: traces of the runtime, public request traces, and generators. All give `RolloutBatch`es."""
