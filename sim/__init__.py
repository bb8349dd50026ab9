"""The simulator: an RLHF run on a virtual clock, with the runtime's own life cycle, records and bill."""
