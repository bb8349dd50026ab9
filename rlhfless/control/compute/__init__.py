"""Computations that take seconds of a core: plans, simulations, trials of rewards, each in a process of its own."""
