"""The orchestrator's own loop in virtual time, over the simulated cluster, with faults (docs/design.md).

`seeded.py` draws fleets, lengths, policies and faults at any await from seeds, plays them, and checks what must hold in
each run; `test_seeded_faults.py` has the first 300. It finds faults of the live loop in milliseconds; a failing seed is
printed, and replays exactly.

Faults of the live loop that it has found, all fixed: woken actors waited for the slowest load before they generated
(0.4 to 6 % of a step on several nodes); an actor that died between its start and its first answer, or answered late,
ended the run; looking for the replica of a slot took time in proportion to all replicas that were ever started.
"""
