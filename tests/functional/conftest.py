"""Laws are searched with the same examples every time, so that a red test is a changed function and not luck."""

from hypothesis import settings

settings.register_profile("laws", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("laws")
