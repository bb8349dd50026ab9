"""The scaling policy of a run on the wall clock: its view of the fleet, its events, and the execution of its
actions."""
