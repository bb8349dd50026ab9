"""Fit the latency model to recorded runs, simulate them again, and compare with the measurements."""
