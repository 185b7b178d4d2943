"""Policies with an LSTM: when the state is kept and when it is reset."""

import runpy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad

import surefoot
from surefoot.accel.programs import program_of
from surefoot.control.networks import EPISODE_STARTS, LSTM_STATE, EpisodicLSTM, lstm_outputs, narrowing
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import LearnerState, Metrics, Rollout
from surefoot.errors import SurefootError
from surefoot.recipes.reading import Recipe, make_recipe

from .test_spaces import assert_trained

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "memory.py"
SMALL: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 12},
    "network": {"hidden": [8], "lstm": 6},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "evaluation": {"episodes": 0},
}


class Counting(gymnasium.Env[np.ndarray, int]):
    """Shows the step number; rewards 1; never ends of itself."""

    observation_space = spaces.Box(-1, 99, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.kind = 0, float(self.np_random.random())
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self._seen(), 1.0, False, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.at / 10, self.kind], np.float32)


def cut_after_five() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Counting(), 5)


def recipe(**changes: Any) -> Recipe:
    return make_recipe({"task": "cut-after-five", **SMALL, **changes})


def collected(rollouts: int = 1, **changes: Any) -> tuple[ControlWorld, list[Rollout]]:
    world = ControlWorld(recipe(**changes), cut_after_five)
    state = LearnerState.seeded(1, 10_000)
    return world, [world.collector.collect(state) for _ in range(rollouts)]


# ---- the LSTM ---------------------------------------------------------------------------------------------------------


def one_step_at_a_time(memory: EpisodicLSTM, features: Tensor, starts: Tensor, state: Tensor) -> Tensor:
    """The law: the state is zero again where an episode starts."""
    outputs = []
    for t in range(features.shape[1]):
        state = state.masked_fill(starts[:, t, None, None], 0)
        output, state = memory.step(features[:, t : t + 1], torch.zeros_like(starts[:, :1]), state)
        outputs.append(output)
    return torch.cat(outputs, 1)


def by_segments(memory: EpisodicLSTM, features: Tensor, starts: Tensor, state: Tensor) -> Tensor:
    """The same by a call of nn.LSTM for each segment of each row."""
    rows = []
    for row in range(len(features)):
        cuts = [0, *(t for t in starts[row].nonzero().flatten().tolist() if t), features.shape[1]]
        outputs = []
        for begin, end in pairwise(cuts):
            before = torch.zeros_like(state[row]) if starts[row, begin] else state[row]
            output, _ = memory.lstm(features[row, begin:end], (before[:1], before[1:]))
            outputs.append(output)
        rows.append(torch.cat(outputs))
    return torch.stack(rows)


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(0, 99))
def test_steps_before_an_episode_start_have_no_effect(starts: list[list[bool]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memory, flags = EpisodicLSTM(3, 4, generator), torch.tensor(starts)
    features, state = torch.randn(len(starts), 7, 3, generator=generator), torch.randn(len(starts), 2, 4, generator=generator)
    expected = one_step_at_a_time(memory, features, flags, state)
    torch.testing.assert_close(memory(features, flags, state), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_segments_in_common_calls_have_the_outputs_and_gradients_of_each_alone(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    memory, starts = EpisodicLSTM(3, 4, generator), torch.rand(9, 40, generator=generator) < share
    features, state = torch.randn(9, 40, 3, generator=generator), torch.randn(9, 2, 4, generator=generator)
    weights, results = torch.randn(9, 40, 4, generator=generator), []
    for run in (memory, partial(by_segments, memory)):
        leaves = [features.clone().requires_grad_(), state.clone().requires_grad_(), *memory.parameters()]
        outputs = run(leaves[0], starts, leaves[1])
        gradients = torch.autograd.grad((outputs * weights).mean(), leaves, allow_unused=True, materialize_grads=True)
        results.append([outputs, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Together(nn.Module):
    """LSTMs that read the same steps."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        super().__init__()
        self.memories = [EpisodicLSTM(3 + index, 4, generator) for index in range(count)]
        self.parts = nn.ModuleList(self.memories)
        for parameter in self.parameters():
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)

    def forward(self, *tensors: Tensor) -> Tensor:
        *features, starts, state = tensors
        return torch.stack(lstm_outputs(self.memories, features, starts, state))


@pytest.mark.parametrize("count", [1, 2])
def test_loops_of_a_program_have_the_outputs_and_gradients_of_segments(count: int, programs: str) -> None:
    """For one LSTM, and for two with different inputs together."""
    generator = torch.Generator().manual_seed(0)
    both = Together(count, generator)
    features = [torch.randn(3, 12, 3 + index, generator=generator) for index in range(count)]
    starts, state = torch.rand(3, 12, generator=generator) < 0.2, torch.randn(3, count, 2, 4, generator=generator)
    weights = torch.randn(count, 3, 12, 4, generator=generator)
    names = [name for name, _ in both.named_parameters()]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        def total(moving: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            parameters = dict(zip(names, moving[count:], strict=True))
            outputs = functional_call(both, parameters, (*moving[:count], starts, tensors[-1]))
            return (outputs * weights).sum(), outputs

        gradients, outputs = grad(total, has_aux=True)(tensors[:-1])
        return (outputs.clone(), *gradients)

    moving = [x.requires_grad_() for x in (*features, *both.parameters())]
    outputs = both(*features, starts, state)
    expected = (outputs, *torch.autograd.grad((outputs * weights).sum(), moving))
    arguments = [*(x.detach() for x in moving), state]
    for ours, theirs in zip(program_of("loops", run, arguments)(arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 200))
def test_common_calls_take_every_step_once_and_end_where_going_on_would_exceed_what_is_spare(
    lengths: list[int], spare: int
) -> None:
    lengths.sort(reverse=True)
    calls = list(narrowing(lengths, spare))
    taken = [(row, t) for live, begin, end in calls for row in range(live) for t in range(begin, end)]
    assert len(taken) == len(set(taken))
    assert {(row, t) for row, length in enumerate(lengths) for t in range(length)} <= set(taken)
    for live, _, end in calls:
        assert sum(max(0, end - length) for length in lengths[:live]) <= spare
        if longer := [length for length in lengths if length > end]:
            assert sum(max(0, longer[-1] - length) for length in lengths[:live]) > spare


# ---- rollouts ---------------------------------------------------------------------------------------------------------


def test_scoring_a_rollout_uses_the_lstm_states_of_acting() -> None:
    world, rollouts = collected(3)
    for rollout, following in pairwise(rollouts):
        policy, inputs = world.policy, rollout.inputs
        state = inputs[LSTM_STATE]
        for t in range(12):
            step = {path: x if path == LSTM_STATE else x[:, t] for path, x in (inputs | {LSTM_STATE: state}).items()}
            distribution, state = policy.step(step)
            torch.testing.assert_close(distribution.log_prob(rollout.actions[:, t]), rollout.old_log_probs[:, t])
        torch.testing.assert_close(state, following.inputs[LSTM_STATE])
    world.close()


def test_an_episode_starts_where_the_one_before_ended() -> None:
    world, (first, second) = collected(2)
    starts = torch.cat([first.inputs[EPISODE_STARTS], second.inputs[EPISODE_STARTS]], 1)
    ended = torch.cat([first.truncated, second.truncated], 1)
    assert starts[:, 0].all()
    assert torch.equal(starts[:, 1:], ended[:, :-1])
    assert ended[:, 4::5].all()
    world.close()


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_values_and_successors_remember_their_episode_in_every_autoreset_mode(mode: AutoresetMode | None) -> None:
    """Also after a truncation: V of the final observation. Actions change nothing in this environment."""

    def vector() -> Any:
        return SyncVectorEnv([cut_after_five] * 2, autoreset_mode=mode)

    changes = {"rollout": {"environments": 2, "steps": 18 if mode is AutoresetMode.NEXT_STEP else 15}}
    world = ControlWorld(recipe(**changes), vector if mode else cut_after_five)
    rollout = world.collector.collect(LearnerState.seeded(1, 10_000))
    kept = [x[rollout.mask] for x in (rollout.inputs["observation"], rollout.values, rollout.next_values)]
    assert len(kept[0]) == 30
    policy = world.policy
    for observation, value, following in zip(*kept, strict=True):
        at, kind = round(float(observation[0]) * 10), float(observation[1])
        episode = torch.tensor([[step / 10, kind] for step in range(at + 2)])
        inputs = {
            "observation": episode[None],
            EPISODE_STARTS: torch.tensor([[True, *[False] * (at + 1)]]),
            LSTM_STATE: torch.zeros(1, 2, 2, 6),
        }
        values = policy(inputs, torch.zeros(1, at + 2, dtype=torch.int64)).values
        assert values is not None
        torch.testing.assert_close(values[0, -2].detach(), value)
        torch.testing.assert_close(values[0, -1].detach(), following)
    world.close()


# ---- agents and runs --------------------------------------------------------------------------------------------------


def test_predict_carries_the_lstm_state_and_resets_it_at_a_start() -> None:
    agent = surefoot.train(cut_after_five, steps=24, run_dir=None, **SMALL)
    one, other = np.array([0.3, 0.1], np.float32), np.array([0.9, 0.7], np.float32)
    _, fresh = agent.predict(one, deterministic=True)
    assert fresh.shape == (1, 2, 2, 6)
    _, after = agent.predict(other, fresh, deterministic=True)
    _, again = agent.predict(one, after, episode_start=True, deterministic=True)
    np.testing.assert_array_equal(again, fresh)
    assert not np.array_equal(agent.predict(one, after)[1], fresh)
    assert agent.value(one) != agent.value(one, after)
    assert agent.value(one) == agent.value(one, after, episode_start=True)
    actions, states = agent.predict(np.stack([one, one]), np.concatenate([after, fresh]), np.array([True, False]))
    assert actions.shape == (2,)
    np.testing.assert_allclose(states[:1], fresh, rtol=1e-4, atol=1e-6)
    exact, _ = agent.predict(one, fresh.astype(np.float64), deterministic=True)  # numbers are numbers
    assert exact == agent.predict(one, fresh, deterministic=True)[0]
    with pytest.raises(SurefootError, match=r"episode_start: has 3 flags for 2 observations"):
        agent.predict(np.stack([one, one]), episode_start=[True, False, True])
    for state, flags in (("abc", None), ([10**400], None), (fresh, [[True], [True, False]])):
        with pytest.raises(SurefootError, match=r"state, episode_start: .*; pass the state that predict returned, and flags"):
            agent.predict(one, state, flags)
    assert agent.predict(one, np.ascontiguousarray(fresh[::-1])[::-1])[0] is not None  # an array turned round
    with pytest.raises(SurefootError, match=r"state: has shape \(1, 2, 2, 6\); these observations need \(2, 2, 2, 6\)"):
        agent.predict(np.stack([one, one]), fresh)


FOR_CONTROL = [name for name, value in surefoot.ALGORITHMS.items() if not value.compares_in_groups]


@pytest.mark.parametrize(
    ("algorithm", "shared"), [("A2C", True), ("PPO_CLIP", True), *((algorithm, False) for algorithm in FOR_CONTROL)]
)
def test_every_algorithm_trains_an_lstm(algorithm: str, shared: bool) -> None:
    network = {**SMALL["network"], "shared_trunk": shared}
    objective = SMALL["objective"] if surefoot.ALGORITHMS[algorithm].reuse else {}
    settings = {**SMALL, "network": network, "objective": objective}
    history: list[Metrics] = []
    agent = surefoot.train("CartPole-v1", algorithm=algorithm, steps=48, run_dir=None, callback=history.append, **settings)
    assert history[-1]["policy_loss"] is not None
    assert_trained(agent)
    assert surefoot.evaluate(agent, episodes=2, seed=1).episodes == 2


def test_a_run_with_an_lstm_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {**SMALL, "checkpoint": {"every": 24}, "seed": 4}
    whole = surefoot.train("CartPole-v1", steps=192, run_dir=tmp_path / "whole", **settings)
    surefoot.train("CartPole-v1", steps=192, run_dir=tmp_path / "cut", callback=lambda m: m["steps"] >= 72, **settings)  # type: ignore[operator]
    resumed = surefoot.resume(tmp_path / "cut")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    loaded = surefoot.load(tmp_path / "cut")
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    np.testing.assert_array_equal(loaded.predict(observation)[1], resumed.predict(observation)[1])


def test_sequences_that_minibatches_would_break_are_rejected() -> None:
    with pytest.raises(
        SurefootError, match=r"objective.reuse.minibatches=4: an LSTM learns from whole sequences.*choose a divisor"
    ):
        recipe(objective={"reuse": {"epochs": 1, "minibatches": 4}})


@pytest.mark.release
@pytest.mark.parametrize(("lstm", "solved"), [(32, True), (None, False)], ids=["lstm", "feed-forward"])
def test_cartpole_without_velocities_is_solved_with_memory_alone(lstm: int | None, solved: bool) -> None:
    example = runpy.run_path(str(EXAMPLE))
    task, network = example["Positions"], {"hidden": [32], "lstm": lstm}
    agent = surefoot.train(task, steps=150_000, seed=1, network=network, **example["RECIPE"])
    score = surefoot.evaluate(agent, task, episodes=20, seed=5).mean_return
    assert score >= 475 if solved else score < 200
