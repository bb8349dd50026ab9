"""What a caller may do, and what a request may name."""
