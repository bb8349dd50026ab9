"""Who may do what, and what a request may name."""
