"""The orchestrator's own loop in virtual time, over the simulated cluster, with faults (docs/design.md).

`seeded.py` plays seeds: fleets, lengths, policies, and faults at any await. `test_seeded_faults.py` has the first 300.
They find faults of the live loop in milliseconds; a failing seed is printed, and replays exactly.
"""
