"""Checks of a recipe before it is trained: that it starts, its sizes, and its environment or its reward function."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from surefoot.control.collect.scoring import constant_parts, steps_outside
from surefoot.control.environments import is_tensor_environment, make_environments, maker, task_name
from surefoot.control.environments.agents import copies_of
from surefoot.control.environments.looped import MakeEnvironment, Step
from surefoot.control.environments.observations import (
    RESET,
    STEP,
    Reader,
    as_number,
    check_tuple,
    non_finite,
    score_and_life,
    with_masks,
)
from surefoot.control.environments.records import ENDS, REWARDS, Record, closing
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.control.normalise import ActionBounds, action_converter, normalised_parts
from surefoot.control.spaces import (
    MASK,
    NOT_FINITE,
    Array,
    ObservationPart,
    Observations,
    SpaceError,
    action_columns,
    as_float32,
    choices,
    flat_action,
    mask_of,
    nester,
    numbers,
)
from surefoot.core.rollout import World
from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, cause_at, cause_of
from surefoot.language.data.datasets import repeat_prompts
from surefoot.language.online.responses import final_rewards
from surefoot.language.online.world import LanguageWorld
from surefoot.ranks.collectives import in_float64
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import LanguageRecipe
from surefoot.store.finding import Finding, check_result, failure

STEPS = 500
"""random steps in an environment"""
EXPECTED = ("different from the unwrapped version", "we recommend using", "probably too low", "probably too high")
"""parts of warnings about what Surefoot handles: wrappers, and Box actions or observations of any range, even infinite"""
CONTINUED = 20
"""steps compared after a state is restored"""
PROMPTS = 8
"""prompts that a model answers"""


def check_recipe(recipe: Recipe, prepare: Callable[[Recipe], World]) -> list[Finding]:
    """Check a recipe without training; ``prepare`` makes its world.

    A model is loaded, and a few of its answers are sampled and scored; an environment is made, checked and stepped.
    """
    try:
        with contextlib.closing(prepare(recipe)) as world:
            findings = [
                check_result("recipe", "ok", f"{recipe.title}, seed {recipe.seed}"),
                *_arithmetic(recipe, [line for line in world.arithmetic() if line not in world.warnings]),
            ]
            findings += [check_result("notes", "warning", note) for note in world.warnings]
            if isinstance(recipe, LanguageRecipe):
                assert isinstance(world, LanguageWorld)
                findings += check_reward(world)
    except SurefootError as error:
        findings = [failure("recipe", error)]
    if isinstance(recipe, ControlRecipe):  # after an error too: the environment may be at fault, and its own checks show more
        findings += _environment(recipe)
    return findings


def _environment(recipe: ControlRecipe) -> list[Finding]:
    settings = recipe.normalise.actions, recipe.network.log_std, recipe.normalise.observations, recipe.normalise.rewards
    return check_environment(recipe.task, recipe.environment, recipe.seed, *settings)


def _arithmetic(recipe: Recipe, lines: list[str]) -> list[Finding]:
    """The lines of a dry run; a budget smaller than one iteration is a warning."""
    findings = []
    for line in lines:
        name, colon, what = line.partition(": ")
        findings.append(check_result(name, "ok", what) if colon else check_result("notes", "ok", line))
    size = recipe.batch_size if isinstance(recipe, ControlRecipe) else getattr(recipe, "responses", 0)
    if size > recipe.steps and not recipe.objective.needs_whole_episodes:
        findings.append(
            check_result(
                "budget",
                "warning",
                f"steps = {recipe.steps:,} is less than one iteration collects ({size:,}): the run has one iteration",
                f"set steps to {20 * size:,} or more",
            )
        )
    return findings


# ---- environments ----


def check_environment(
    task: str | MakeEnvironment,
    arguments: dict[str, Any],
    seed: int = 1,
    stretched: bool = True,
    log_std: float = 0.0,
    normalised: bool | Sequence[str] = False,
    scaled: bool = False,
) -> list[Finding]:
    """Run Gymnasium's checker and ``STEPS`` random steps: bounds of actions, observations, rewards, episode ends, speed.

    stretched, log_std, normalised, scaled   of the recipe: ``normalise.actions``, ``network.log_std``,
                                             ``normalise.observations``, ``normalise.rewards``
    """
    name = task_name(task)
    try:
        environment = maker(task, arguments)()
    except (Exception, SystemExit) as error:
        cause = str(error) if isinstance(error, SurefootError) else cause_of(error)
        return [check_result("environment", "serious", f"{name} can't be made: {cause}")]
    if is_tensor_environment(environment):
        TensorEnvironments(environment, torch.device(environment.device), seed, name).close()
        what = f"{name} is a tensor environment; every step of a run checks its tensors"
        return [check_result("environment", "ok", what), *_repeated(task, arguments, seed, environment.device)]
    if copies := copies_of(environment):
        environment.close()
        return _agents(task, arguments, seed, len(copies[0].possible_agents), scaled)
    if not isinstance(environment, gymnasium.Env):
        environment.close()
        what = f"{name} is a vector environment; Gymnasium's checker can't check it"
        return [check_result("environment", "ok", what), *_repeated(task, arguments, seed)]
    actions = check_bounds(environment.action_space, stretched, math.exp(log_std))
    findings = [
        _checked(name, environment),
        *actions,
        *_stepped(environment, seed, normalised, scaled),
        *_repeated(task, arguments, seed),
    ]
    try:
        environment.close()
    except Exception as error:
        what = f"close() raised {cause_of(error)}; training ignores it"
        findings.append(check_result("environment", "warning", what, "fix the environment"))
    return findings


def _agents(task: str | MakeEnvironment, arguments: dict[str, Any], seed: int, count: int, scaled: bool) -> list[Finding]:
    """Random steps of an environment with several agents."""
    try:
        with closing(make_environments(task, arguments, count, seed)) as environments:
            draw, running, observations = np.random.default_rng(seed), np.zeros(environments.count), environments.reset()
            environments.action_space.seed(seed)
            rewards: list[float] = []
            returns: list[float] = []
            for _ in range(STEPS):
                step: Any = environments.step(_actions(environments, observations, draw))
                observations, running = step.observations, running + step.rewards
                rewards += step.rewards[~step.ignored].tolist()
                returns += running[step.done].tolist()
                running[step.done] = 0
    except SurefootError as error:
        return [failure("environment", error)]
    what = f"{task_name(task)} has {count} agents, a row each, which share one policy"
    earned = _earned(np.array(rewards), np.array([*returns, 0.0]), len(returns), scaled)
    return [check_result("environment", "ok", what), earned, *_repeated(task, arguments, seed)]


class _AsTrained(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations and actions as in training, for Gymnasium's checker.

    Lists and arrays of other number types are arrays of the space's type. Where the task masks actions, an allowed action
    replaces the checker's, which ignores masks; it depends on the mask alone, so that steps repeat.
    """

    mask: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = self.env.reset(seed=seed, options=options)
        self.mask = _mask(info)
        return _as_read(self.observation_space, observation), info

    def step(self, action: Any) -> Any:
        if self.mask is not None:
            with suppress(SpaceError):  # training rejects the mask
                action = nester(self.action_space)(_allowed_action(self.action_space, self.mask, np.random.default_rng(0)))
        observation, *rest = self.env.step(action)
        self.mask = _mask(rest[-1]) if rest else None
        return _as_read(self.observation_space, observation), *rest


def _mask(info: Any) -> Any:
    """The action mask in a step's info; None if there is none."""
    return info.get(MASK) if isinstance(info, dict) else None


def _allowed_action(space: gymnasium.Space[Any], mask: Any, draw: np.random.Generator) -> Any:
    """A random action, as one array, that a mask allows; SpaceError if the mask doesn't fit the space."""
    allowed = np.split(mask_of(space, mask), np.cumsum(choices(space) or ())[:-1])
    picks = torch.tensor([draw.choice(np.flatnonzero(options)) for options in allowed])
    if (box := numbers(space)) is not None:
        picks = torch.cat([picks.float(), torch.from_numpy(draw.normal(size=box.shape)).float()])
    return action_converter(space, False)(picks if isinstance(space, spaces.Discrete) else picks[None])[0]


def _as_read(space: Any, observation: Any) -> Any:
    """The observation with arrays of the space's type for numbers that training accepts; anything else stays."""
    if isinstance(space, spaces.Dict) and isinstance(observation, dict):
        return {key: _as_read(space.spaces.get(key), value) for key, value in observation.items()}
    if isinstance(space, spaces.Tuple) and isinstance(observation, tuple) and len(observation) == len(space.spaces):
        return tuple(map(_as_read, space.spaces, observation))
    if not isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return observation
    try:
        read = ObservationPart("", (), space).read(observation)
    except (SpaceError, TypeError, ValueError):  # training rejects it
        return observation
    read = np.asarray(read).astype(space.dtype)
    return np.asarray(np.clip(read, space.low, space.high)) if isinstance(space, spaces.Box) else read  # bounds: _observed


def _checked(name: str, environment: "gymnasium.Env[Any, Any]") -> Finding:
    own = with_masks(environment.unwrapped) if name in gymnasium.registry else environment
    verdict = _gymnasium_verdict(name, own)
    return verdict if verdict.severity == "ok" else _gymnasium_verdict(name, _AsTrained(own))


def _gymnasium_verdict(name: str, own: "gymnasium.Env[Any, Any]") -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(own, skip_render_check=True, skip_close_check=True)
        except (Exception, SystemExit) as error:
            return check_result(
                "environment", "serious", f"{name}: Gymnasium's checker rejects it ({cause_of(error)})", "fix the environment"
            )
    texts = [" ".join(str(each.message).split()) for each in caught]
    texts = [_plain(text) for text in texts if "WARN:" in text and not any(words in text for words in EXPECTED)]
    if texts:
        return check_result(
            "environment",
            "warning",
            f"{name}: Gymnasium's checker warns: {'; '.join(dict.fromkeys(texts))}",
            "fix the environment",
        )
    return check_result("environment", "ok", f"{name} passes Gymnasium's checker")


def check_bounds(space: Any, stretched: bool, spread: float) -> list[Finding]:
    """Compare the bounds of Box actions with the actions of an untrained policy, 0 ± ``spread``; empty without any."""
    if (box := numbers(space)) is None or not np.issubdtype(box.dtype, np.floating):
        return []
    leaves = [(keys, leaf) for keys, leaf, _ in action_columns(space) if isinstance(leaf, spaces.Box)]
    parts = [(keys, number, leaf.low.size) for keys, leaf in leaves for number in range(leaf.low.size)]
    bounds = ActionBounds(box, stretched)
    low, high = (np.asarray(end, np.float64).reshape(-1) for end in (box.low, box.high))
    within = np.array([_normal(b / spread) - _normal(a / spread) for a, b in zip(low, high, strict=True)])
    finite = bounds.finite.numpy()
    wide = finite & (np.where(finite, high / 2 - low / 2, 0) > 10 * spread)
    odd = ~bounds.rescaled.numpy() & ((low != -1) | (high != 1)) & (wide | (within < 0.2))
    index = int(odd.argmax())
    keys, number, size = parts[index]
    where = (f'part "{".".join(map(str, keys))}": ' if keys else "") + f"bounds {low[index]:,.6g} to {high[index]:,.6g}"
    where += f" (number {number} of {size})" if size > 1 else ""
    if not odd.any():
        how = "the policy's −1 to 1 is rescaled to them" if bounds.rescaled[index] else "actions are clipped to them"
        return [check_result("actions", "ok", f"{where}, {how}")]
    drawn = f"an untrained policy draws 0 ± {spread:.3g}, "
    drawn += f"of which {within[index]:.0%} is within" if within[index] < 0.2 else "a small part of that"
    fix = "set normalise.actions = true" if finite[index] else "scale actions to about ±1, by a wrapper"
    return [check_result("actions", "warning", f"{where}: {drawn}", fix)]


def _normal(x: float) -> float:
    """Φ(x)."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _stepped(
    environment: "gymnasium.Env[Any, Any]", seed: int, normalised: bool | Sequence[str], scaled: bool
) -> list[Finding]:
    """Take random actions, episode after episode."""
    rewards: list[float] = []
    seen: list[Observations] = []
    returns: list[float] = [0.0]
    terminated = truncated = False
    ends: list[int] = []  # the number of steps before each
    by_termination = True
    try:
        reader = Reader(environment.observation_space, environment.action_space, 1, "")
    except SurefootError as error:
        return [check_result("observation", "serious", str(error))]
    space = environment.action_space
    space.seed(seed)
    draw = np.random.default_rng(seed)
    started = time.perf_counter()
    try:
        observation, info = check_tuple(environment.reset(seed=seed), RESET)
        seen.append(_read(reader, observation, info))
        for _ in range(STEPS):
            mask = _mask(info)
            action = space.sample() if mask is None else nester(space)(_allowed_action(space, mask, draw))
            observation, reward, terminated, truncated, info = check_tuple(environment.step(action), STEP)
            rewards.append(float(as_float32(as_number(reward))))  # as training reads it
            score_and_life(info, reward)
            seen.append(_read(reader, observation, None if terminated or truncated else info))
            returns[-1] += float(reward)
            if terminated or truncated:
                ends.append(len(rewards))
                by_termination &= bool(terminated) and not truncated
                returns.append(0.0)
                observation, info = check_tuple(environment.reset(), RESET)
                seen.append(_read(reader, observation, info))
    except SpaceError as misfit:
        gave = f"step {len(rewards)} of random actions gave {misfit}"
        return [check_result("observation", "serious", gave, "fix the environment")]
    except (Exception, SystemExit) as error:
        raised = f"step {len(rewards) + 1} of random actions raised {cause_at(error)}"
        return [check_result("reward", "serious", raised, "fix the environment")]
    speed = len(rewards) / (time.perf_counter() - started)
    how = "random allowed" if mask is not None else "random"
    bounded = environment.spec is not None and environment.spec.max_episode_steps is not None
    return [
        *_observed(reader.parts, seen, normalised),
        _earned(np.array(rewards), np.array(returns), len(ends), scaled, how, bounded),
        *(_limited(np.diff([0, *ends])) if by_termination else []),
        check_result("speed", "ok", f"{speed:,.0f} steps/s in one environment, without learning"),
    ]


def _repeated(task: str | MakeEnvironment, arguments: dict[str, Any], seed: int, device: Any = "cpu") -> list[Finding]:
    """Compare a later episode of a used environment with the same seed and actions in a new one, and the steps after it;
    empty if they agree, or if the environment fails.
    """

    def made() -> Any:
        one = make_environments(task, arguments, 1, seed, device=str(device))
        return _Rows(one) if isinstance(one, TensorEnvironments) else one

    draw, different, kept = np.random.default_rng(seed), "", ""
    with suppress(Exception), closing(made()) as used:
        space, observations = used.action_space, used.reset()
        space.seed(seed)
        for step in range(STEPS):
            observations = used.reset() if step == STEPS // 2 else observations
            observations = used.step(_actions(used, observations, draw)).observations
        with closing(made()) as new:
            different = next(iter(new.load_state_dict(used.state_dict())[1].values()), "")
            kept = next(iter(getattr(new, "forgotten", dict)().values()), "")
            for step in range(1, CONTINUED + 1 if not different else 0):
                actions = _actions(used, observations, draw)
                one, other = used.step(actions), new.step(actions)
                observations = one.observations
                pairs = [(getattr(one, name), getattr(other, name)) for name in ("rewards", "terminated", "truncated")]
                pairs += [(values, other.observations[path]) for path, values in observations.items()]
                if not all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=x.dtype.kind == "f") for x, y in pairs):
                    different = f"step {step} after its state was restored was another one"
                    break
    if not different and kept:
        what = f"{kept} of a new environment is not that of this one, after the same last two episodes"
        fix = "if an episode depends on it, keep it by state_dict and load_state_dict, or a resumed run is not exact"
        return [check_result("resume", "note", what, fix)]
    if not different:
        return []
    what = f"{different} in a new environment, with the same seed and actions: a resumed run is not exact"
    fix = "draw from self.np_random alone, and keep nothing from one episode to the next but by state_dict and load_state_dict"
    return [check_result("resume", "warning", what, fix)]


def _actions(environments: Any, observations: Observations, draw: np.random.Generator) -> Array:
    """A random action for each environment, as ``step`` takes them."""
    masks = observations.get(MASK, [None] * environments.count)
    space = environments.action_space
    flat = (flat_action(space, space.sample()) if mask is None else _allowed_action(space, mask, draw) for mask in masks)
    return np.stack(list(flat))


class _Rows:
    """A tensor environment with arrays, which are replayed from a reset if it can't save its state."""

    def __init__(self, rows: TensorEnvironments) -> None:
        self.rows, self.count, self.action_space, self.close = rows, rows.count, rows.action_space, rows.close
        self.record, self.observations = Record(0), dict[str, torch.Tensor]()

    def reset(self) -> Any:
        self.record = Record(self.rows.resets)
        return self._noted(self.rows.reset())

    def step(self, actions: Array) -> Step:
        self.record.actions.append(actions)
        step = self.rows.step(torch.as_tensor(actions, device=self.rows.device))
        rewards, terminated, truncated = (x.cpu().numpy() for x in (step.scores, step.terminated, step.truncated))
        self.record.add(REWARDS, rewards.tobytes())
        self.record.add(ENDS, terminated.tobytes() + truncated.tobytes())
        return Step(self._noted(step.observations), rewards, terminated, truncated, np.zeros(self.count, bool))

    def _noted(self, observations: dict[str, torch.Tensor]) -> Observations:
        self.observations = observations
        arrays = {path: part.cpu().numpy().copy() for path, part in observations.items()}
        self.record.add_observations(arrays)
        return arrays

    def state_dict(self) -> tuple[Any, Any, Record]:
        observations = {path: part.clone() for path, part in self.observations.items()}
        return deepcopy(self.rows.state_dict()), observations, self.record

    def load_state_dict(self, saved: tuple[Any, Any, Record]) -> tuple[None, dict[int, str]]:
        state, observations, record = saved
        if self.rows.resumable and self.rows.mode is AutoresetMode.SAME_STEP:
            return None, self.rows.load_state_dict(state, observations)[1]
        self.rows.resets = record.number
        self.reset()
        for actions in record.actions:
            self.step(actions)
        different = self.record.difference(record.hashes())
        return None, {0: f"its {len(record.actions):,} steps since a reset had other {different}"} if different else {}


def _earned(rewards: Array, returns: Array, ends: int, scaled: bool, how: str = "random", bounded: bool = True) -> Finding:
    """The rewards of random actions, and whether anything can be learned from them.

    returns   of episodes, the last one unfinished
    scaled    ``normalise.rewards`` of the recipe
    how       which actions: random, or random ones that masks allow
    bounded   whether the environment has a time limit that Gymnasium knows
    """
    if not np.isfinite(rewards).all():
        count = int((~np.isfinite(rewards)).sum())
        return check_result("reward", "serious", f"{count} of {STEPS} rewards are {NOT_FINITE}", "fix the environment")
    whole = returns[:-1] if len(returns) > 1 else returns
    earned = f"{how} actions get {np.mean(rewards):.3g} ± {np.std(rewards):.3g} per step"
    if ends:
        earned += f", {np.mean(whole):.4g} ± {np.std(whole):.3g} per episode ({ends} episodes)"
    else:
        limit = "" if bounded else " (each needs an end, such as gymnasium.wrappers.TimeLimit)"
        earned += f"; no episode ended in {STEPS} steps{limit}"
    largest = np.max(np.abs(rewards))
    if np.ptp(rewards) == 0 and (ends < 2 or np.ptp(whole) == 0):
        earned += ": it never differs under random actions, so there is nothing to learn from"
        fix = "check that it can differ; reward intermediate steps, or start from easier episodes"
        return check_result("reward", "warning", earned, fix)
    if largest > 100 and not scaled:
        earned += f"; the largest is {largest:,.4g}, which is hard to fit for a critic"
        return check_result("reward", "warning", earned, "set normalise.rewards = true, or scale it to order 1")
    return check_result("reward", "ok", earned)


def _limited(lengths: Array) -> list[Finding]:
    """Whether terminated episodes, many of the same length and none longer, look like a time limit."""
    longest = max(lengths, default=0)
    count = int((lengths == longest).sum())
    if longest < 20 or count < (2 if count == len(lengths) else max(3, len(lengths) / 5)):
        return []
    share = f"all {count}" if count == len(lengths) else f"{count} of {len(lengths)}"
    what = f"{share} random episodes are terminated after {longest} steps, and none later, as by a time limit"
    fix = "at a time limit return truncated, not terminated: the critic else learns that nothing follows"
    return [check_result("ends", "warning", what, fix)]


def _observed(parts: dict[str, ObservationPart], seen: list[Observations], normalised: bool | Sequence[str]) -> list[Finding]:
    """Parts of the observation that are outside their bounds, or never change."""
    observed = {path: torch.from_numpy(np.stack([row[path] for row in seen]))[None] for path in parts}
    outside, chosen = steps_outside(observed, parts), set[str]()
    with suppress(SurefootError):  # making the recipe's agent reports it
        chosen = set(normalised_parts(parts, normalised))
    constant, findings = constant_parts(observed, list(parts), chosen), []
    for path, steps in outside.items():
        numbers, (low, high) = observed[path], (limit.astype(float) for limit in parts[path].limits or ())
        what = (
            f"numbers from {numbers.min():.6g} to {numbers.max():.6g}, outside the bounds ({low.min():.6g} to {high.max():.6g})"
        )
        what = f"{_part(parts[path])}observed {what} in {in_float64(steps).mean():.0%} of the steps"
        findings.append(check_result("bounds", "warning", what, "correct the bounds of the space, or the observation"))
    for path in constant:
        what = f"{_part(parts[path])}the observation is the same in all of {len(seen)} steps, as the policy reads it"
        fix = "leave it out if nothing is missing; small changes of large numbers need a float64 space, normalised"
        findings.append(check_result("constant", "warning", what, fix))
    return findings


def _part(part: ObservationPart) -> str:
    return f'part "{part.path}": ' if part.keys else ""


def _read(reader: Reader, observation: Any, info: Any) -> Observations:
    """Read an observation as training does, with its mask if an action follows; raises SpaceError if training would stop."""
    arrays = reader.empty()
    reader.store(arrays, 0, observation, info, info is not None)
    for what in non_finite(arrays).values():
        raise SpaceError(f"an {what} that is {NOT_FINITE}")
    return {path: values[0] for path, values in arrays.items()}


def _plain(text: str) -> str:
    """A warning of Gymnasium without its colours and label."""
    text = "".join(c for c in text if c.isprintable()).replace("[33m", "").replace("[0m", "")
    return text.removeprefix("WARN: ").rstrip(".")


# ---- rewards ----


@torch.no_grad()
def check_reward(world: LanguageWorld) -> list[Finding]:
    """Sample and score answers to a few prompts: the number of scores, their spread and their time."""
    recipe, everything = world.recipe, world.collector.prompts
    samples = max(2, recipe.sampling.samples) if recipe.objective.compares_in_groups else 2
    prompts = repeat_prompts(everything, range(min(PROMPTS, len(everything.ids))), samples)
    seeds = [derived_seed(recipe.seed, "check", row) for row in range(len(prompts.ids))]
    started = time.perf_counter()
    try:
        answers = world.collector.respond(prompts, seeds, samples)
    except SurefootError as error:  # such as an environment that fails in its turns
        return [failure("answers", error)]
    sampled = time.perf_counter() - started
    count = len(answers.texts)
    ended = float(in_float64(answers.samples.ended).mean())
    lengths = in_float64(answers.samples.lengths)
    findings = [_answers(count, ended, float(lengths.mean()), sampled, recipe)]
    started = time.perf_counter()
    try:
        scores = answers.score_with(world.reward)
    except SurefootError as error:
        return [*findings, failure("reward", error)]
    seconds = time.perf_counter() - started
    findings.append(_scored(scores.total[scores.valid], count, seconds, recipe))
    if not scores.valid.any():
        return findings
    return [*findings, *_treated(recipe, final_rewards(scores, answers.samples, recipe), scores.valid, answers.samples.ended)]


def _scored(values: torch.Tensor, count: int, seconds: float, recipe: LanguageRecipe) -> Finding:
    """The number, spread and time of the scores.   known [scores that are finite], of ``count`` answers"""
    what = f"{len(values)} numbers for {count} answers in {seconds:.2g} s"
    if not len(values):
        return check_result("reward", "serious", f"{what}: none is finite", "fix the reward function")
    mean, spread = float(values.mean()), float(values.std(correction=0))
    what += f": {mean:.3g} ± {spread:.3g}, {float(values.min()):.3g} to {float(values.max()):.3g}"
    iteration = seconds / count * recipe.responses
    if iteration > recipe.reward.deadline:
        what += f"; an iteration's {recipe.responses} would take about {iteration:.0f} s, longer than reward.deadline"
        return check_result("reward", "warning", what, f"make it faster, or set reward.deadline = {2 * iteration:.0f}")
    if spread == 0:
        what += ": it never differs, so there is nothing to learn from these"
        fix = "read the answers (surefoot generate); begin with easier prompts, SFT, or a reward for partly right answers"
        return check_result("reward", "warning", what, fix)
    if len(values) < count:
        fix = "find the responses without a number"
        return check_result("reward", "warning", f"{what}; the others are masked", fix)
    return check_result("reward", "ok", what)


def _answers(count: int, ended: float, length: float, seconds: float, recipe: LanguageRecipe) -> Finding:
    what = f"{count} in {seconds:.2g} s, {length:.1f} tokens each, {ended:.0%} ended by EOS"
    if ended < 0.5 and recipe.reward.missing_eos is not None:  # without it, truncated answers are scored like others
        fix = (
            f"raise sampling.max_tokens = {recipe.sampling.max_tokens}, or train the model to end (SFT on rows that end in EOS)"
        )
        return check_result("answers", "warning", what, fix)
    return check_result("answers", "ok", what)


def _treated(recipe: LanguageRecipe, total: torch.Tensor, valid: torch.Tensor, ended: torch.Tensor) -> list[Finding]:
    """The scores after ``reward.missing_eos`` is applied to truncated answers.   total, valid, ended [answers]"""
    settings, values, complete = recipe.reward, total[valid], total[valid & ended]
    if settings.missing_eos is None or bool(ended.all()) or not len(values):
        return []
    spread, name = float(values.std(correction=0)), "truncated answers"
    what = f"with reward.missing_eos = {settings.missing_eos!r} they earn {float(values.mean()):.3g} ± {spread:.3g}"
    if spread == 0:
        return [check_result(name, "warning", f"{what}: all scores are equal", "raise sampling.max_tokens")]
    lower = int((complete < settings.missing_eos_value).sum())
    if settings.missing_eos == "penalty" and 4 * lower >= max(1, len(complete)):
        earned = f"each earns {settings.missing_eos_value:g}, more than {lower} of {len(complete)} complete ones"
        fix = f"set reward.missing_eos_value = {math.ceil(complete.min()) - 1}, below their lowest score"
        return [check_result(name, "warning", earned, fix)]
    return [check_result(name, "ok", what)]
