"""Computations that take seconds of a core: plans, simulations and reward trials, each in its own process."""
