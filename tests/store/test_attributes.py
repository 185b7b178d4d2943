"""What the user's code keeps between calls is found wherever Python keeps it."""

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from surefoot.store.source import Kept

COUNT = {"calls": 0}


def helper() -> None:
    COUNT["calls"] += 1


def by_helper() -> None:
    helper()


def in_default(memory: list[int] = []) -> None:  # noqa: B006
    memory.append(1)


def in_closure() -> Any:
    total = np.zeros(2)

    def add() -> None:
        total[0] += 1

    return add


class Part:
    level = 0


class Counter:
    made = 0

    def __init__(self) -> None:
        self.total = 0
        self.parts = [Part(), Part()]

    def in_object(self) -> None:
        self.total += 1

    def in_part(self) -> None:
        self.parts[0].level += 1

    def in_class(self) -> None:
        Counter.made += 1

    def __call__(self, times: int = 1) -> None:
        helper()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (by_helper, "test_attributes.COUNT"),
        (in_default, "in_default.defaults"),
        (in_closure(), "in_closure.<locals>.add.total"),
        (Counter().in_object, "Counter.total"),
        (Counter().in_part, "Part.level"),
        (Counter().in_class, "Counter.made"),
        (functools.partial(Counter(), 2), "test_attributes.COUNT"),
    ],
)
def test_a_call_that_keeps_something_is_noticed_by_its_name(call: Any, names: str) -> None:
    kept = Kept(lambda: [call])
    assert kept.changed() == {}
    call()
    assert list(kept.changed()) == [f"{__package__}.{names}" if __package__ and names.startswith("test_") else names]
    assert kept.unlike(kept.before) == ", ".join(kept.changed())


def test_counts_and_clocks_of_gymnasium_are_left_out() -> None:
    environment = RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    kept = Kept(lambda: [environment])
    environment.reset(seed=1)
    assert kept.changed() == {}
