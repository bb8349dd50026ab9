"""What takes seconds of a core: plans, simulations, trials of rewards. Each in a process of its own."""
