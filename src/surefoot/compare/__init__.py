"""Compare trained runs: the ladder, algorithms on one task, and existing runs."""
