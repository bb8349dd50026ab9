"""Planning of a run before it starts: memory per device and phase, time, and cost."""
