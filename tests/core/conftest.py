"""Laws of whole updates, which take longer, are searched with fewer examples."""

from hypothesis import settings

settings.register_profile("core", max_examples=25, deadline=None, derandomize=True, database=None)
