"""The orchestrator's own loop in virtual time, over a simulated cluster (issue 50, "One loop, two clocks").

The simulator has a loop of its own, `sim/simulation.py`. Here the live one, of `rlhfless.orchestrator` and
`rlhfless.fleet`, runs on `rlhfless.sim.virtual_loop` instead: the steps and their schedule, recovery, the generation
stage, group pipeline, weight sync, pools, replicas, turns, leases, the scaler, the live fleet and the ledger are those
of a run. Simulated are, in `rlhfless.sim`, the cluster (`cluster`, `devices`), the engines (`engines`, in closed form),
the samples of a stage (`counted`, in arrays), the batch of a step (`batches`), what functions learn (`trained`) and the
disk (`storage`). `rlhfless.sim.run.simulate` runs it.

It finds faults of the live loop in milliseconds: `seeded.py` plays seeds with faults at any await, of which
`test_seeded_faults.py` has the first 300. `test_same_steps.py` compares the times with the simulator's own loop, which
this one is to replace; NEXT.md says in which steps.

Missing: rewards and tokens.

Measured on 29 November 2026, for the 19 scenarios of examples/scenarios, the live loop's time to the simulator's:

- static_colocated: 1.0000 in 13 scenarios, within 0.17 % in 18, and 1.0105 in code-70b-h200.
- cost_aware: 0.9948 to 1.0011. Costs differ as times do, to 0.1 %.
- queue_reactive_knative: 1.000 to 1.009 in 14; the others differ by up to 47 % (gsm8k-7b-h100-owned), see NEXT.md.
- Processor time of 1,000 steps of 8,192 responses on 64 actors: static 135 s instead of 16 s, cost_aware 144 s instead
  of 47 s.

Faults of the live loop that it has found, all fixed: woken actors waited for the slowest load before they generated
(0.4 to 6 % of a step on several nodes); an actor that died between its start and its first answer, or answered late,
ended the run; looking for the replica of a slot took time in proportion to all replicas that were ever started.
"""
