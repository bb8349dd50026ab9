"""Running a scenario: every policy over every seed, in parallel, and the statistics of what came of it."""
