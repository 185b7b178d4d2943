"""Random generators of a run, all derived from its one seed.

Streams differ by name, never by adding to the seed: seed 1's second stream must not be seed 2's first.
"""

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

MAX_SEED = 2**53
"""the largest seed of a recipe: a float64, and so any JSON, holds integers up to it exactly"""


def derived_seed(*words: int | str) -> int:
    """A 32-bit seed that depends on every word and on their order (numpy's SeedSequence; names enter as their CRC-32)."""
    return int(_sequence(words).generate_state(1)[0])


def stream(*words: int | str) -> "torch.Generator":
    """A CPU generator for the run's seed and the stream's name: ``stream(seed, "weights")``."""
    import torch  # not above: a worker process needs seeds and no torch, which takes seconds and 200 MB

    return torch.Generator().manual_seed(int(_sequence(words).generate_state(1, "uint64")[0]) >> 1)


def _sequence(words: tuple[int | str, ...]) -> "np.random.SeedSequence":
    import numpy as np  # not above: a command line needs MAX_SEED and no numpy

    return np.random.SeedSequence([zlib.crc32(word.encode()) if isinstance(word, str) else word for word in words])
