"""Recorded runs: fit the latency model to them, and simulate them again beside what was measured."""
