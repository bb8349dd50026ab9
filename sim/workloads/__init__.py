"""The sources of batches: runtime traces, public request traces, and generators. All produce `RolloutBatch`es."""
