"""Laws take as long as they take on a machine with much to do, and are the same on every one."""

from hypothesis import settings

settings.register_profile("laws", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("laws")
