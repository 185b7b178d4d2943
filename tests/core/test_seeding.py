"""Random streams and hashes of ``surefoot.core.seeding``, and where the seconds of a run go."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.seeding import derived_seed, fingerprint, stream
from surefoot.core.timer import Timer

names = st.sampled_from(["weights", "predict", "sample", "shuffle", "evaluation"])


@given(st.integers(0, 2**53), st.integers(0, 2**53), names, names)
def test_two_streams_agree_only_when_seed_and_name_agree(seed: int, other: int, name: str, other_name: str) -> None:
    first, second = torch.rand(4, generator=stream(seed, name)), torch.rand(4, generator=stream(other, other_name))
    assert torch.equal(first, second) == ((seed, name) == (other, other_name))


def test_derived_seeds_are_the_same_in_every_release() -> None:
    """Checkpoints replay episodes by these numbers."""
    assert [derived_seed(1, 0, 0), derived_seed(1, 0, 1), derived_seed(1, "sample")] == [1835504127, 1501029259, 1424653476]


DIFFERENT: list[Any] = [
    None, False, 0, 0.0, -0.0, "", b"", "0", [], [[]], [0], [0, 0], {}, {"a": 0}, {"a": 1}, {"b": 0},
    np.zeros(2), np.zeros((2, 1)), np.zeros(2, np.float32), np.zeros(0), np.zeros((0, 3)), np.array(0.0), np.zeros(2, bool),
    torch.zeros(2, dtype=torch.bfloat16), {"a": [1, {"b": np.ones(1)}]}, {"a": [1, {"b": np.zeros(1)}]},
]  # fmt: skip


def test_values_that_differ_in_type_shape_or_bits_have_different_hashes() -> None:
    assert len({fingerprint(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_the_same_numbers_have_one_hash_as_array_tensor_view_or_other_byte_order() -> None:
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = [table, torch.from_numpy(table), table.T.copy().T, torch.from_numpy(table.T.copy()).t(), table.astype(">f4")]
    assert len({fingerprint(value) for value in same}) == 1
    assert fingerprint({"a": 1, "b": (2,)}) == fingerprint({"b": [2], "a": 1})
    with pytest.raises(TypeError, match="a set can't be hashed"):
        fingerprint({"a": {1}})


def test_a_section_has_its_place_its_calls_and_the_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], list[str]()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Observer:
        def enter(self, path: tuple[str, ...]) -> None:
            seen.append(f"+{path[-1]}")

        def leave(self, path: tuple[str, ...]) -> None:
            seen.append(f"-{path[-1]}")

    timer = Timer()
    timer.observer = Observer()
    timer.synchronise = lambda: clock.__setitem__(0, clock[0] + 2.0)
    for detailed in (False, True):
        timer.detailed = detailed
        with timer.section("learning") as span, timer.detail("forward"):
            clock[0] += 1.0
            assert timer.timed("scoring", lambda x, y: x - y)(5, y=3) == 2
        assert span.seconds == (7.0 if detailed else 3.0)
    assert timer.seconds == {("learning",): 10.0, ("learning", "forward"): 5.0, ("learning", "forward", "scoring"): 2.0}
    assert timer.calls == {("learning",): 2, ("learning", "forward"): 1, ("learning", "forward", "scoring"): 1}
    assert seen == ["+learning", "-learning", "+learning", "+forward", "+scoring", "-scoring", "-forward", "-learning"]
    with pytest.raises(KeyError), timer.section("broken"):
        raise KeyError
    with timer.section("after"):
        pass
    assert ("after",) in timer.seconds, "an error ends its section too"
