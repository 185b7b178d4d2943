"""Atari preprocessing on the real emulator: observations, ends of episodes, training rewards and scores."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot import SurefootError
from surefoot.control.environments import make_environments
from surefoot.control.environments.atari import EpisodicLife, make_atari, register
from surefoot.control.environments.looped import Environments, LoopedEnvironments
from surefoot.control.spaces import BARE
from surefoot.control.world import training_environments
from surefoot.recipes.presets import find_recipe
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("ale_py")
cv2 = pytest.importorskip("cv2")

BREAKOUT, INVADERS = "ALE/Breakout-v5", "ALE/SpaceInvaders-v5"
STILL = {"repeat_action_probability": 0.0}
NOOP, FIRE = 0, 1


def looped(task: str, count: int = 1, purpose: str = "training", **arguments: Any) -> LoopedEnvironments:
    made = make_environments(task, {**STILL, **arguments}, count, 3, purpose)
    assert isinstance(made, LoopedEnvironments)
    return made


def recorded(task: str, purpose: str = "training", **arguments: Any) -> tuple[Any, list[tuple[int, float]]]:
    """An environment, and every frame that its emulator is asked for: (action, reward)."""
    env = make_atari(task, purpose, **{**STILL, **arguments})
    base, frames = env.unwrapped, []
    real = base.step

    def step(action: int) -> Any:
        result = real(action)
        frames.append((int(action), float(result[1])))
        return result

    base.step = step  # type: ignore[method-assign]
    return env, frames


# ---- what is seen -----------------------------------------------------------------------------------------------------


def test_observations_are_four_grey_frames_of_84_by_84_oldest_first() -> None:
    env = make_atari(BREAKOUT)
    observation, _ = env.reset(seed=1)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert observation in env.observation_space
    after = env.step(FIRE)[0]
    assert np.array_equal(after[:3], observation[1:])
    assert not np.array_equal(after[3], observation[3])


def test_an_action_lasts_four_frames_and_shows_the_larger_of_the_last_two() -> None:
    """Judged by the emulator itself, a frame at a time."""
    env = make_atari(INVADERS, noop_max=0, fire=False, **STILL)
    env.reset(seed=5)
    raw = gymnasium.make(INVADERS, frameskip=1, obs_type="grayscale", disable_env_checker=True, **STILL)
    raw.reset(seed=5)
    for action in (3, 1, 2, 0, 3):
        seen = env.step(action)[0][-1]
        frames = [raw.step(action)[0] for _ in range(4)]
        larger = np.maximum(frames[2], frames[3])
        assert np.array_equal(seen, cv2.resize(larger, (84, 84), interpolation=cv2.INTER_AREA))


def test_a_game_begins_with_1_to_30_idle_frames_that_its_seed_decides() -> None:
    env, frames = recorded(BREAKOUT, fire=False)
    waited = []
    for seed in (*range(12), 3):
        frames.clear()
        env.reset(seed=seed)
        assert {action for action, _ in frames} == {NOOP}
        waited.append(len(frames))
    assert min(waited) >= 1
    assert max(waited) <= 30
    assert len(set(waited)) > 4
    assert waited[-1] == waited[3]


def test_a_game_begins_as_if_its_cartridge_had_just_been_loaded_whatever_was_played_before() -> None:
    """Assault, because a plain reset of the emulator shows that it was played before."""
    task = "ALE/Assault-v5"
    loading = gymnasium.make(task, frameskip=1, obs_type="grayscale", disable_env_checker=True, **STILL)
    loading = gymnasium.wrappers.AtariPreprocessing(loading)
    ours = make_atari(task, stack=1, fire=False, sign_rewards=False, **STILL)
    generator = np.random.default_rng(0)
    ours.reset(seed=1)
    for _ in range(40):
        ours.step(int(generator.integers(7)))
    assert np.array_equal(ours.reset(seed=2)[0][0], loading.reset(seed=2)[0])
    for _ in range(40):
        action = int(generator.integers(4))
        a, b = ours.step(action), loading.step(action)
        assert np.array_equal(a[0][0], b[0])
        assert a[1] == b[1]
        assert np.array_equal(ours.unwrapped.ale.getRAM(), loading.unwrapped.ale.getRAM())  # type: ignore[attr-defined]


# ---- what ends --------------------------------------------------------------------------------------------------------


def test_fire_is_pressed_whenever_a_life_begins_and_never_otherwise() -> None:
    for purpose in ("training", "evaluation"):
        env, frames = recorded(BREAKOUT, purpose)
        env.reset(seed=1)
        assert [action for action, _ in frames[-4:]] == [FIRE] * 4
        frames.clear()
        while env.unwrapped.ale.lives() > 3:
            env.step(NOOP)
        pressed = "".join(str(action) for action, _ in frames)
        assert pressed.count("1111") == 2
        assert pressed.replace("1111", "").strip("0") == ""
        assert pressed.endswith("1111")


def test_a_game_without_a_fire_button_has_none_pressed() -> None:
    env, frames = recorded("ALE/Freeway-v5")
    env.reset(seed=1)
    assert {action for action, _ in frames} == {NOOP}


def test_a_lost_life_ends_the_value_and_only_the_last_one_the_game() -> None:
    environments = looped(BREAKOUT)
    environments.reset()
    ale, ends = environments.environments[0].unwrapped.ale, []  # type: ignore[attr-defined]
    while environments.records[0].number == 0:
        before = ale.lives()
        step = environments.step(np.zeros(1, int))
        assert step.life_lost is not None
        if step.terminated[0]:
            ends.append((before, bool(step.life_lost[0]), bool(step.done[0])))
    assert ends == [(5, True, False), (4, True, False), (3, True, False), (2, True, False), (1, False, True)]


def test_in_evaluation_or_when_switched_off_only_whole_games_end() -> None:
    for environments in (looped(BREAKOUT, purpose="evaluation"), looped(BREAKOUT, episodic_life=False)):
        environments.reset()
        ends = 0
        while environments.records[0].number == 0:
            step = environments.step(np.zeros(1, int))
            ends += int(step.terminated[0])
        assert ends == 1
        assert step.done.all()


# ---- what is learned from, and what is counted ------------------------------------------------------------------------


def test_training_learns_from_signs_and_counts_the_true_score_which_is_what_evaluation_rewards() -> None:
    training, frames = recorded(INVADERS)
    evaluation, evaluated = recorded(INVADERS, "evaluation")
    for env in (training, evaluation):
        env.reset(seed=2)
    frames.clear()
    evaluated.clear()
    generator, score, truth, learned = np.random.default_rng(0), 0.0, 0.0, set()
    for _ in range(220):
        action = int(generator.integers(6))
        ours, theirs = training.step(action), evaluation.step(action)
        assert np.array_equal(ours[0], theirs[0])
        assert ours[2:4] == theirs[2:4]
        learned.add(ours[1])
        score += ours[4]["surefoot"]["score"]
        truth += theirs[1]
        assert "surefoot" not in theirs[4]
        if ours[2]:
            break
    assert learned == {0.0, 1.0}
    assert score == truth == sum(reward for _, reward in frames) == sum(reward for _, reward in evaluated)
    assert score >= 30


def test_rewards_can_be_learned_from_as_they_are() -> None:
    env, _ = recorded(INVADERS, sign_rewards=False)
    env.reset(seed=2)
    generator = np.random.default_rng(0)
    rewards = [env.step(int(generator.integers(6)))[1] for _ in range(120)]
    assert max(rewards) >= 5


class Generous(gymnasium.Env[Any, Any]):
    """Two lives of one step each, and the FIRE that begins the second one is worth 7 points."""

    observation_space, action_space = gymnasium.spaces.Box(0, 255, (1,), np.uint8), gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.ale, self.left = self, 2

    def lives(self) -> int:
        return self.left

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = 2
        return np.zeros(1, np.uint8), {}

    def step(self, action: Any) -> Any:
        self.left -= action == NOOP
        return np.zeros(1, np.uint8), 7.0 if action == FIRE else 1.0, self.left == 0, False, {}


def test_rewards_of_the_fire_action_after_a_lost_life_count() -> None:
    env = EpisodicLife(Generous(), fire=True, training=True, ends_value=True)
    env.reset()
    _, reward, terminated, _, info = env.step(NOOP)
    assert (reward, terminated, info["surefoot"]) == (8.0, False, {"score": 8.0, "life_lost": True})


# ---- resume, and other processes --------------------------------------------------------------------------------------


def assert_same_from_here(a: Environments, b: Environments, steps: int) -> None:
    generator = np.random.default_rng(1)
    for _ in range(steps):
        actions = generator.integers(0, 4, a.count)
        first, second = a.step(actions), b.step(actions)
        assert np.array_equal(first.observations[BARE], second.observations[BARE])
        assert np.array_equal(first.scores, second.scores)  # type: ignore[arg-type]
        assert np.array_equal(first.terminated, second.terminated)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_a_game_in_its_second_life_is_restored_exactly(sticky: float, tmp_path: Path) -> None:
    environments, again = (looped(BREAKOUT, 2, repeat_action_probability=sticky) for _ in range(2))
    environments.reset()
    for _ in range(40):
        environments.step(np.zeros(2, int))
    assert environments.environments[0].unwrapped.ale.lives() == 4  # type: ignore[attr-defined]
    save_checkpoint(tmp_path / "state", {"environments": environments.state_dict()})
    _, lost = again.load_state_dict(load_checkpoint(tmp_path / "state")["environments"])
    assert lost == {}
    assert_same_from_here(environments, again, 60)


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_vector_environments_of_games_see_learn_and_count_alike(backend: str) -> None:
    if backend == "envpool":
        pytest.importorskip("envpool")
    recipe = find_recipe(BREAKOUT, {"rollout": {"environments": 2, "backend": backend}})
    environments = training_environments(BREAKOUT, recipe)
    assert environments.reset()[BARE].shape == (2, 4, 84, 84)
    assert environments.observation_space == make_atari(BREAKOUT).observation_space
    lives, games, score, learned = 0, 0, 0.0, set()
    generator = np.random.default_rng(0)
    resting = np.zeros(2, bool)
    for _ in range(600):
        step = environments.step(generator.integers(0, 4, 2))
        assert step.life_lost is not None
        assert step.scores is not None
        if backend == "native":  # resets at the end of a game only
            assert np.array_equal(step.ignored, resting)
        resting = step.done
        lives, games = lives + int(step.life_lost.sum()), games + int(step.done.sum())
        score += float(step.scores.sum())
        learned |= set(step.rewards.tolist())
        if games >= 2:
            break
    environments.close()
    assert games >= 2
    assert lives >= 4 * games
    assert learned == {0.0, 1.0}
    assert score >= 2


# ---- what is asked for, and what is rejected ---------------------------------------------------------------------------


def test_every_game_has_the_preset_and_one_that_does_not_exist_is_rejected_with_a_suggestion() -> None:
    recipe = find_recipe("ALE/Qbert-v5")
    assert recipe.task == "ALE/Qbert-v5"
    assert recipe.environment == STILL
    assert (recipe.batch_size, recipe.objective.value_coefficient) == (1024, 1.0)
    with pytest.raises(SurefootError, match=r"did you mean 'ALE/Qbert-v5'"):
        find_recipe("ALE/Qberd-v5")


def test_preprocessing_can_be_switched_off() -> None:
    assert make_atari(BREAKOUT, preprocess=False).observation_space.shape == (210, 160, 3)


@pytest.mark.parametrize("arguments", [{"frameskip": 4}, {"obs_type": "ram"}])
def test_arguments_that_would_undo_the_preprocessing_are_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(SurefootError, match=rf"environment.{next(iter(arguments))}=.*set environment.(frame_skip|preprocess)"):
        looped(BREAKOUT, **arguments)


@pytest.mark.parametrize("package", ["ale_py", "cv2"])
def test_a_missing_package_names_the_extra_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SurefootError, match=r"task='ALE/Breakout-v5': needs an extra .*pip install .*\[atari\]'"):
        looped(BREAKOUT)
