"""Random streams of ``surefoot.core.seeding``."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.seeding import derived_seed, stream

names = st.sampled_from(["weights", "predict", "sample", "shuffle", "evaluation"])


@given(st.integers(0, 2**53), st.integers(0, 2**53), names, names)
def test_two_streams_agree_only_when_seed_and_name_agree(seed: int, other: int, name: str, other_name: str) -> None:
    first, second = torch.rand(4, generator=stream(seed, name)), torch.rand(4, generator=stream(other, other_name))
    assert torch.equal(first, second) == ((seed, name) == (other, other_name))


def test_derived_seeds_are_the_same_in_every_release() -> None:
    """Checkpoints replay episodes by these numbers."""
    assert [derived_seed(1, 0, 0), derived_seed(1, 0, 1), derived_seed(1, "sample")] == [1835504127, 1501029259, 1424653476]
