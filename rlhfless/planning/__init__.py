"""Planning of a run before it starts: its placement, and its memory per device and phase."""
