"""Published and common policies to compare with, in the simulator only; rlhfless.sim.policies lists their names."""
