"""Vector environments of Gymnasium ids and EnvPool: steps, rejected forms, and autoreset modes."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import surefoot
from surefoot import SurefootError
from surefoot.control.environments.looped import Step
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.evaluate import greedy_episode
from surefoot.control.networks import EPISODE_STARTS
from surefoot.control.spaces import BARE
from surefoot.control.world import training_environments
from surefoot.recipes.presets import find_recipe

from .tiny import Endless, clockworks, fresh_state, world_of

BACKENDS = ["native", "envpool"]
ONCE: dict[str, Any] = {"objective": {"reuse": {"epochs": 1, "minibatches": 1}}, "evaluation": {"episodes": 0}}


def environments_of(backend: str, task: str = "CartPole-v1", **arguments: Any) -> VectorEnvironments:
    if backend == "envpool":
        pytest.importorskip("envpool")
    rollout = {"environments": 3, "backend": backend}
    changes = {"rollout": rollout, "environment": arguments, "objective": {"reuse": {"minibatches": 1}}}
    made = training_environments(task, find_recipe(task, changes))
    assert isinstance(made, VectorEnvironments)
    return made


# ---- what a step means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kept_transition_is_one_that_the_single_environment_makes(backend: str) -> None:
    """From the row's observation, by the row's action, to the next row's or the final one: CartPole has no hidden state."""
    environments = environments_of(backend, max_episode_steps=12)
    judge = gymnasium.make("CartPole-v1").unwrapped
    generator = np.random.default_rng(0)
    observations, kept, ends = environments.reset(), 0, {"terminated": 0, "truncated": 0}
    for _ in range(80):
        actions = np.array([1, *generator.integers(0, 2, 2)])  # the first falls before its time is out
        step = environments.step(actions)
        for b in np.flatnonzero(~step.ignored):
            judge.reset()
            judge.state = observations[BARE][b].astype(np.float64)  # type: ignore[attr-defined]
            expected, reward, terminated, _, _ = judge.step(int(actions[b]))
            np.testing.assert_allclose(step.observations[BARE][b], expected, rtol=1e-4, atol=1e-5)
            if backend == "envpool" and step.truncated[b]:
                terminated = False  # where both happen at once, EnvPool says truncated only
            assert (step.rewards[b], step.terminated[b]) == (reward, terminated)
            kept += 1
            ends["terminated"] += int(step.terminated[b])
            ends["truncated"] += int(step.truncated[b])
        assert (step.rewards[step.ignored] == 0).all()
        assert step.scores is not None
        assert np.array_equal(step.scores, step.rewards)
        observations = step.observations
    environments.close()
    assert kept > 200
    assert min(ends.values()) > 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_seed_gives_the_same_episodes_and_a_resumed_run_goes_on_with_them(backend: str) -> None:
    first, second = environments_of(backend), environments_of(backend)
    assert np.array_equal(first.reset()[BARE], second.reset()[BARE])
    last = [first.step(np.ones(3, int)).observations for _ in range(30)][-1]
    observations, lost = second.load_state_dict(first.state_dict())
    assert lost == {}
    assert np.array_equal(observations[BARE], last[BARE])
    first.close()
    second.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_trains_and_is_evaluated_in_single_environments(backend: str) -> None:
    if backend == "envpool":
        pytest.importorskip("envpool")
    seen: list[Any] = []
    fields = {"rollout": {"environments": 4, "steps": 16, "backend": backend}, "evaluation": {"episodes": 1, "every": 64}}
    fields["objective"] = {"reuse": {"epochs": 1, "minibatches": 1}}
    agent = surefoot.train("CartPole-v1", steps=64, callback=lambda row: seen.append(row), **fields)
    assert seen[-1]["evaluation_return"] > 0
    assert surefoot.evaluate(agent, episodes=1).returns


def test_an_envpool_of_mujoco_has_the_same_shapes() -> None:
    environments = environments_of("envpool", "HalfCheetah-v5")
    assert environments.reset()[BARE].shape == (3, 17)
    step = environments.step(np.zeros((3, 6), np.float32))
    assert np.isfinite(step.rewards).all()
    environments.close()


# ---- lives and scores -------------------------------------------------------------------------------------------------


class Lives(Endless):
    """Three lives of two steps each, the last of which ends the game; a step is learned from as 1 and scores 5."""

    def step(self, action: Any) -> Any:
        self.t += 1
        lost = self.t % 2 == 0
        return np.full(2, self.t / 10, np.float32), 1.0, self.t == 6, False, {"surefoot": {"score": 5.0, "life_lost": lost}}


def in_mode(mode: str) -> Callable[[], Any]:
    def lives() -> Any:
        return Lives() if mode == "looped" else SyncVectorEnv([Lives, Lives], autoreset_mode=AutoresetMode[mode])

    return lives


@pytest.mark.parametrize("mode", ["looped", *(mode.name for mode in AutoresetMode)])
def test_a_lost_life_ends_the_value_and_the_episode_goes_on_to_its_true_score(mode: str) -> None:
    world = world_of(in_mode(mode), rollout={"environments": 2, "steps": 14})
    rollout = world.collector.collect(fresh_state())
    ends = rollout.terminated[rollout.mask].reshape(2, -1)[:, :12]
    assert ends.tolist() == [[False, True] * 6] * 2
    assert set(rollout.rewards[rollout.mask].tolist()) == {1.0}
    assert rollout.metrics["episode_return"] == 30.0
    assert rollout.metrics["episode_length"] == 6.0
    assert rollout.metrics["episodes"] == 4.0
    world.close()


def test_a_lost_life_is_no_end_for_algorithms_of_whole_episodes() -> None:
    world = world_of(Lives, surefoot.REINFORCE, rollout={"environments": 2, "episodes": 2})
    assert world.collector.collect(fresh_state()).mask.shape == (2, 12)


def test_an_evaluation_counts_whole_episodes_and_their_true_scores() -> None:
    """Where the task is one function, evaluation gets what training gets: changed rewards and lives."""
    agent = surefoot.train(Lives, steps=16, rollout={"environments": 1, "steps": 16}, **ONCE)
    evaluation = surefoot.evaluate(agent, Lives, episodes=3)
    assert evaluation.returns == [30.0] * 3
    assert evaluation.lengths == [6] * 3
    *_, end = greedy_episode(agent, Lives(), "lives", 0, 0, 100)
    assert (end.step, end.reward, end.total) == (6, 5.0, 30.0), "and so does a video"


class PoolLives(Lives):
    """As EnvPool tells of lives: the step that loses one says terminated, and the reset after it goes on with the game."""

    going = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.going:
            return np.full(2, self.t / 10, np.float32), {}
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, over, cut, info = super().step(action)
        self.going = info["surefoot"]["life_lost"] = self.t % 2 == 0 and not over
        return observation, reward, over or self.going, cut, info


def test_a_lost_life_that_a_reset_reports_does_not_clear_the_lstm_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.control.environments.vector.EnvPool", SyncVectorEnv)

    def vector() -> Any:
        return SyncVectorEnv([PoolLives], autoreset_mode=AutoresetMode.NEXT_STEP)

    network, rollout = {"hidden": [4], "lstm": 4}, {"environments": 1, "steps": 18}
    world = world_of(vector, network=network, rollout=rollout)
    actual = world.collector.collect(fresh_state())
    # A game is 6 steps and a reset after each life: two in the middle of it, and the one that begins the next game.
    assert (~actual.mask[0]).nonzero().flatten().tolist() == [2, 5, 8, 11, 14, 17]
    assert actual.inputs[EPISODE_STARTS][0].nonzero().flatten().tolist() == [0, 9]
    assert actual.metrics["episode_return"] == 30.0
    world.close()


def test_a_lost_life_does_not_disturb_the_replay_of_an_episode() -> None:
    world, again = (world_of(Lives, rollout={"environments": 2, "steps": 9}) for _ in range(2))
    world.collector.collect(fresh_state())
    again.collector.load_state_dict(world.collector.state_dict())
    assert again.collector.lost == {}
    assert [record.number for record in again.environments.records] == [1, 1]  # type: ignore[attr-defined]


# ---- autoreset modes --------------------------------------------------------------------------------------------------


class Stated(Endless):
    """Says of itself how it resets."""

    def __init__(self, mode: Any) -> None:
        self.metadata = {"autoreset_mode": mode}


def test_sub_environments_that_state_other_modes_are_named() -> None:
    modes = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
    mixed = SyncVectorEnv([partial(Stated, mode) for mode in modes])
    with pytest.raises(
        SurefootError, match=r"mixed autoreset modes: .* has NEXT_STEP, its environments 1 SAME_STEP, 2 DISABLED"
    ):
        VectorEnvironments(mixed, 1, "tiny")


def test_a_vector_environment_must_state_its_mode_and_may_do_so_by_its_value() -> None:
    vector = SyncVectorEnv([Endless])
    vector.metadata = {}
    with pytest.raises(SurefootError, match=r"metadata\['autoreset_mode'\]=None .*AutoresetMode.NEXT_STEP"):
        VectorEnvironments(vector, 1, "tiny")
    vector.metadata["autoreset_mode"] = "SameStep"
    assert VectorEnvironments(vector, 1, "tiny").mode is AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("actual", "stated", "message"),
    [
        ("SAME_STEP", "NEXT_STEP", r"has NEXT_STEP, but its environments \[0\] gave info\['final_obs'\]"),
        ("NEXT_STEP", "SAME_STEP", r"has SAME_STEP, but its environments \[0\] ended without info\['final_obs'\]"),
    ],
)
def test_a_vector_environment_with_the_wrong_autoreset_mode_fails_at_its_first_end(
    actual: str, stated: str, message: str
) -> None:
    single = clockworks([((2, "terminated"),), ((9, "terminated"),)])
    vector = SyncVectorEnv([partial(next, iter([env])) for env in single], autoreset_mode=AutoresetMode[actual])
    vector.metadata["autoreset_mode"] = AutoresetMode[stated]
    environments = VectorEnvironments(vector, 1, "tiny")
    environments.reset()
    environments.step(np.zeros(2, int))
    with pytest.raises(SurefootError, match=f"mixed autoreset modes: .*{message}"):
        environments.step(np.zeros(2, int))


def test_an_id_with_its_module_has_the_vector_environment_of_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry := dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", registry)
    entry = "gymnasium.envs.classic_control.cartpole:CartPole"
    for name, vector in (("Quick-v0", f', vector_entry_point="{entry}VectorEnv"'), ("Slow-v0", "")):
        module = f"made_for_{name[:4].lower()}"
        (tmp_path / f"{module}.py").write_text(f'import gymnasium\ngymnasium.register("{name}", "{entry}Env"{vector})\n')
    monkeypatch.syspath_prepend(tmp_path)
    fields: dict[str, Any] = {"rollout": {"backend": "native", "environments": 2, "steps": 32}, "evaluation": {"episodes": 0}}
    surefoot.train("made_for_quic:Quick-v0", steps=64, **fields)
    rejected("made_for_slow:Slow-v0", "native", "'made_for_slow:Slow-v0' has no vector environment of its own")


class Stuck(Endless):
    """Over after two steps, and again at every step until it is reset."""

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 2, False, {}


def test_a_next_step_environment_that_leaves_the_reset_to_others_is_rejected() -> None:
    vector = SyncVectorEnv([Stuck], autoreset_mode="Disabled")
    vector.metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP
    environments = VectorEnvironments(vector, 1, "tiny")
    environments.reset()
    steps: list[Step] = [environments.step(np.zeros(1, int)) for _ in range(2)]
    assert steps[-1].done.all()
    with pytest.raises(SurefootError, match=r"AssertionError.*which resets \[0\], has metadata\['autoreset_mode'\]=NEXT_STEP"):
        environments.step(np.zeros(1, int))
    vector._autoreset_envs[:] = False  # Gymnasium's own asserts, another's need not
    with pytest.raises(SurefootError, match=r"has NEXT_STEP, but its environments \[0\] ended again"):
        environments.step(np.zeros(1, int))


# ---- what is rejected --------------------------------------------------------------------------------------------------


def rejected(task: Any, backend: str, *parts: str, **fields: Any) -> None:
    with pytest.raises(SurefootError) as caught:
        surefoot.train(task, steps=64, **{"rollout": {"backend": backend}, **fields})
    for part in (*parts, f"rollout.backend={backend!r}"):
        assert part in str(caught.value)


def test_what_a_backend_can_not_do_is_rejected_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected(Endless, "envpool", "needs an environment id", "Endless", "'workers' or 'loop'")
    rejected("CartPole-v1", "native", "REINFORCE needs them", "objective with a critic", algorithm="REINFORCE")
    monkeypatch.setitem(sys.modules, "envpool", None)
    rejected("CartPole-v1", "envpool", "envpool, which is not installed", "[envpool]'")


def test_an_id_that_envpool_does_not_have_is_rejected_with_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """What an installed EnvPool is asked first."""

        @staticmethod
        def list_all_envs() -> list[str]:
            return ["Pong-v5"]

    monkeypatch.setitem(sys.modules, "envpool", Other)  # type: ignore[arg-type]
    rejected("CartPole-v1", "envpool", "EnvPool has no 'CartPole-v1'", "set rollout.backend = 'workers' or 'loop'")


def test_the_arguments_that_envpool_does_not_take_are_named() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(SurefootError, match=r"EnvPool could not make it with environment=.*sutton"):
        environments_of("envpool", sutton_barto_reward=True)


def test_spaces_of_another_shape_than_a_single_environment_s_are_rejected() -> None:
    single = gymnasium.spec("CartPole-v1").entry_point
    gymnasium.register("Wide-v0", single, vector_entry_point=lambda num_envs: SyncVectorEnv([Endless] * num_envs))  # type: ignore[arg-type]
    try:
        rejected(
            "Wide-v0", "native", "its observation space of 'Wide-v0' is Box(-1.0, 1.0, (2,)", "that of a single environment"
        )
    finally:
        del gymnasium.registry["Wide-v0"]
