"""Environments with several agents: a row for each, one policy, the dead ignored; and turn-based games from one seat."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

import surefoot
from surefoot.control.environments.agents import AgentEnvironments, Seat
from surefoot.control.spaces import SpaceError
from surefoot.core.algorithms import PPO_CLIP, REINFORCE
from surefoot.core.credit import assign_credit
from surefoot.diagnostics.recipe import check_environment
from surefoot.errors import SurefootError
from surefoot.runs.factory import make_learner

from .tiny import QUIET, fresh_state, small, world_of

ROLLOUT = {"environments": 6, "steps": 11}
FEW: dict[str, Any] = {**QUIET, "rollout": ROLLOUT, "network": {"hidden": [8]}, "seed": 3}
LIVES = {"a": 2, "b": 3, "c": 5}


class Herd:
    """Agents a, b and c, which live 2, 3 and 5 steps: a is terminated, the others truncated. ``log`` is what happened."""

    possible_agents = tuple(LIVES)
    made: ClassVar[list["Herd"]] = []

    def __init__(self) -> None:
        self.log: list[tuple[str, list[float], int, float]] = []
        Herd.made.append(self)

    def observation_space(self, agent: str) -> Any:
        seen = spaces.Box(-9, 9, (3,), np.float32)
        return spaces.Dict({"observation": seen, "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def look(self, agent: str) -> dict[str, Any]:
        seen = [self.time, self.possible_agents.index(agent), self.draw.uniform()]
        return {"observation": np.array(seen, np.float32), "action_mask": np.array([1, self.time % 2, 1], np.int8)}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.draw, self.time, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        self.shown = {agent: self.look(agent) for agent in self.agents}
        return self.shown, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert list(actions) == self.agents, "every living agent acts, and no other"
        assert all(self.shown[agent]["action_mask"][action] for agent, action in actions.items())
        rewards = {agent: float(action + self.time * self.possible_agents.index(agent)) for agent, action in actions.items()}
        for agent in self.agents:
            self.log.append((agent, self.shown[agent]["observation"].tolist(), int(actions[agent]), rewards[agent]))
        self.time += 1
        self.shown = {agent: self.look(agent) for agent in self.agents}
        over = {agent: self.time == LIVES[agent] for agent in self.agents}
        terminated = {agent: over[agent] and agent == "a" for agent in self.agents}
        truncated = {agent: over[agent] and agent != "a" for agent in self.agents}
        infos = {agent: {"is_success": agent == "b"} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not over[agent]]
        return self.shown, rewards, terminated, truncated, infos

    def close(self) -> None: ...


class Odd(Herd):
    """A herd with something wrong in it."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong_ = wrong

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3 + (self.wrong_ == "spaces" and agent == "b"))

    def step(self, actions: dict[str, int]) -> Any:
        returned = super().step(actions)
        if self.wrong_ == "reward" and self.time == 2:
            del returned[1]["b"]
        if self.wrong_ == "left" and self.time == 2:
            self.agents.remove("b")
        if self.wrong_ == "info":
            returned[4]["b"] = {"surefoot": {"score": 1.0}}
        if self.wrong_ == "raises" and self.time == 2:
            raise ValueError("no\nfield")
        return returned


def collected(**fields: Any) -> tuple[Any, Any]:
    Herd.made.clear()
    world = world_of(Herd, PPO_CLIP, **{**FEW, **fields})
    state = fresh_state()
    return world, world.collector.collect(state)


def test_the_kept_steps_are_those_that_the_agents_took_and_the_dead_are_masked() -> None:
    world, rollout = collected()
    alive = [[time % 5 < life for time in range(11)] for _ in range(2) for life in LIVES.values()]
    assert rollout.mask.tolist() == alive
    herds = [herd for herd in Herd.made if herd.log]
    assert len(herds) == 2
    for row in range(6):
        agent, herd = "abc"[row % 3], herds[row // 3]
        taken = [(seen, action, reward) for who, seen, action, reward in herd.log if who == agent]
        kept = rollout.mask[row]
        np.testing.assert_allclose(rollout.inputs["observation"][row][kept].numpy(), [t[0] for t in taken], rtol=1e-6)
        assert rollout.actions[row][kept].tolist() == [t[1] for t in taken]
        assert rollout.rewards[row][kept].tolist() == [t[2] for t in taken]
    ends = rollout.terminated | rollout.truncated
    assert [row.nonzero().flatten().tolist() for row in ends[:3]] == [[1, 6], [2, 7], [4, 9]]
    assert rollout.terminated[[0, 3]].sum() == 4
    assert rollout.terminated.sum() == 4
    world.close()


@pytest.mark.parametrize("lstm", [None, 4])
def test_what_the_dead_see_do_and_get_changes_no_loss(lstm: int | None) -> None:
    weights = []
    for garbage in (False, True):
        world, rollout = collected(network={"hidden": [8], "lstm": lstm})
        dead = ~rollout.mask
        if garbage:
            inputs = {**rollout.inputs, "observation": rollout.inputs["observation"].clone()}
            inputs["observation"][dead] = 1e3 if lstm is None else inputs["observation"][dead]
            values = {name: getattr(rollout, name).clone() for name in ("rewards", "values", "next_values", "old_log_probs")}
            for x in values.values():
                x[dead] = torch.nan
            rollout = replace(rollout, inputs=inputs, actions=torch.where(dead, 2, rollout.actions), **values)
        learner = make_learner(world.recipe, world.policy)
        learner.update(rollout, assign_credit(rollout, learner.objective), fresh_state())
        weights.append(world.policy.state_dict())
        world.close()
    for name, ours in weights[0].items():
        assert torch.equal(ours, weights[1][name]), name


def test_the_successor_of_a_truncated_agents_last_step_is_its_own_last_observation() -> None:
    world, rollout = collected()
    shown = torch.tensor([[3.0, 1.0]])
    row, time = 1, 2
    reached = rollout.inputs["observation"][row, time + 1]  # it waits with its last observation
    assert torch.equal(reached[:2], shown[0])
    expected = world.agent.values_of({"observation": reached[None]})
    torch.testing.assert_close(rollout.next_values[row, time], expected[0])
    world.close()


def test_metrics_and_evaluation_have_the_mean_and_the_return_of_each_agent() -> None:
    world, rollout = collected()
    totals = dict.fromkeys(LIVES, 0.0)
    for herd in Herd.made:
        for agent in LIVES:
            whole = 2 * LIVES[agent]
            totals[agent] += sum([step[3] for step in herd.log if step[0] == agent][:whole]) / 4
    for agent, total in totals.items():
        assert rollout.metrics[f"episode_return_{agent}"] == pytest.approx(total)
    assert rollout.metrics["episode_return"] == pytest.approx(np.mean(list(totals.values())))
    assert rollout.metrics["episode_is_success"] == pytest.approx(1 / 3)
    result = surefoot.evaluate(world.agent, Herd, episodes=12)
    assert result == surefoot.evaluate(world.agent, Herd, episodes=12)
    assert result.lengths == [5] * 12
    assert result.mean_return == pytest.approx(np.mean([result.info[f"return_{agent}"] for agent in LIVES]))
    world.close()


@pytest.mark.parametrize("lstm", [None, 4])
def test_a_run_resumes_to_the_same_weights(lstm: int | None, tmp_path: Path) -> None:
    settings: Any = {**FEW, "steps": 140, "objective": small(PPO_CLIP), "network": {"hidden": [8], "lstm": lstm}}
    settings["evaluation"] = {"episodes": 2, "every": 70}
    whole = surefoot.train(Herd, PPO_CLIP, run_dir=tmp_path / "whole", **settings)
    surefoot.train(Herd, PPO_CLIP, run_dir=tmp_path / "cut", callback=lambda m: m["iteration"] == 1, **settings)
    resumed = surefoot.resume(tmp_path / "cut", task=Herd)
    for name, ours in whole.state_dict().items():
        assert torch.equal(ours, resumed.state_dict()[name]), name


def test_a_copy_that_replays_otherwise_is_lost_with_all_its_agents() -> None:
    one, other = (AgentEnvironments(Herd, 6, 1, "herd") for _ in range(2))
    one.reset()
    for _ in range(8):
        one.step(np.zeros(6, np.int64))
    other.environments[1].look = lambda agent: {"observation": np.zeros(3, np.float32), "action_mask": np.ones(3, np.int8)}
    observations, lost = other.load_state_dict(one.state_dict())
    assert set(lost) == {3, 4, 5}
    assert "observations" in lost[3]
    assert np.array_equal(observations["observation"][:3], one.observations["observation"][:3])


class Tired(Herd):
    """The reward falls from episode to episode."""

    slept = 0

    def step(self, actions: dict[str, int]) -> Any:
        returned = super().step(actions)
        self.slept += not self.agents
        returned[1].update({agent: reward - self.slept for agent, reward in returned[1].items()})
        return returned


class Rested(Tired):
    def state_dict(self) -> dict[str, int]:
        return {"slept": self.slept}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.slept = state["slept"]


@pytest.mark.parametrize("herd", [Tired, Rested])
def test_what_outlives_an_episode_is_noticed_right_after_a_reset_or_loaded(herd: type[Herd]) -> None:
    one, other = (AgentEnvironments(herd, 6, 1, "herd") for _ in range(2))
    one.reset()
    for _ in range(15):  # three whole episodes
        one.step(np.zeros(6, np.int64))
    _, lost = other.load_state_dict(one.state_dict())
    if herd is Tired:
        assert "rewards" in lost[0]
        return
    assert not lost
    now, then = (each.step(np.zeros(6, np.int64)) for each in (one, other))
    assert np.array_equal(now.rewards, then.rewards)


def test_whole_episodes_end_when_every_agent_has_had_as_many() -> None:
    world = world_of(Herd, REINFORCE, **{**FEW, "rollout": {"environments": 6, "episodes": 2}})
    rollout = world.collector.collect(fresh_state())
    assert rollout.mask.sum(1).tolist() == [4, 6, 10] * 2
    assert rollout.rewards.shape == (6, 10)
    world.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("spaces", r"agent 'b' has actions Discrete\(4\), agent 'a' has Discrete\(3\).*pad them"),
        ("reward", "environment 0 gave no reward of agent 'b' in step"),
        ("left", "agent 'b' left neither terminated nor truncated"),
        ("info", r"gave 'score' in info\['surefoot'\], which is not read from this kind of environment in step"),
        ("raises", "raised ValueError: no field"),
    ],
)
def test_what_is_wrong_with_an_agent_is_one_line(wrong: str, message: str) -> None:
    def odd() -> Odd:
        return Odd(wrong)

    with pytest.raises(SurefootError, match=message):
        surefoot.train(odd, PPO_CLIP, steps=66, objective=small(PPO_CLIP), **FEW)


def test_rows_that_are_no_multiple_of_the_agents_are_an_error_with_a_number() -> None:
    with pytest.raises(SurefootError, match=r"rollout.environments=8: .* has 3 agents.* multiple of 3"):
        surefoot.train(Herd, PPO_CLIP, steps=64, **{**FEW, "rollout": {"environments": 8, "steps": 8}})


def test_check_steps_all_agents_and_finds_what_is_wrong() -> None:
    texts = [finding.what for finding in check_environment(Herd, {})]
    assert any("3 agents" in text for text in texts)
    assert any("per episode" in text for text in texts)
    bad = check_environment(lambda: Odd("reward"), {})
    assert [finding.severity for finding in bad] == ["serious"]


# ---- turn by turn -----------------------------------------------------------------------------------------------------


class Race:
    """Turn by turn, one or two steps; who first has 4 gets 1, the other −1. With the rules of PettingZoo's AEC."""

    possible_agents = ("red", "blue")

    def agent_iter(self) -> None: ...

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict({"observation": spaces.Box(0, 9, (2,), np.float32), "action_mask": spaces.MultiBinary(2)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.place = list(self.possible_agents), dict.fromkeys(self.possible_agents, 0)
        self.agent_selection, self.moves, self.over = "red", list[tuple[str, Any]](), False
        self.won = dict.fromkeys(self.possible_agents, 0.0)

    def last(self) -> Any:
        me = self.agent_selection
        (other,) = set(self.possible_agents) - {me}
        seen = np.array([self.place[me], self.place[other]], np.float32)
        return {"observation": seen, "action_mask": np.array([1, self.place[me] < 3])}, self.won[me], self.over, False, {}

    def step(self, action: Any) -> None:
        me = self.agent_selection
        (other,) = set(self.possible_agents) - {me}
        self.moves.append((me, action))
        if self.over:
            assert action is None
            self.agents.remove(me)
        else:
            assert action == 0 or self.place[me] < 3, "a forbidden move"
            self.place[me] += 1 + action
            self.over = self.place[me] == 4
            self.won = {me: float(self.over), other: -float(self.over)}
        self.agent_selection = other

    def close(self) -> None: ...


def by_ones(observation: Any, mask: Any, generator: Any) -> int:
    assert list(mask) == [1, observation[0] < 3]
    return 0


def race(seat: str | None = None, opponent: Any = by_ones) -> Seat:
    return Seat(Race(), seat, opponent)


@pytest.mark.parametrize(("seat", "turns", "reward"), [("red", 4, 1.0), ("blue", 3, -1.0)])
def test_a_seat_gets_all_that_happens_until_its_next_turn(seat: str, turns: int, reward: float) -> None:
    game = race(seat)
    game.reset(seed=1)
    earned = [game.step(0)[1:3] for _ in range(turns)]
    assert earned == [(0.0, False)] * (turns - 1) + [(reward, True)]
    game = race("blue", lambda *_: game.environment.place.update(red=3) or 0)
    with pytest.raises(SpaceError, match="no turn of agent 'blue' in 1,000 games"):
        game.reset(seed=1)


def test_without_a_seat_both_sides_are_played_and_the_first_to_move_wins_by_twos() -> None:
    agent = surefoot.train(race, PPO_CLIP, steps=1024, seed=1, evaluation={"episodes": 0}, network={"hidden": [8]})
    result = surefoot.evaluate(agent, race, episodes=20)
    assert result.mean_return == 1.0
    game, seats = race(), set[str]()
    for seed in range(20):
        game.reset(seed=seed)
        seats.add(game.agent)
    assert seats == {"red", "blue"}
    with pytest.raises(SurefootError, match=r"environment.seat='green': .*choose one of \['red', 'blue'\]"):
        race("green")


# ---- the packages themselves ------------------------------------------------------------------------------------------


def test_the_random_opponent_chooses_every_component_within_its_mask() -> None:
    game = race(opponent="random")
    game.action_space = spaces.MultiDiscrete([3, 2], start=[1, 0])
    moves = [game.opponent(None, [0, 1, 1, 0, 1], np.random.default_rng(seed)) for seed in range(9)]
    assert {tuple(move) for move in moves} == {(2, 1), (3, 1)}


def rock_paper_scissors() -> Any:
    supersuit = pytest.importorskip("supersuit")
    rps: Callable[[], Any] = pytest.importorskip("pettingzoo.classic.rps_v2").parallel_env
    return supersuit.concat_vec_envs_v1(supersuit.pettingzoo_env_to_vec_env_v1(rps()), 2, base_class="gymnasium")


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_pettingzoos_environments_train_by_name_and_supersuits_vectors_are_the_same_rows() -> None:
    pytest.importorskip("pettingzoo.classic.rps_v2")
    settings: Any = {**FEW, "rollout": {"environments": 4, "steps": 16}, "steps": 64}
    weights = surefoot.train("pettingzoo/pettingzoo.classic.rps_v2:parallel_env", PPO_CLIP, **settings).state_dict()
    board = {"environment": {"opponent": "random", "seat": "player_2"}, "evaluation": {"episodes": 2}}
    surefoot.train("pettingzoo/pettingzoo.classic.tictactoe_v3:env", PPO_CLIP, **{**settings, **board})
    pytest.importorskip("supersuit")
    for name, ours in surefoot.train(rock_paper_scissors, PPO_CLIP, **settings).state_dict().items():
        assert torch.equal(ours, weights[name]), name
