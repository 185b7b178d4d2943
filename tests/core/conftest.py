"""One thread, and laws searched with the same examples every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("core", max_examples=25, deadline=None, derandomize=True, database=None)
