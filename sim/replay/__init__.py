"""Recorded runs: fit the latency model to them, and simulate them again, and compare with the measurements."""
