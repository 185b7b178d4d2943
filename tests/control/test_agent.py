"""Agents after training: acting, evaluation, saving and loading, with the same results for the same seed."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import surefoot
from surefoot import A2C, PPO_CLIP, REINFORCE, NotFiniteError, SurefootError
from surefoot.control import evaluate
from surefoot.control.environments.looped import episode_seed
from surefoot.control.export import export_agent
from surefoot.errors import announced

from .tiny import Endless, bare

QUICK: dict[str, Any] = {
    "rollout": {"environments": 4, "steps": 64},
    "objective": {"reuse": {"epochs": 4, "minibatches": 4}},
    "evaluation": {"episodes": 0},
}
QUICK_ONCE: dict[str, Any] = {"rollout": {"environments": 1, "steps": 8}, "evaluation": {"episodes": 0}}
BOTH = {"observations": True, "rewards": True}
CARTPOLE = np.array([0.01, -0.02, 0.03, 0.04], np.float32)


def cartpole(seed: int = 1, steps: int = 1000, **fields: Any) -> surefoot.Agent:
    return surefoot.train("CartPole-v1", PPO_CLIP, steps=steps, seed=seed, **{**QUICK, **fields})


def pendulum(**fields: Any) -> surefoot.Agent:
    return surefoot.train("Pendulum-v1", PPO_CLIP, steps=600, seed=1, **{**QUICK, "normalise": BOTH, **fields})


def assert_same_weights(a: surefoot.Agent, b: surefoot.Agent) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class Paid(Endless):
    """Episodes of one step that pay 40 or 60."""

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(self.np_random.choice([40, 60])), True, False, {}


# ---- training ---------------------------------------------------------------------------------------------------------


def test_without_a_run_folder_training_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=500, seed=1)
    surefoot.evaluate(agent, episodes=1)
    assert list(tmp_path.rglob("*")) == []


def test_the_callback_gets_the_metrics_of_each_iteration() -> None:
    seen: list[Any] = []
    cartpole(steps=1000, callback=seen.append)
    assert [metrics["iteration"] for metrics in seen] == [1, 2, 3, 4]
    assert [metrics["steps"] for metrics in seen] == [256, 512, 768, 1024]
    assert [metrics["updates"] for metrics in seen] == [16, 32, 48, 64]
    for metrics in seen:
        for name in ("episode_return", "policy_loss", "value_loss", "entropy", "kl", "learning_rate", "steps_per_second"):
            assert isinstance(metrics[name], float), name


def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_seed_others() -> None:
    one = cartpole(seed=1)
    assert_same_weights(one, cartpole(seed=1))
    other = cartpole(seed=2).state_dict()
    weights = [name for name in other if name.endswith("weight")]
    assert len(weights) == 6
    assert not any(torch.equal(one.state_dict()[name], other[name]) for name in weights)


def test_evaluations_during_training_do_not_change_the_weights() -> None:
    assert_same_weights(cartpole(), cartpole(evaluation={"every": 300, "episodes": 3}))


def test_the_global_generators_neither_steer_training_nor_are_moved_by_it() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = cartpole(steps=500)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(2)
    np.random.seed(2)
    assert_same_weights(one, cartpole(steps=500))


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("CartPole-v1", {"network": {"shared_trunk": True, "activation": "relu", "hidden": [16]}}),
        ("CartPole-v1", {"network": {"hidden": []}, "optimizer": {"critic_learning_rate": 1e-2}}),
        ("Pendulum-v1", {"network": {"log_std": -1.0}, "optimizer": {"max_grad_norm": "none"}}),
        ("CartPole-v1", {"optimizer": {"micro_batch": 10}}),
    ],
    ids=str,
)
def test_other_networks_and_optimizers_train(task: str, fields: dict[str, Any], tmp_path: Path) -> None:
    agent = surefoot.train(task, PPO_CLIP, steps=256, **QUICK, **fields)
    observation = np.full(agent.observation_space.shape, 0.1, np.float32)
    assert np.isfinite(agent.value(observation))
    agent.save(tmp_path / "agent")
    assert surefoot.load(tmp_path / "agent").value(observation) == agent.value(observation)


def test_a_shared_trunk_is_used_by_both_heads_and_separate_ones_share_no_parameter() -> None:
    shared, apart = (cartpole(steps=1, network={"shared_trunk": shared}).policy for shared in (True, False))
    assert shared.critic_trunk is None
    assert list(shared.critic_parameters()) == []
    inputs = torch.randn(5, 4)
    for policy, reaches in ((shared, True), (apart, False)):
        policy.zero_grad()
        policy.values(bare(inputs)).sum().backward()
        gradient = policy.actor_trunk.layers[0].weight.grad
        assert (gradient is not None and bool(gradient.any())) is reaches


# ---- acting -----------------------------------------------------------------------------------------------------------


def test_discrete_actions_come_as_integers_of_their_space_one_or_many() -> None:
    agent = cartpole(steps=1)
    action, state = agent.predict(CARTPOLE)
    assert state is None
    assert isinstance(action, np.int64)
    assert agent.action_space.contains(action)
    actions, state = agent.predict(np.stack([CARTPOLE] * 100))
    assert state is None
    assert actions.shape == (100,)
    assert actions.dtype == np.int64
    assert set(actions.tolist()) == {0, 1}
    assert agent.predict(CARTPOLE[None])[0].shape == (1,)


@pytest.mark.parametrize("deterministic", [False, True])
def test_box_actions_come_as_arrays_within_their_bounds_one_or_many(deterministic: bool) -> None:
    agent = pendulum(network={"log_std": 2.0})
    observation = np.array([1.0, 0.0, 0.5], np.float32)
    action, state = agent.predict(observation, deterministic=deterministic)
    assert state is None
    assert action.shape == (1,)
    assert agent.action_space.contains(action)
    actions, _ = agent.predict(np.stack([observation] * 200), deterministic=deterministic)
    assert actions.shape == (200, 1)
    assert actions.dtype == np.float32
    assert all(agent.action_space.contains(row) for row in actions)
    assert (np.abs(actions) == 2).any() == (not deterministic)  # at e² the bounds are met often


def test_the_deterministic_action_is_the_likeliest_and_a_sampled_one_follows_the_policy() -> None:
    agent = cartpole(steps=3000)
    many = np.stack([CARTPOLE] * 20_000)
    with torch.no_grad():
        probabilities = agent.policy.step(bare(torch.from_numpy(CARTPOLE)))[0].logits.softmax(-1)
    assert agent.predict(CARTPOLE, deterministic=True)[0] == int(probabilities.argmax())
    assert len(set(agent.predict(many[:50], deterministic=True)[0].tolist())) == 1
    assert agent.predict(many)[0].mean() == pytest.approx(float(probabilities[1]), abs=0.02)


def test_predict_sees_observations_through_the_normaliser() -> None:
    agent = pendulum()
    observations = np.float32([[1, 0, 0], [0, 1, 3], [-1, 0, -5]])
    with torch.no_grad():
        mean = agent.policy.step(agent.observation_normaliser(bare(torch.from_numpy(observations))))[0].mean
    predicted = agent.predict(observations, deterministic=True)[0]
    np.testing.assert_allclose(predicted, mean.clamp(-2, 2), rtol=1e-5)
    agent.observation_normaliser.mean += 1.0
    assert not np.allclose(agent.predict(observations, deterministic=True)[0], predicted, rtol=1e-3)


def test_predict_returns_the_state_and_accepts_lists_and_doubles() -> None:
    agent = cartpole(steps=1)
    action, state = agent.predict(CARTPOLE.astype(np.float64).tolist(), state="mine", episode_start=np.array([True]))
    assert action in (0, 1)
    assert state == "mine"


def test_an_observation_of_the_wrong_shape_or_that_is_not_finite_is_rejected() -> None:
    agent = cartpole(steps=1)
    for method in (agent.predict, agent.value):
        for shape in ((), (2, 3), (2, 2, 4)):
            with pytest.raises(SurefootError, match=r"observation: has shape .*; this agent takes \(4,\)"):
                method(np.zeros(shape, np.float32))
        with pytest.raises(SurefootError, match=r"observation: is not finite"):
            method([0.0, np.inf, 0.0, 0.0])


def test_the_repr_of_an_agent_is_one_line_and_other_objects_are_not_evaluated() -> None:
    assert re.fullmatch(r"<Agent PPO_CLIP on CartPole-v1, [\d,]+ parameters>", repr(cartpole(steps=1)))
    with pytest.raises(SurefootError, match=r"runs/first: no such run folder; see what there is with: ls .*/runs"):
        surefoot.evaluate("runs/first", episodes=1)


def test_value_is_a_number_for_one_observation_and_an_array_for_several() -> None:
    agent = pendulum()
    observations = np.float32([[1, 0, 0], [0, 1, 0.5], [-1, 0, -1]])
    values = agent.value(observations)
    assert values.shape == (3,)
    for observation, expected in zip(observations, values, strict=True):
        one = agent.value(observation)
        assert isinstance(one, float)
        assert one == pytest.approx(float(expected), rel=1e-5)
    with torch.no_grad():
        normalised = agent.observation_normaliser(bare(torch.from_numpy(observations)))
        features = agent.policy.critic_trunk(normalised)
        unit = float(agent.reward_normaliser.unit)  # of the targets that the critic learned
        np.testing.assert_allclose(values, agent.policy.critic_head(features).squeeze(-1) * unit, rtol=1e-5)


def test_the_value_of_an_agent_without_a_critic_is_an_error() -> None:
    agent = surefoot.train("CartPole-v1", REINFORCE, steps=1, evaluation={"episodes": 0})
    with pytest.raises(SurefootError, match=r"value: REINFORCE has no critic; .*baseline = 'critic'"):
        agent.value(CARTPOLE)


# ---- saving -----------------------------------------------------------------------------------------------------------


def test_a_loaded_agent_has_the_same_actions_values_and_normalisers(tmp_path: Path) -> None:
    agent = pendulum()
    agent.save(tmp_path / "agent")
    again = surefoot.load(tmp_path / "agent")
    assert_same_weights(agent, again)
    assert (again.observation_space, again.action_space) == (agent.observation_space, agent.action_space)
    assert again.recipe == agent.recipe
    observations = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    assert np.array_equal(agent.value(observations), again.value(observations))
    for deterministic in (True, False):
        ours, theirs = (each.predict(observations, deterministic=deterministic)[0] for each in (agent, again))
        assert np.array_equal(ours, theirs)
    assert surefoot.evaluate(again, episodes=2) == surefoot.evaluate(agent, episodes=2)


def test_saving_again_replaces_and_saving_over_something_else_is_rejected(tmp_path: Path) -> None:
    first, second = cartpole(steps=1, seed=1), cartpole(steps=1, seed=2)
    first.save(tmp_path / "agent")
    second.save(tmp_path / "agent")
    assert_same_weights(surefoot.load(tmp_path / "agent"), second)
    surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "run", steps=64, rollout={"environments": 2, "steps": 32})
    for folder, file in (("thesis", "chapter1.txt"), ("web", "manifest.json"), ("agent", "notes/why.md")):
        (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / file).write_text('{"name": "irreplaceable"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder in ("thesis", "web", "agent", "run", "run/traces", "run/checkpoints/64"):
        with pytest.raises(SurefootError, match=r"not a checkpoint \(.*\); choose an empty folder"):
            first.save(tmp_path / folder)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# ---- judging ----------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_whole_episodes_each_from_its_own_seed() -> None:
    agent = cartpole(steps=2000)
    result = surefoot.evaluate(agent, episodes=13, seed=5)
    returns, env = [], gymnasium.make("CartPole-v1")
    for i in range(13):
        observation, _ = env.reset(seed=episode_seed(5, i % 10, i // 10, "evaluation"))
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.predict(observation, deterministic=True)[0])
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    assert result.returns == returns == result.lengths
    assert result.mean_return == pytest.approx(np.mean(returns))
    assert result.std_return == pytest.approx(np.std(returns))
    assert (result.episodes, result.seed) == (13, 5)


def test_the_same_evaluation_seed_gives_the_same_result_and_another_seed_another() -> None:
    agent = cartpole(steps=2000)
    assert surefoot.evaluate(agent, episodes=5).returns != surefoot.evaluate(agent, episodes=5, deterministic=False).returns
    for deterministic in (True, False):
        first = surefoot.evaluate(agent, episodes=5, seed=3, deterministic=deterministic)
        assert surefoot.evaluate(agent, episodes=5, seed=3, deterministic=deterministic) == first
        assert surefoot.evaluate(agent, episodes=5, seed=4, deterministic=deterministic).returns != first.returns


def test_an_agent_is_evaluated_on_the_environment_that_it_was_trained_in() -> None:
    agent = surefoot.train("CartPole-v1", A2C, steps=1, environment={"max_episode_steps": 7}, evaluation={"episodes": 0})
    assert set(surefoot.evaluate(agent, episodes=5).lengths) == {7}
    assert set(surefoot.evaluate(agent, "CartPole-v1", episodes=5).lengths) == {7}


def test_stable_baselines3s_own_evaluate_policy_works_on_an_agent() -> None:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    agent = cartpole(steps=3000)
    env = Monitor(gymnasium.make("CartPole-v1"))
    env.reset(seed=0)
    mean, std = evaluate_policy(agent, env, n_eval_episodes=20)
    ours = surefoot.evaluate(agent, episodes=20)
    assert abs(mean - ours.mean_return) < 4 * (std + ours.std_return) / np.sqrt(20) + 1
    returns, lengths = evaluate_policy(
        agent, make_vec_env("CartPole-v1", 3), 6, deterministic=False, return_episode_rewards=True
    )
    assert returns == lengths
    assert len(returns) == 6
    box = pendulum()
    returns, lengths = evaluate_policy(box, make_vec_env("Pendulum-v1", 2), 2, return_episode_rewards=True)
    assert lengths == [200, 200]
    assert all(-2000 < total < 0 for total in returns)


class Sick(Endless):
    """Says something that is not finite at its third step, or never ends."""

    what = "observation"

    def step(self, action: Any) -> Any:
        self.t += 1
        ill = self.t == 3
        seen = np.float32([0, np.nan if ill and self.what == "observation" else 0])
        return seen, np.inf if ill and self.what == "reward" else 1.0, False, False, {}


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_stops_an_evaluation_with_the_words_of_training(what: str) -> None:
    agent = surefoot.train(Endless, A2C, steps=1, **QUICK_ONCE)

    class Ill(Sick):
        pass

    Ill.what = what
    line = rf"Ill: the {what} of environment 0 at step 3 of its episode is not finite .*, in an evaluation; .* evaluation.seed"
    with pytest.raises(NotFiniteError, match=line):
        surefoot.evaluate(agent, Ill, episodes=2)


def test_an_endless_episode_ends_the_evaluation_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluate.MAX_EPISODE_STEPS == 1_000_000
    monkeypatch.setattr(evaluate, "MAX_EPISODE_STEPS", 50)
    agent = surefoot.train(Endless, A2C, steps=1, **QUICK_ONCE)
    with pytest.raises(SurefootError, match=r"task='Endless': an episode did not end within 50 steps .*TimeLimit"):
        surefoot.evaluate(agent, Endless, episodes=2)
    limited = partial(gymnasium.wrappers.TimeLimit, Endless(), 50)
    assert surefoot.evaluate(agent, limited, episodes=1).lengths == [50]  # the last step that is waited for


def test_a_long_episode_of_an_evaluation_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "LONG_EPISODE_STEPS", 50)
    agent = surefoot.train(Endless, A2C, steps=1, **QUICK_ONCE)
    lines: list[str] = []
    for limit in (49, 50, 70):
        with announced(lines.append):
            surefoot.evaluate(agent, lambda limit=limit: gymnasium.wrappers.TimeLimit(Endless(), limit), episodes=12)
    assert len(lines) == 1
    assert re.match(r"evaluation: an episode of .* has run for 50 steps.*TimeLimit", lines[0])


# ---- V in the task's units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [True, False])
def test_a_value_is_the_discounted_return_in_the_rewards_of_the_task(rewards: bool, tmp_path: Path) -> None:
    agent = surefoot.train(
        Paid,
        PPO_CLIP,
        steps=3_000,
        optimizer={"learning_rate": 3e-2, "schedule": "linear"},
        **{**QUICK, "normalise": {"rewards": rewards}},
    )
    seen = np.zeros((3, 2), np.float32)
    assert agent.value(seen[0]) == pytest.approx(50, rel=0.1)
    np.testing.assert_allclose(agent.value(seen), [agent.value(seen[0])] * 3, rtol=1e-5)
    agent.save(tmp_path / "kept")
    assert surefoot.load(tmp_path / "kept").value(seen[0]) == agent.value(seen[0])
    export_agent(agent, tmp_path / "a.pt2", "torch")
    expected = torch.export.load(tmp_path / "a.pt2").module()(torch.from_numpy(seen))[-1]
    np.testing.assert_allclose(expected, agent.value(seen), rtol=1e-5)
