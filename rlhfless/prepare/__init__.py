"""What can be known about a run before there is a fleet: data sets, model, rewards, devices. No Ray, no console."""
