"""Predictions of a run before it starts: time and cost by the simulator, and comparisons of devices and schedules."""
