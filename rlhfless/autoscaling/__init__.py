"""The scaling policy of a run on the wall clock: what it is shown, what it is asked, and how its answers are done."""
