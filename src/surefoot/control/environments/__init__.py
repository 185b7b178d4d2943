"""Environments stepped together: in this process, in workers, or as a vector environment."""
