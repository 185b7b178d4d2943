"""Checks of a machine, a recipe or a run: each returns findings with cause, evidence and remedy."""
