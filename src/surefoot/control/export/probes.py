"""Where an exported file is compared with its agent: random situations, and those of a real episode."""

import copy
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from surefoot.control.agent import Agent
from surefoot.control.environments.looped import maker
from surefoot.control.episodes import Moment, check_same_spaces, greedy_episode
from surefoot.control.spaces import Array, choices, read_mask

SAMPLES, EPISODE = 128, 256
"""random observations, and steps of a real episode"""


@dataclass(frozen=True)
class Situation:
    """An observation; where actions are masked, which are allowed; where the agent has a memory, what is remembered before."""

    observation: Any
    memory: Array | None = None
    """[1, memories, 2, width]"""
    start: bool = False
    mask: Array | None = None
    """[choices] booleans"""


def situations_of(agent: Agent) -> tuple[list[Situation], str]:
    """Situations to compare in, random ones and those of a greedy episode, and what they are in words.

    All have a mask, or none has. An agent that does not know whether its task masks asks it; where that does not run, there
    are masks wherever there can be any: a file that takes one does no harm.
    """
    space = copy.deepcopy(agent.observation_space)
    space.seed(0)
    found: list[Any] = [space.sample() for _ in range(SAMPLES)]
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:  # an unbounded sample may be beyond all reason
        found = [np.clip(observation, -100, 100) for observation in found]
        if agent.observation_normaliser is not None:
            found += [100 * observation for observation in found]  # so that its clip is reached
    recipe, sizes, masked = agent.recipe, choices(agent.action_space), agent.masked
    try:
        with closing(maker(recipe.task, recipe.environment, "evaluation")()) as environment:
            check_same_spaces(agent, environment, recipe.task)
            moments = list(greedy_episode(agent, environment, recipe.task, 0, 0, EPISODE))
            if masked is None:
                masked = moments[0].mask is not None
            episode = _in_turn(agent, moments, sizes if masked else None)
    except Exception:  # the environment need not be here: an agent is exported to be used elsewhere
        random = _anywhere(agent, found, None if masked is False else sizes)
        return random, f"{len(random)} random observations alone, as {recipe.task} does not run here"
    random = _anywhere(agent, found, sizes if masked else None)
    return random + episode, f"{len(episode)} observations of an episode and {len(random)} random ones"


def _anywhere(agent: Agent, observations: list[Any], sizes: tuple[int, ...] | None) -> list[Situation]:
    """Observations, each with something random remembered, which every other one is to forget, and a random mask."""
    nothing = agent.policy.nothing_remembered(1)
    memories, masks = np.random.default_rng(0), np.random.default_rng(1)
    return [
        Situation(
            observation,
            None if nothing is None else memories.uniform(-1, 1, nothing.shape).astype(np.float32),
            nothing is not None and index % 2 == 0,
            None if sizes is None else _random_mask(sizes, masks),
        )
        for index, observation in enumerate(observations)
    ]


def _random_mask(sizes: tuple[int, ...], draws: np.random.Generator) -> Array:
    """Few actions or many, and one at least among every part's choices.   [Σ sizes] booleans"""
    allowed: Array = draws.random(sum(sizes)) < draws.random()
    allowed[np.cumsum((0, *sizes[:-1])) + draws.integers(sizes)] = True
    return allowed


def _in_turn(agent: Agent, moments: list[Moment], sizes: tuple[int, ...] | None) -> list[Situation]:
    """The moments of an episode, with what the agent remembers before each; all is allowed where no mask was given."""
    nothing = agent.policy.nothing_remembered(1)
    memory, found = None if nothing is None else nothing.cpu().numpy(), []
    for index, moment in enumerate(moments):
        mask = None
        if sizes is not None:
            mask = np.ones(sum(sizes), bool) if moment.mask is None else read_mask(moment.mask, sizes)
        found.append(Situation(moment.observation, memory, memory is not None and index == 0, mask))
        if memory is not None:
            memory = asked(agent, found[-1])[1]
    return found


def asked(agent: Agent, situation: Situation) -> tuple[Any, Any]:
    """The agent's own action, and its memory after it."""
    start = None if situation.memory is None else situation.start
    return agent.predict(situation.observation, situation.memory, start, deterministic=True, action_mask=situation.mask)
