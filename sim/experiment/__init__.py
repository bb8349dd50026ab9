"""Run a scenario: every policy over every seed, in parallel, and the statistics of the results."""
