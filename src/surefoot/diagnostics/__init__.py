"""Checks of runs, recipes and machines, and what they find."""
