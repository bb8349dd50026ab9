"""Everything that can be known of a run before it has a fleet: data sets, model, rewards, devices. No Ray, no
console."""
