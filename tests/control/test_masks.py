"""Action masks: a masked action is never taken, has probability 0 and gets no gradient; bad masks are reported."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import surefoot
from surefoot import PPO_CLIP, SurefootError
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.policy import ActorCritic
from surefoot.core.seeding import stream
from surefoot.diagnostics.recipe import check_environment
from surefoot.recipes.control import Network
from surefoot.store.events import Message

from .test_tensor import Rows
from .tiny import Endless, Sampled, fresh_state, small, world_of

SEEN = spaces.Box(-1, 1, (3,))
MANY = {
    "discrete": spaces.Discrete(1000),
    "multidiscrete": spaces.MultiDiscrete([700, 2, 298]),
    "multibinary": spaces.MultiBinary(500),
}
SIZES = {"discrete": (1000,), "multidiscrete": (700, 2, 298), "multibinary": (2,) * 500}


def masks(name: str, rows: int, share: float, seed: int = 0) -> torch.Tensor:
    """[rows, 1000] random ones that allow about ``share``, and something in every part."""
    generator = np.random.default_rng(seed)
    allowed = generator.random((rows, 1000)) < share
    start = 0
    for size in SIZES[name]:
        allowed[np.arange(rows), start + generator.integers(size, size=rows)] = True
        start += size
    return torch.from_numpy(allowed)


def policy_of(name: str, shift: float = 0.0) -> ActorCritic:
    policy = ActorCritic(SEEN, MANY[name], Network(hidden=(8,)), True, stream(1))
    with torch.no_grad():
        policy.actor_head.weight.mul_(100)  # logits that differ
        policy.actor_head.bias.add_(shift * torch.randn(1000, generator=stream(2)))
    return policy


def at(name: str, actions: torch.Tensor) -> torch.Tensor:
    """Where an action's entries are among the 1,000 choices.   [...] or [..., d] -> [..., d]"""
    if name == "discrete":
        return actions.unsqueeze(-1)
    return actions + torch.tensor([0, *SIZES[name][:-1]]).cumsum(0)


@pytest.mark.parametrize(("name", "share"), [("discrete", 0.001), ("multidiscrete", 0.001), ("multibinary", 0.3)])
def test_of_a_thousand_actions_no_forbidden_one_is_ever_sampled_or_likeliest(name: str, share: float) -> None:
    policy, allowed = policy_of(name), masks(name, 100, share)
    distribution, _ = policy.step({"observation": torch.randn(100, 3, generator=stream(3)), "action_mask": allowed})
    generator = stream(4)
    for actions in (distribution.mode(), *(distribution.sample(generator) for _ in range(30))):
        assert allowed.gather(-1, at(name, actions)).all()
        assert distribution.log_prob(actions).isfinite().all()


@pytest.mark.parametrize("name", MANY)
def test_a_forbidden_action_has_probability_zero_and_the_others_share_the_rest(name: str) -> None:
    policy, allowed = policy_of(name), masks(name, 40, 0.2)
    seen = torch.randn(40, 3, generator=stream(3))
    with torch.no_grad():
        logits = policy.step({"observation": seen, "action_mask": allowed})[0].logits
        free = policy.actor_head(policy.actor_trunk({"observation": seen})).double().exp() * allowed
    for part, size in enumerate(SIZES[name]):
        start = sum(SIZES[name][:part])
        weights = free[:, start : start + size]
        wanted = weights / weights.sum(-1, keepdim=True)
        row = logits if name == "discrete" else logits[:, part, :size]
        actual = row.softmax(-1)
        assert (actual[~allowed[:, start : start + size]] == 0).all()
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-7)
        if part > 20:
            break


@pytest.mark.parametrize("name", MANY)
def test_forbidden_actions_get_no_gradient_and_none_is_nan(name: str) -> None:
    policy, allowed = policy_of(name), masks(name, 30, 0.05)
    allowed[:, 7] = False  # in no row
    allowed[:, 6] = True
    inputs = {"observation": torch.randn(30, 3, generator=stream(3)), "action_mask": allowed}
    with torch.no_grad():
        old = policy_of(name, 0.1).step(inputs)[0]
        actions = old.sample(stream(5))
    evaluation = policy(inputs, actions)
    kl = old.kl(evaluation.distribution)
    assert (kl >= -1e-5).all()
    assert evaluation.entropy.isfinite().all()
    assert (evaluation.entropy >= -1e-5).all()
    for number in (evaluation.log_probs, evaluation.entropy, kl):
        (bias,) = torch.autograd.grad(number.sum(), policy.actor_head.bias, retain_graph=True)
        assert number.isfinite().all()
        assert bias.isfinite().all()
        assert bias[7] == 0
        assert bias.abs().max() > 0
        (first,) = torch.autograd.grad(number.sum(), policy.actor_trunk.layers[0].weight, retain_graph=True)
        assert first.isfinite().all()


# ---- in training ------------------------------------------------------------------------------------------------------


def test_a_rollout_keeps_the_mask_of_every_step_and_scores_actions_under_it() -> None:
    world = world_of(lambda: Sampled(SEEN, spaces.Discrete(6), masked=True), rollout={"environments": 2, "steps": 30})
    rollout = world.collector.collect(fresh_state())
    allowed = rollout.inputs["action_mask"]
    assert allowed.dtype == torch.bool
    assert allowed.shape == (2, 30, 6)
    assert allowed.gather(-1, rollout.actions.unsqueeze(-1)).all()
    assert torch.equal(rollout.old_distribution.logits > -math.inf, allowed)
    lonely = allowed.sum(-1) == 1
    assert lonely.any()
    assert (rollout.old_log_probs[lonely] == 0).all()
    again = world.policy(rollout.inputs, rollout.actions)
    assert torch.equal(again.log_probs, rollout.old_log_probs)


@pytest.mark.parametrize("mode", [mode.name for mode in AutoresetMode])
def test_a_masking_vector_environment_trains_without_a_forbidden_action(mode: str) -> None:
    """The fake fails when it is sent one."""

    def vector() -> SyncVectorEnv:
        makers = [partial(Sampled, SEEN, spaces.MultiDiscrete([3, 4]), True, b) for b in range(3)]
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])

    fields: dict[str, Any] = {"rollout": {"environments": 3, "steps": 16}, "evaluation": {"episodes": 0}}
    seen: list[Any] = []
    surefoot.train(vector, PPO_CLIP, steps=200, objective=small(PPO_CLIP), callback=seen.append, **fields)
    assert seen[-1]["updates"] >= 8


# ---- judging and acting -----------------------------------------------------------------------------------------------


@cache
def masked_agent() -> surefoot.Agent:
    return surefoot.train(
        lambda: Sampled(SEEN, spaces.MultiDiscrete([3, 4]), True), PPO_CLIP, steps=1, objective=small(PPO_CLIP)
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_predict_and_evaluate_apply_masks(deterministic: bool) -> None:
    agent = masked_agent()
    make = partial(Sampled, SEEN, spaces.MultiDiscrete([3, 4]), True)
    surefoot.evaluate(agent, make, episodes=12, deterministic=deterministic)  # the fake would say so
    mask = np.array([0, 0, 1, 0, 1, 1, 0], np.int8)
    rows = np.stack([SEEN.sample() for _ in range(200)])
    sent, _ = agent.predict(rows, deterministic=deterministic, action_mask=np.tile(mask, (200, 1)))
    assert set(map(tuple, sent.tolist())) <= {(2, 1), (2, 2)}
    one, _ = agent.predict(rows[0], deterministic=deterministic, action_mask=mask)
    assert one[0] == 2
    free, _ = agent.predict(rows, action_mask=None)
    assert set(free[:, 0].tolist()) == {0, 1, 2}
    with pytest.raises(SurefootError, match=r"action_mask: is an action mask .*length 2 where its action space needs length 7"):
        agent.predict(rows[0], action_mask=[1, 1])


# ---- faults -----------------------------------------------------------------------------------------------------------

RIGHT = {"action_mask": np.array([1, 0, 1], np.int8)}


class Odd(Endless):
    """Gives a list of infos, one per step, the last over and over. Ends every third step."""

    action_space = spaces.Discrete(3)

    def __init__(self, *infos: dict[str, Any], action_space: Any = None) -> None:
        self.infos, self.t = infos, 0
        self.action_space = action_space or self.action_space

    def info(self) -> dict[str, Any]:
        return self.infos[min(self.t, len(self.infos) - 1)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0], self.info()

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t % 3 == 0, False, self.info()


FAULTS = [
    ([RIGHT, {"action_mask": np.zeros(3, np.int8)}], r"an action mask that allows no action \(all false\)"),
    ([RIGHT, {"action_mask": np.ones(4, np.int8)}], "an action mask of length 4 where its action space needs length 3"),
    ([RIGHT, {}], "no action mask, unlike at its first reset"),
    ([{}, RIGHT], "an action mask, unlike at its first reset"),
]


@pytest.mark.parametrize(("infos", "message"), FAULTS)
def test_a_wrong_mask_stops_training_in_a_line_that_names_environment_and_step(infos: Any, message: str) -> None:
    with pytest.raises(SurefootError, match=rf"environment 0 gave {message} in step\(\), episode 0, step 1;"):
        surefoot.train(lambda: Odd(*infos), PPO_CLIP, steps=100)
    with pytest.raises(SurefootError, match=r"environment 0 gave an action mask that allows no .* in reset\(\), episode 0"):
        surefoot.train(lambda: Odd({"action_mask": [0, 0, 0]}), PPO_CLIP, steps=100)
    with pytest.raises(SurefootError, match="gave an action mask, but Box actions can't be masked"):
        surefoot.train(lambda: Odd(RIGHT, action_space=spaces.Box(-1, 1, (3,))), PPO_CLIP, steps=100)


@pytest.mark.parametrize(("infos", "message"), FAULTS[:2])
def test_a_wrong_mask_of_a_vector_environment_names_environment_and_call(infos: Any, message: str) -> None:
    single = iter([Odd(RIGHT), Odd(*infos)])
    vector = SyncVectorEnv([lambda: next(single)] * 2)
    environments = VectorEnvironments(vector, 1, "odd")
    environments.reset()
    with pytest.raises(SurefootError, match=r"^odd: (raised ValueError|gave .* in environment 1, in call 1 of step\(\))"):
        environments.step(np.zeros(2, int))


def test_at_the_end_of_an_episode_no_mask_is_needed() -> None:
    class Ending(Odd):
        def step(self, action: Any) -> Any:
            observation, reward, over, *_ = super().step(action)
            return observation, reward, over, False, {} if over else RIGHT

    environments = LoopedEnvironments(lambda: Ending(RIGHT), 2, 1, "ending")
    environments.reset()
    for _ in range(8):
        step = environments.step(np.zeros(2, int))
        assert step.observations["action_mask"].tolist() == [[True, False, True]] * 2


# ---- masks elsewhere ----------------------------------------------------------------------------------------------------


class Method(Odd):
    """Its masks are those of sb3-contrib's method; none is asked for where no action follows."""

    def __init__(self) -> None:
        super().__init__({})
        self.over = False

    def action_masks(self) -> Any:
        assert not self.over
        return np.array([False, self.t % 2 == 0, self.t % 2 == 1])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.over, self.t = False, 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        assert self.action_masks()[action], "a forbidden action"
        observation, reward, self.over, *rest = super().step(action)
        return observation, reward, self.over, *rest


def test_the_method_action_masks_is_used_like_the_info_wherever_an_environment_acts() -> None:
    """In training, evaluation and checks; behind wrappers too."""
    few: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "objective": small(PPO_CLIP)}
    agent = surefoot.train(lambda: TimeLimit(Method(), 100), PPO_CLIP, steps=64, seed=1, **few)
    assert agent.masked
    assert surefoot.evaluate(agent, Method, episodes=2).lengths == [3, 3]
    assert not [check for check in check_environment(Method, {}) if "forbidden" in check.what]


@pytest.mark.parametrize("vector", ["NEXT_STEP", "SAME_STEP", "DISABLED", "processes", "its own", "tensors"])
def test_the_method_is_used_of_a_vector_environment_and_of_those_in_it(vector: str) -> None:
    """Every action is one that ``Method`` allows, or it raises; in processes it is asked for all rows."""
    if vector == "tensors":
        tensor: Any = Rows([Method(), Method()])
        tensor.action_masks = lambda: torch.as_tensor(np.stack([row.action_masks() for row in tensor.rows]))
        rows = TensorEnvironments(tensor, torch.device("cpu"), 1, "tensors")
        seen: Any = rows.reset()
        for _ in range(8):
            seen = rows.step(seen["action_mask"].int().argmax(-1)).observations
        return
    if vector == "processes":
        made: Any = AsyncVectorEnv([Method] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        mode = "SAME_STEP" if vector == "its own" else vector
        made = SyncVectorEnv([Method] * 2, autoreset_mode=AutoresetMode[mode])
    if vector == "its own":
        made.action_masks = lambda: np.stack(made.call("action_masks"))
    environments = VectorEnvironments(made, 1, vector)
    seen = environments.reset()
    for _ in range(8):
        seen = environments.step(seen["action_mask"].argmax(-1)).observations
    environments.masks_of_rows = lambda acting: [MASK]
    with pytest.raises(SurefootError, match=r"gave 1 rows of action_masks\(\) where 2 are needed, in reset\(\)"):
        environments.reset()
    environments.close()


class Listed(Odd):
    """Has a switch, and a method that needs a state."""

    action_masking = False

    def action_mask(self, state: int) -> Any: ...


MASK = np.array([1, 0, 1])


@pytest.mark.parametrize(
    ("info", "when"),
    [({"Action-Mask": MASK.tolist()}, "at the reset"), ({"feasible_actions": MASK == 1}, "at the first step")],
    ids=str,
)
def test_a_mask_under_another_name_in_the_info_is_an_error(info: dict[str, Any], when: str) -> None:
    infos = [info] if when == "at the reset" else [{}, info]
    line = r"gave no info\['action_mask'\], but info\['.*'\], which looks like an action mask; return it as info"
    with pytest.raises(SurefootError, match=line):
        surefoot.train(lambda: Odd(*infos), PPO_CLIP, steps=100)
    rows: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}}
    with pytest.raises(SurefootError, match=line):
        surefoot.train(lambda: SyncVectorEnv([lambda: Odd(*infos)] * 2), PPO_CLIP, steps=100, **rows)


@pytest.mark.parametrize("name", ["valid_action_mask", "get_action_masks"])
def test_a_method_that_looks_like_a_mask_is_an_error(name: str) -> None:
    kind = type("Near", (Odd,), {name: lambda self: MASK})
    with pytest.raises(SurefootError, match=rf"gave no info\['action_mask'\], but {name}\(\), which looks"):
        surefoot.train(lambda: kind({}), PPO_CLIP, steps=100)


def test_what_only_sounds_like_a_mask_is_none() -> None:
    """A flag, a mask of something else, a switch, and a method that needs a state."""
    infos = [{"valid_action": True, "mask": np.ones(7), "legal_moves": [0, 2], "masked": 1.0}]
    fields: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "objective": small(PPO_CLIP)}
    assert surefoot.train(lambda: Listed(*infos), PPO_CLIP, steps=32, evaluation={"episodes": 0}, **fields).masked is False


# ---- resuming ---------------------------------------------------------------------------------------------------------

NESTED = spaces.Dict({"where": spaces.Discrete(3), "image": spaces.Box(0, 255, (36, 36), np.uint8), "x": SEEN})


def test_a_run_of_nested_observations_and_masks_resumes_to_the_same_weights(tmp_path: Path) -> None:
    def train(folder: Path, callback: Any = None) -> surefoot.Agent:
        fields: dict[str, Any] = {"rollout": {"environments": 2, "steps": 6}, "network": {"hidden": [8]}, "seed": 3}
        fields |= {"evaluation": {"episodes": 1, "every": 24}, "normalise": {"observations": True, "rewards": True}}
        fields |= {"objective": small(PPO_CLIP), "run_dir": folder, "callback": callback}
        return surefoot.train(nested_and_masked, PPO_CLIP, steps=72, **fields)

    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", lambda metrics: metrics["iteration"] == 3)
    messages: list[str] = []
    resumed = surefoot.resume(
        tmp_path / "cut",
        task=nested_and_masked,
        display=lambda event: messages.append(event.text) if isinstance(event, Message) else None,
    )
    assert [text for text in messages if "did not come back" not in text] == []  # the task logs what it is sent
    ours, theirs = whole.state_dict(), resumed.state_dict()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert surefoot.load(tmp_path / "cut").recipe == whole.recipe


def nested_and_masked() -> Sampled:
    return Sampled(NESTED, spaces.MultiDiscrete([2, 3], start=[1, -1]), True)


def test_an_environment_that_masks_otherwise_when_replayed_is_lost() -> None:
    environments = LoopedEnvironments(lambda: Sampled(SEEN, spaces.Discrete(3), True), 2, 1, "sampled")
    seen = environments.reset()
    for _ in range(2):
        seen = environments.step(seen["action_mask"].argmax(-1)).observations
    state = environments.state_dict()
    state["rows"][1]["hashes"]["action masks"] = "0" * 64
    again = LoopedEnvironments(lambda: Sampled(SEEN, spaces.Discrete(3), True), 2, 1, "sampled")
    restored, lost = again.load_state_dict(state)
    assert list(lost) == [1]
    for path, values in seen.items():
        assert np.array_equal(restored[path][0], values[0])


def test_a_mask_that_only_some_environments_of_a_vector_have_is_an_error() -> None:
    from surefoot.control.environments.observations import masks_of_rows

    class Masked(gymnasium.Wrapper):
        def action_masks(self) -> list[bool]:
            return [True, False]

    plain = gymnasium.make("CartPole-v1")
    some = gymnasium.vector.SyncVectorEnv([lambda: Masked(gymnasium.make("CartPole-v1")), lambda: plain])
    with pytest.raises(SurefootError, match=r"action_masks\(\): environments \[1\] lack it; give it to all"):
        masks_of_rows(some)
    some.close()
