"""One iteration of PPO on Stable-Baselines3's own rollouts gives the same advantages and the same weights.

The peer normalises advantages by the unbiased deviation of a minibatch, and Surefoot by the biased one; so neither does here.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor

from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.recipes.presets import find_recipe
from surefoot.runs.factory import make_learner

STEPS, EPOCHS, SIZE = 512, 4, 64
PARTS = {
    "actor_trunk.layers.0": "mlp_extractor.policy_net.0",
    "actor_trunk.layers.2": "mlp_extractor.policy_net.2",
    "actor_head": "action_net",
    "critic_trunk.layers.0": "mlp_extractor.value_net.0",
    "critic_trunk.layers.2": "mlp_extractor.value_net.2",
    "critic_head": "value_net",
}


class Seen(BaseCallback):
    """What each step gave, before the peer adds the value of a truncated episode's last observation to its reward."""

    def _on_rollout_start(self) -> None:
        self.steps: list[tuple[float, bool, dict[str, Any]]] = []

    def _on_step(self) -> bool:
        now = self.locals
        self.steps.append((float(now["rewards"][0]), bool(now["dones"][0]), now["infos"][0]))
        return True


def weights_of(peer: PPO) -> dict[str, Tensor]:
    theirs = peer.policy.state_dict()
    actual = {f"{ours}.{kind}": theirs[f"{name}.{kind}"] for ours, name in PARTS.items() for kind in ("weight", "bias")}
    return actual | ({"log_std": theirs["log_std"]} if "log_std" in theirs else {})


def rollout_of(peer: PPO, seen: Seen, learner: Learner) -> Rollout:
    """What the peer collected, as a collector of Surefoot's tells it."""
    buffer = peer.rollout_buffer

    def recorded(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.swapaxes(x, 0, 1).copy())

    rewards, dones, infos = zip(*seen.steps, strict=True)
    truncated = torch.tensor([[info.get("TimeLimit.truncated", False) for info in infos]])
    values, last = recorded(buffer.values), torch.from_numpy(peer._last_obs)
    with torch.no_grad():
        following = torch.cat([values[:, 1:], peer.policy.predict_values(last)], 1)
        for t, info in enumerate(infos):
            if truncated[0, t]:
                following[0, t] = peer.policy.predict_values(torch.from_numpy(info["terminal_observation"])[None])
    actions = recorded(buffer.actions)
    inputs = {"observation": recorded(buffer.observations).float()}
    actions = actions.squeeze(-1).long() if isinstance(peer.action_space, gymnasium.spaces.Discrete) else actions.float()
    with torch.no_grad():
        evaluation = learner.policy(inputs, actions)
    torch.testing.assert_close(evaluation.values, values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(evaluation.log_probs, recorded(buffer.log_probs), rtol=1e-5, atol=1e-5)
    return Rollout(
        inputs=inputs,
        actions=actions,
        mask=torch.ones(1, STEPS, dtype=torch.bool),
        old_log_probs=recorded(buffer.log_probs),
        old_distribution=evaluation.distribution,
        values=values,
        next_values=following,
        rewards=torch.tensor([rewards]),
        terminated=torch.tensor([dones]) & ~truncated,
        truncated=truncated,
        unit="step",
        steps=STEPS,
    )


@pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1"])  # one is truncated only, the other terminated
def test_an_iteration_ends_at_the_weights_of_stable_baselines3(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = VecNormalize(DummyVecEnv([lambda: Monitor(gymnasium.make(task))]), gamma=0.97)
    settings: dict[str, Any] = {"n_steps": STEPS, "batch_size": SIZE, "n_epochs": EPOCHS, "gamma": 0.97, "gae_lambda": 0.9}
    settings |= {"clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.7, "max_grad_norm": 0.4, "normalize_advantage": False}
    peer = PPO("MlpPolicy", environments, learning_rate=1e-3, seed=1, device="cpu", **settings)
    objective = {"gamma": 0.97, "gae_lambda": 0.9, "value_coefficient": 0.7, "entropy_coefficient": 0.01}
    objective |= {"normalise_advantages": "none", "trust_region": {"clip": 0.1}}
    recipe = find_recipe(
        task,
        {
            "objective": objective | {"reuse": {"epochs": EPOCHS, "minibatches": STEPS // SIZE}},
            "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "max_grad_norm": 0.4},
            "network": {"hidden": [64, 64], "activation": "tanh", "shared_trunk": False},
        },
    )
    world = ControlWorld(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 10_000)
    ours = dict(world.policy.named_parameters())
    with torch.no_grad():
        for name, value in weights_of(peer).items():
            ours.pop(name).copy_(value)
    assert not ours, "parameters that the peer does not have"
    seen, orders = (Seen(), [torch.randperm(STEPS, generator=torch.Generator().manual_seed(epoch)) for epoch in range(EPOCHS)])
    _, callback = peer._setup_learn(10_000, seen)
    buffer = peer.rollout_buffer
    for _ in range(2):  # the second with Adam's moments of the first
        peer.collect_rollouts(environments, callback, buffer, STEPS)
        rollout = rollout_of(peer, seen, learner)
        assert (rollout.terminated | rollout.truncated).any()
        credit = assign_credit(rollout, recipe.objective)
        for actual, expected in ((credit.advantages, buffer.advantages), (credit.returns, buffer.returns)):
            np.testing.assert_allclose(actual, np.swapaxes(expected, 0, 1), rtol=1e-4, atol=1e-5)
        own, theirs = iter(orders), iter(orders)
        monkeypatch.setattr("surefoot.core.steps.random_order", lambda count, generator, own=own: next(own))

        def in_order(size: int, theirs: Iterator[Tensor] = theirs) -> Iterator[Any]:
            if not buffer.generator_ready:
                for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
                    setattr(buffer, name, buffer.swap_and_flatten(getattr(buffer, name)))
                buffer.generator_ready = True
            return (buffer._get_samples(rows.numpy()) for rows in next(theirs).split(size))

        monkeypatch.setattr(buffer, "get", in_order)
        peer._current_progress_remaining = 1.0
        peer.train()
        learner.update(rollout, credit, state)
        parameters = dict(world.policy.named_parameters())
        for name, value in weights_of(peer).items():
            torch.testing.assert_close(
                parameters[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert next(own, None) is None, "an order that was not asked for"
    world.close()
