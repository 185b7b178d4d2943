"""Tensor environments: steps, device placement, rejected forms, and whole runs."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot
from surefoot import SurefootError
from surefoot.control.collect.tensors import TensorCollector
from surefoot.control.environments.adapters import BraxEnvironment, DLPackEnvironment, RslRlEnvironment
from surefoot.control.environments.classic import KINDS, CartPole, ClassicControl
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.control.spaces import BARE, MASK
from surefoot.control.world import ControlWorld
from surefoot.core.rollout import map_tensors
from surefoot.core.timer import Timer
from surefoot.errors import NotFiniteError
from surefoot.recipes.presets import find_recipe
from surefoot.runs.factory import make_world

from .tiny import clockworks, fresh_state, world_of

SMALL: dict[str, Any] = {"objective": {"reuse": {"epochs": 1, "minibatches": 1}}, "evaluation": {"episodes": 0}}


# ---- the shipped environments -----------------------------------------------------------------------------------------

RANGES: dict[str, list[tuple[float, float]]] = {
    "CartPole-v1": [(-2.5, 2.5), (-3, 3), (-0.22, 0.22), (-3, 3)],
    "Pendulum-v1": [(-20, 20), (-8, 8)],
    "Acrobot-v1": [(-3.14, 3.14), (-3.14, 3.14), (-12.5, 12.5), (-28, 28)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
}
SINGLE = {kind.id: gymnasium.make(kind.id) for kind in (type(make(1)) for make in KINDS.values())}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(KINDS))
@given(data=st.data())
@settings(max_examples=60)
def test_a_step_from_any_state_equals_gymnasiums(name: str, data: st.DataObject) -> None:
    ours: ClassicControl = KINDS[name](3)
    ours.reset(seed=0)
    single = SINGLE[ours.id]
    states = np.array([[data.draw(st.floats(*bounds)) for bounds in RANGES[ours.id]] for _ in range(3)])
    elapsed = data.draw(st.lists(st.integers(0, ours.max_episode_steps or 1), min_size=3, max_size=3))
    if isinstance(ours.single_action_space, spaces.Box):
        actions: Any = np.array([[data.draw(st.floats(-3, 3, width=32))] for _ in range(3)], np.float32)
    else:
        actions = np.array([data.draw(st.integers(0, ours.single_action_space.n - 1)) for _ in range(3)])
    ours.state, ours.elapsed = torch.from_numpy(states), torch.tensor(elapsed)
    _, rewards, terminated, truncated, infos = ours.step(torch.from_numpy(actions))
    for row in range(3):
        single.reset(seed=0)
        single.unwrapped.state = states[row].copy()  # type: ignore[attr-defined]
        single._elapsed_steps = elapsed[row]  # type: ignore[attr-defined]
        observation, reward, *ends, _ = single.step(actions[row])
        np.testing.assert_allclose(infos["final_obs"][row], observation, rtol=1e-5, atol=2e-6)
        assert float(rewards[row]) == pytest.approx(float(reward), rel=1e-5, abs=1e-6)
        assert [bool(terminated[row]), bool(truncated[row])] == ends


@pytest.mark.parametrize("name", list(KINDS))
def test_rows_reset_alone_and_to_states_that_gymnasium_starts_from(name: str) -> None:
    ours: ClassicControl = KINDS[name](500, max_episode_steps=3)
    ours.reset(seed=3)
    ours.elapsed[::2] = 1
    low, high = torch.tensor(ours.low), torch.tensor(ours.high)
    action = torch.zeros((500, 1)) if isinstance(ours.single_action_space, spaces.Box) else torch.ones(500, dtype=torch.int64)
    for step in (1, 2):
        observations, *_, infos = ours.step(action)
        reset = ours.elapsed == 0
        assert reset.tolist() == [step == 2 and row % 2 == 0 for row in range(500)]
        assert torch.equal((observations == infos["final_obs"]).all(-1), ~reset)
    fresh = ours.state[reset]
    assert ((fresh >= low - 1e-7) & (fresh <= high + 1e-7)).all()
    spread = (fresh.amax(0) - fresh.amin(0)) / (high - low).clamp(min=1e-9)
    assert ((spread > 0.97) | (low == high)).all(), "spread over the whole range"


@pytest.mark.parametrize("name", list(KINDS))
def test_the_same_seed_gives_the_same_episodes(name: str) -> None:
    one, other, third = (KINDS[name](8).reset(seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


# ---- a rollout is what happened -------------------------------------------------------------------------------------------


class Rows:
    """Single environments as the rows of a tensor environment. ``reuses``: it writes into the tensors it returned."""

    def __init__(self, rows: list[Any], mode: AutoresetMode | None = AutoresetMode.SAME_STEP, reuses: bool = False) -> None:
        self.rows, self.num_envs, self.device, self.reuses = rows, len(rows), "cpu", reuses
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.mode = mode
        self.single_observation_space, self.single_action_space = rows[0].observation_space, rows[0].action_space
        self.done = [False] * len(rows)
        self.buffers: dict[str, Tensor] = {}

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        return self.shown("obs", [row.reset()[0] for row in self.rows]), {}

    def shown(self, name: str, values: Any) -> Tensor:
        new = torch.as_tensor(np.array(values))
        if self.reuses and name in self.buffers:
            self.buffers[name].copy_(new)
        else:
            self.buffers[name] = new
        return self.buffers[name]

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        resets = self.done if self.mode is AutoresetMode.NEXT_STEP else [False] * len(self.rows)
        taken = [
            (row.reset()[0], 0.0, False, False) if reset else row.step(action)[:4]
            for row, action, reset in zip(self.rows, actions.numpy(), resets, strict=True)
        ]
        observations, rewards, terminated, truncated = map(list, zip(*taken, strict=True))
        self.done = [a or b for a, b in zip(terminated, truncated, strict=True)]
        infos = {}
        if self.mode is not AutoresetMode.NEXT_STEP:
            if self.mode is not None:
                infos = {"final_obs": self.shown("final", observations)}
            for index, done in enumerate(self.done):
                if done:
                    observations[index] = self.rows[index].reset()[0]
        values = self.shown("obs", observations), self.shown("reward", np.array(rewards, np.float32))
        ends = self.shown("terminated", np.array(terminated)), self.shown("truncated", np.array(truncated))
        if self.reuses:
            actions.fill_(9)
        return *values, *ends, infos


def rows_world(rows: Callable[[], Rows], count: int, steps: int, **fields: Any) -> ControlWorld:
    rollout = {"environments": count, "steps": steps, **fields.pop("rollout", {})}
    return world_of(rows, rollout=rollout, **fields)


def same(one: Any, other: Any) -> bool:
    kept: list[bool] = []
    others: list[Tensor] = []
    map_tensors(lambda x: others.append(x) or x, other)  # type: ignore[func-returns-value]
    rest = iter(others)
    map_tensors(lambda x: kept.append(torch.equal(x, next(rest))) or x, one)  # type: ignore[func-returns-value]
    return bool(kept) and all(kept)


@pytest.mark.parametrize("reuses", [False, True], ids=["new tensors", "reused tensors"])
@pytest.mark.parametrize("box", [False, True], ids=["Discrete", "Box"])
def test_rollouts_are_those_of_the_single_environments(reuses: bool, box: bool) -> None:
    """Whatever the environment does with its tensors afterwards."""
    kind: dict[str, Any] = {"action_space": spaces.Box(-2, 2, (2,), np.float32)} if box else {}
    single = clockworks(**kind)
    normalise = {"normalise": {"observations": True, "rewards": True}}
    world = rows_world(lambda: Rows(single, reuses=reuses), 3, 14, **normalise)
    state = fresh_state()
    for _ in range(2):
        taken = sum(len(row.log) for row in single[:1])
        before = world.agent.normaliser()
        scale = 1.0 if taken == 0 else float(world.agent.reward_normaliser.scale)  # type: ignore[union-attr]
        rollout = world.collector.collect(state)
        critic = world.agent.policy.values
        for index, row in enumerate(single):
            log = row.log[taken:]
            assert rollout.terminated[index].tolist() == [step.terminated for step in log]
            assert rollout.truncated[index].tolist() == [step.truncated for step in log]
            rewards = torch.tensor([step.reward for step in log])
            assert torch.equal(rollout.reward_parts["environment"][index], rewards)
            assert torch.allclose(rollout.rewards[index], (rewards * scale).clamp(-10, 10))
            shown = before({BARE: torch.from_numpy(np.stack([step.observation for step in log]))})
            assert torch.allclose(rollout.inputs[BARE][index], shown[BARE])
            successors = before({BARE: torch.from_numpy(np.stack([step.successor for step in log]))})
            for step, expected, got in zip(log, critic(successors), rollout.next_values[index], strict=True):
                assert step.terminated or torch.allclose(expected, got, atol=1e-6)
            if not box:
                assert rollout.actions[index].tolist() == [int(step.action) for step in log]
    assert rollout.mask.all()


@pytest.mark.parametrize("lstm", [None, 8])
def test_collecting_one_row_after_another_or_all_at_once_scores_the_same(lstm: int | None, monkeypatch: Any) -> None:
    rollouts = []
    for rows in (8192, 16):
        monkeypatch.setattr("surefoot.control.collect.tensors.ROWS_PER_PASS", rows)
        world = world_of("tensor/CartPole-v1", rollout={"environments": 8, "steps": 16}, network={"lstm": lstm})
        rollouts.append(world.collector.collect(fresh_state()))
    for name in ("old_log_probs", "values", "next_values", "rewards"):
        torch.testing.assert_close(getattr(rollouts[0], name), getattr(rollouts[1], name))
    assert torch.equal(rollouts[0].actions, rollouts[1].actions)


@pytest.mark.parametrize("lstm", [None, 8])
def test_next_step_environments_skip_the_rows_that_only_reset(lstm: int | None) -> None:
    single = clockworks()
    world = rows_world(lambda: Rows(single, AutoresetMode.NEXT_STEP), 3, 20, network={"lstm": lstm})
    rollout = world.collector.collect(fresh_state())
    for index, row in enumerate(single):
        kept = rollout.mask[index]
        assert int(kept.sum()) == len(row.log)
        assert rollout.inputs[BARE][index][kept].tolist() == [step.observation.tolist() for step in row.log]
        assert rollout.terminated[index][kept].tolist() == [step.terminated for step in row.log]
        if lstm is None:
            for step, place in zip(row.log, kept.nonzero().flatten().tolist(), strict=True):
                expected = world.agent.policy.values({BARE: torch.from_numpy(step.successor)})
                assert step.terminated or torch.allclose(expected, rollout.next_values[index, place], atol=1e-6)
    assert not rollout.mask.all()


def test_without_final_observations_the_last_value_is_used_and_a_metric_counts_it() -> None:
    rollout = rows_world(lambda: Rows(clockworks(), None), 3, 14).collector.collect(fresh_state())
    cut = rollout.truncated & ~rollout.terminated
    assert cut.any()
    torch.testing.assert_close(rollout.next_values[cut], rollout.values[cut])
    assert rollout.metrics["truncations_estimated"] == 1.0
    exact = rows_world(lambda: Rows(clockworks()), 3, 14).collector.collect(fresh_state())
    assert "truncations_estimated" not in exact.metrics


@pytest.mark.parametrize(("steps", "rollouts"), [(15, 3), (400, 1)])
def test_episode_metrics_are_those_of_the_last_episodes_in_the_order_of_their_ends(steps: int, rollouts: int) -> None:
    single = clockworks()
    world = rows_world(lambda: Rows(single), 3, steps)
    state = fresh_state()
    for _ in range(rollouts):
        metrics = world.collector.collect(state).metrics
    ended, total = [], 0
    for t in range(steps * rollouts):
        for row in single:
            if row.log[t].terminated or row.log[t].truncated:
                episode = [step.reward for step in row.log[: t + 1] if step.episode == row.log[t].episode]
                ended.append((sum(episode), len(episode)))
                total += 1
    assert world.collector.log.finished_count == total
    assert (total > 100) == (steps == 400)
    assert [row[:2] for row in world.collector.log.finished] == [pytest.approx(row) for row in ended[-100:]]
    assert metrics["episode_return"] == pytest.approx(np.mean([row[0] for row in ended[-100:]]))


class Labelled(CartPole):
    """CartPole whose infos have numbers for each row, and means that it logs itself."""

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        *rest, infos = super().step(actions)
        level = torch.arange(self.num_envs, dtype=torch.float32)
        log = {"reward/upright": rest[1].mean(), "levels": 3}
        return *rest, {**infos, "level": level, "is_success": rest[2], "log": log}


def test_numbers_in_infos_and_logged_reward_terms_become_metrics() -> None:
    world = world_of(lambda: Labelled(4), rollout={"environments": 4, "steps": 64, "info": ["level", "is_success"]})
    metrics = world.collector.collect(fresh_state()).metrics
    levels = [row[2]["level"] for row in world.collector.log.finished]
    assert set(levels) <= {0.0, 1.0, 2.0, 3.0}
    assert metrics["episode_level"] == pytest.approx(np.mean(levels))
    assert metrics["episode_is_success"] == 1.0
    assert metrics["log_reward/upright"] == 1.0
    assert metrics["log_levels"] == 3.0
    with pytest.raises(SurefootError, match=r"rollout.info=\['levl'\].*did you mean 'level'"):
        world_of(lambda: Labelled(4), rollout={"environments": 4, "steps": 64, "info": ["levl"]}).collector.collect(
            fresh_state()
        )


class Masked(CartPole):
    """CartPole that forbids one action of every row, another each step."""

    def mask(self) -> Tensor:
        allowed = torch.zeros(self.num_envs, 2, dtype=torch.bool)
        allowed[torch.arange(self.num_envs), (self.elapsed + torch.arange(self.num_envs)) % 2] = True
        return allowed

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        observations, infos = super().reset(seed=seed)
        return observations, infos | {MASK: self.mask()}

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        assert self.mask()[torch.arange(self.num_envs), actions].all(), "only allowed actions"
        *rest, infos = super().step(actions)
        return *rest, infos | {MASK: self.mask()}


def test_masks_are_obeyed_and_a_mask_that_allows_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(lambda: Masked(4), rollout={"environments": 4, "steps": 32})
    rollout = world.collector.collect(fresh_state())
    assert (rollout.old_log_probs == 0).all(), "one action has probability 1"
    for choices, mask in (((2,), [0, 0]), ((2, 3), [0, 1, 0, 0, 0]), ((2, 3), [0, 0, 1, 0, 0])):
        monkeypatch.setattr(world.environments, "choices", choices)
        with pytest.raises(SurefootError, match=r"action mask that allows no action \(all false\) for row 0, step 0"):
            world.collector._check_masks(torch.tensor(mask).bool().expand(4, 1, -1))


# ---- nothing waits for the device ----------------------------------------------------------------------------------------

HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class WaitsError(Exception):
    """Something read a tensor's numbers."""


class Refusing(TorchDispatchMode):
    """Refuses operations that copy numbers to the host; ``device``: and copies between it and the host."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in READS or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise WaitsError(str(func))
        out = func(*args, **(kwargs or {}))
        if self.device and name in ("_to_copy", "copy_") and out.device != args[0 if name == "_to_copy" else 1].device:
            raise WaitsError(f"{func} from or to the host")
        return out


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> Callable[..., Any]:
        def method(*_: Any, **__: Any) -> Any:
            raise WaitsError(name)

        return method

    with monkeypatch.context() as patch, Refusing():
        for name in HOST:
            patch.setattr(Tensor, name, refuse(name))
        yield


@pytest.mark.parametrize(("task", "lstm"), [*((kind, None) for kind in KINDS), (next(iter(KINDS)), 8)])
def test_no_step_reads_a_number_on_the_host(task: str, lstm: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of acting, the environment, statistics of episodes and what a rollout keeps."""
    normalise = {"observations": True, "rewards": True}
    world = world_of(task, rollout={"environments": 4, "steps": 8}, network={"lstm": lstm}, normalise=normalise)
    collector = world.collector
    assert isinstance(collector, TensorCollector)
    collector.collect(fresh_state())
    generator = torch.Generator()
    with no_reads(monkeypatch):
        steps = collector._act_out(generator, Timer())
    assert len(steps.done) == 8


def test_on_another_device_no_step_copies_to_or_from_the_host() -> None:
    """The device is "meta", whose tensors have no numbers to read. The noise of all steps is one copy, at the first."""
    world = world_of("tensor/CartPole-v1", rollout={"environments": 4, "steps": 8}, normalise={"observations": True})
    agent, environment = world.agent, world.environments.environment
    agent.policy.to("meta")
    environment.device, environment.generator = torch.device("meta"), None
    for name in ("first", "width", "state", "elapsed"):
        setattr(environment, name, getattr(environment, name).to("meta"))
    environment.reset = lambda seed=None: (environment.observe(environment.state), {})
    collector = TensorCollector(TensorEnvironments(environment, torch.device("meta"), 0, "meta"), agent, 8)
    act = agent.tensor_actor(torch.Generator(), 8)
    with Copies("meta") as first:
        act(collector.observations, None, collector.starts)
    assert first.copies == 1
    collector.actor, collector.steps = lambda generator, steps: act, 7
    with Refusing("meta"):
        steps = collector._act_out(torch.Generator(), Timer())
    assert {x.device.type for x in steps.buffers.values()} == {"meta"}
    assert len(steps.done) == 7


class Copies(Refusing):
    """Counts the copies between host and device instead of refusing them."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except WaitsError:
            self.copies += 1
            return func(*args, **(kwargs or {}))


# ---- bad input ---------------------------------------------------------------------------------------------------------------


class Grouped(CartPole):
    """CartPole with two observation groups, one of which ``spoil`` may change."""

    spoil: Any = staticmethod(lambda group, when: group)

    def __init__(self, num_envs: int = 4, device: Any = "cpu", max_episode_steps: int | None = None) -> None:
        super().__init__(num_envs, device, max_episode_steps)
        self.single_observation_space = spaces.Dict(
            {"policy": spaces.Box(-9, 9, (2,), np.float32), "critic": spaces.Box(-9, 9, (4,), np.float32)}
        )

    def groups(self, observations: Tensor, when: str) -> dict[str, Tensor]:
        return {"policy": self.spoil(observations[:, ::2], when), "critic": observations}

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = super().reset(seed=seed)
        return self.groups(observations, "reset"), infos

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        observations, *rest, infos = super().step(actions)
        return self.groups(observations, "step"), *rest, {**infos, "final_obs": self.groups(infos["final_obs"], "final")}


@pytest.mark.parametrize(
    ("spoil", "when", "message"),
    [
        (lambda x: x.long(), "step", 'observation "policy" of torch.int64 where torch.float32 is needed, in call 1 of step()'),
        (lambda x: x.to("meta"), "step", 'observation "policy" on meta where its device is cpu, in call 1 of step()'),
        (lambda x: x[:, :1], "reset", 'observation "policy" of shape (4, 1) where (4, 2) is needed, in reset()'),
        (lambda x: x[:, 0], "final", 'final observation "policy" of shape (4,) where (4, 2) is needed, in call 1 of step()'),
    ],
)
def test_a_wrong_part_of_an_observation_is_one_line_with_its_name(spoil: Any, when: str, message: str) -> None:
    class Spoiled(Grouped): ...

    Spoiled.spoil = staticmethod(lambda group, at: spoil(group) if at == when else group)
    with pytest.raises(SurefootError, match=re.escape(message)):
        world_of(Spoiled, rollout={"environments": 4, "steps": 4}).collector.collect(fresh_state())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.ones(4, 1), "rewards of shape (4, 1) where (4,) is needed"),
        (2, torch.zeros(4), "terminated of torch.float32 where torch.bool is needed"),
        (3, None, "truncated of type NoneType where a torch tensor is needed"),
        (4, [], "infos of type list where the interface has a dict"),
        (4, {"surefoot": {"score": 1.0}}, "'score' in info['surefoot'], which is not read from this kind of environment"),
    ],
)
def test_a_wrong_reward_or_end_is_one_line_with_its_name(place: int, value: Any, message: str) -> None:
    class Wrong(CartPole):
        def step(self, actions: Tensor) -> tuple[Any, ...]:
            returned = list(super().step(actions))
            returned[place] = value
            return tuple(returned)

    with pytest.raises(SurefootError, match=re.escape(f"returned {message}, in call 1 of step(); fix the environment")):
        world_of(lambda: Wrong(4), rollout={"environments": 4, "steps": 4}).collector.collect(fresh_state())


class Overwriting(Grouped):
    """``critic`` of final_obs is the tensor that the reset has written into; ``policy`` is a copy from before."""

    def step(self, actions: Tensor) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, *rest, infos = super().step(actions)
        return observations, *rest, infos | {"final_obs": {**infos["final_obs"], "critic": observations["critic"]}}


def test_a_final_observation_that_the_reset_has_overwritten_is_one_line_with_its_name() -> None:
    """Where no row is truncated, it may be the same tensor: nothing reads it then."""
    line = (
        r"Overwriting: returned final_obs in the memory of the observations, which the reset has overwritten \(an observation "
        r'"critic", row 0, step 4 of the rollout\); return a copy from before the reset'
    )
    for limit in (5, 400):
        settings = {"rollout": {"environments": 4, "steps": 8}, "environment": {"max_episode_steps": limit}}
        world = world_of(Overwriting, **settings, **SMALL)
        with closing(world), pytest.raises(SurefootError, match=line) if limit == 5 else nullcontext():
            assert isinstance(world, ControlWorld)
            world.collector.collect(fresh_state())


def test_four_values_where_five_are_needed_and_other_mistakes_are_one_line() -> None:
    class Four(CartPole):
        def step(self, actions: Tensor) -> Any:
            return super().step(actions)[:4]

    rollout = {"environments": 4, "steps": 4}
    with pytest.raises(SurefootError, match=r"returned 4 values where Gymnasium's interface has 5 \(observation, reward"):
        world_of(lambda: Four(4), rollout=rollout).collector.collect(fresh_state())
    with pytest.raises(SurefootError, match=r"makes a vector of 3; set it to 3"):
        world_of(lambda: CartPole(3), rollout=rollout)
    with pytest.raises(SurefootError, match=r"device='cpu': task='<lambda>' has its tensors on meta"):
        world_of(lambda: object_on_meta(), rollout=rollout)
    with pytest.raises(SurefootError, match="did you mean 'tensor/CartPole-v1'"):
        surefoot.train("tensor/CartPol-v1", steps=8, run_dir=None)
    with pytest.raises(SurefootError, match=r"can't run whole episodes"):
        surefoot.train("tensor/CartPole-v1", algorithm="REINFORCE", run_dir=None, steps=64)


def object_on_meta() -> CartPole:
    environment = CartPole(4)
    environment.device = torch.device("meta")
    return environment


@pytest.mark.parametrize("where", ["observations", "rewards", "final_obs"])
def test_a_number_that_is_not_finite_discards_the_rollout_and_names_row_and_step(where: str) -> None:
    class Broken(CartPole):
        calls = 0

        def step(self, actions: Tensor) -> tuple[Any, ...]:
            observations, rewards, terminated, truncated, infos = super().step(actions)
            self.calls += 1
            if self.calls == 6:
                if where == "final_obs":
                    truncated = torch.ones_like(truncated)
                    terminated = torch.zeros_like(terminated)
                {"observations": observations, "rewards": rewards, **infos}[where][2] = torch.nan
            return observations, rewards, terminated, truncated, infos

    environment = Broken(4)
    world = world_of(lambda: environment, rollout={"environments": 4, "steps": 8}, normalise={"rewards": True})
    expected = {"observations": "observation of environment 2 at step 6", "rewards": "reward of environment 2 at step 6"}
    with pytest.raises(NotFiniteError, match=expected.get(where, r"observation in infos\['final_obs'\] is not finite")):
        world.collector.collect(fresh_state())
    assert world.collector.running_length.tolist() == [0, 0, 0, 0]
    rollout = world.collector.collect(fresh_state())
    assert rollout.inputs[BARE].isfinite().all()


def test_an_integer_that_the_space_does_not_have_is_one_line() -> None:
    class Numbered(CartPole):
        single_observation_space: Any

        def observe(self, state: Tensor) -> Tensor:
            return self.elapsed

    environment = Numbered(4)
    environment.single_observation_space = spaces.Discrete(3)
    world = world_of(lambda: environment, rollout={"environments": 4, "steps": 8})
    with pytest.raises(SurefootError, match=r"returned an observation outside Discrete\(3\) for row 0, step 3"):
        world.collector.collect(fresh_state())


# ---- adapters ----------------------------------------------------------------------------------------------------------------


class RslRl:
    """CartPole with rsl_rl's interface: groups of observations, one continuous action, ``dones`` and ``time_outs``."""

    def __init__(self, num_envs: int, device: str = "cpu", time_outs: bool = True) -> None:
        self.inner = CartPole(num_envs, device, max_episode_steps=20)
        self.num_envs, self.num_actions, self.device, self.time_outs = num_envs, 1, device, time_outs
        self.observations, _ = self.inner.reset(seed=0)

    def get_observations(self) -> dict[str, Tensor]:
        return {"policy": self.observations[:, ::2], "critic": self.observations}

    def step(self, actions: Tensor) -> Any:
        self.observations, rewards, terminated, truncated, _ = self.inner.step((actions[:, 0] > 0).long())
        extras: dict[str, Any] = {"log": {"Episode_Reward/alive": rewards.mean()}}
        extras |= {"time_outs": truncated & ~terminated} if self.time_outs else {}
        return self.get_observations(), rewards, (terminated | truncated).long(), extras


def make_rsl_rl(num_envs: int, device: str) -> RslRl:
    return RslRl(num_envs, device)


def test_an_environment_of_rsl_rls_form_trains_unchanged() -> None:
    rows: list[Any] = []
    rollout = {"environments": 16, "steps": 32}
    agent = surefoot.train(make_rsl_rl, steps=1024, run_dir=None, rollout=rollout, callback=rows.append, **SMALL)
    assert set(agent.observation_space.spaces) == {"policy", "critic"}
    assert rows[-1]["log_Episode_Reward/alive"] == 1.0
    assert 5 < rows[-1]["episode_length"] <= 20
    assert rows[-1]["truncations_estimated"] == 1.0


def test_time_outs_of_an_earlier_step_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, extras = RslRl(2), {"time_outs": torch.ones(2)}
    monkeypatch.setattr(inner, "step", lambda actions, step=inner.step: (*step(actions)[:3], extras))
    *_, terminated, truncated, _ = RslRlEnvironment(inner, "x").step(torch.zeros(2, 1))
    assert not (terminated | truncated).any()


def test_ends_that_do_not_show_how_are_one_line() -> None:
    world = world_of(lambda num_envs: RslRl(num_envs, time_outs=False), rollout={"environments": 4, "steps": 4})
    with pytest.raises(SurefootError, match=r"ends episodes without extras\['time_outs'\] \[B\].*add it to what step"):
        world.collector.collect(fresh_state())


class IsaacLike(gymnasium.Env[Any, Any]):
    """The form of Isaac Lab's environments: a ``gymnasium.Env`` of many rows, groups of observations, no final ones."""

    def __init__(self, num_envs: int, device: str) -> None:
        self.inner = Grouped(num_envs, device)
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.inner.reset(seed=seed)[0], {}

    def step(self, action: Tensor) -> Any:
        observations, rewards, terminated, time_outs, _ = self.inner.step(action)
        return observations, rewards, terminated, time_outs, {"log": {"Episode_Reward/alive": rewards.mean()}}


def test_an_environment_of_isaac_labs_form_trains_is_evaluated_and_saved_unchanged(tmp_path: Path) -> None:
    rollout = {"environments": 16, "steps": 32}
    settings_ = SMALL | {"evaluation": {"episodes": 2, "every": 512}, "rollout": rollout}
    rows: list[Any] = []
    agent = surefoot.train(IsaacLike, steps=1024, run_dir=tmp_path / "run", callback=rows.append, **settings_)
    assert rows[-1]["evaluation_return"] > 5
    assert rows[-1]["log_Episode_Reward/alive"] == 1.0
    one = {"policy": np.zeros(2, np.float32), "critic": np.zeros(4, np.float32)}
    assert agent.predict(one, deterministic=True)[0] in (0, 1)


class Foreign:
    """An array of another library: all that is known of it is DLPack and the array API."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.values.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Foreign

    @staticmethod
    def from_dlpack(x: Any) -> "Foreign":
        return Foreign(np.from_dlpack(x).copy())


class ForeignVector:
    """A vector environment, in SAME_STEP, with another library's arrays."""

    def __init__(self, num_envs: int) -> None:
        self.inner = CartPole(num_envs)
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.sent: list[Any] = []

    def reset(self, *, seed: int | None = None) -> Any:
        return Foreign(self.inner.reset(seed=seed)[0]), {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, Foreign), "actions are the library's too"
        observations, *ends, infos = self.inner.step(torch.from_numpy(actions.values))
        return Foreign(observations), *map(Foreign, ends), {"final_obs": Foreign(infos["final_obs"])}

    def close(self) -> None:
        pass


def test_arrays_of_another_library_are_read_and_sent_by_dlpack() -> None:
    rollout = {"environments": 8, "steps": 40}
    direct = world_of(lambda: CartPole(8), rollout=rollout).collector.collect(fresh_state())
    foreign = world_of(lambda: DLPackEnvironment(ForeignVector(8)), rollout=rollout).collector.collect(fresh_state())
    for name in ("actions", "rewards", "terminated", "next_values"):
        assert torch.equal(getattr(direct, name), getattr(foreign, name)), name
    assert direct.terminated.any()


class BraxCartPole:
    """CartPole in Brax's form, wrapped for training; tensors stand for JAX's arrays."""

    observation_size, action_size = 4, 1

    def __init__(self, rows: int) -> None:
        self.inner = CartPole(rows)

    def state(self, observations: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor) -> SimpleNamespace:
        info = {"truncation": truncated.float(), "inner": self.inner.state_dict()}
        done = (terminated | truncated).float()
        return SimpleNamespace(obs=observations, reward=reward, done=done, info=info, metrics={"upright": reward})

    def reset(self, keys: Tensor) -> SimpleNamespace:
        no = torch.zeros(len(keys), dtype=torch.bool)
        return self.state(self.inner.reset(seed=int(keys[0]))[0], no.float(), no, no)

    def step(self, state: SimpleNamespace, actions: Tensor) -> SimpleNamespace:
        self.inner.load_state_dict(state.info["inner"])
        return self.state(*self.inner.step((actions[:, 0] > 0).long())[:4])


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of JAX that the adapter calls, for tensors and without compiling."""

    def flatten(tree: Any) -> tuple[list[Tensor], Any]:
        key, state = tree
        inner = state.info["inner"]
        return [key, state.obs, state.reward, state.done, state.info["truncation"], *inner.values()], list(inner)

    def unflatten(names: Any, leaves: list[Tensor]) -> Any:
        key, observations, reward, done, truncated, *inner = leaves
        info = {"truncation": truncated, "inner": dict(zip(names, inner, strict=True))}
        return key, SimpleNamespace(obs=observations, reward=reward, done=done, info=info, metrics={"upright": reward})

    module: Any = ModuleType("jax")
    module.jit = lambda function: function
    module.random = SimpleNamespace(PRNGKey=torch.tensor, split=lambda key, count=2: key + torch.arange(1, count + 1))
    module.numpy = SimpleNamespace(from_dlpack=torch.from_dlpack)
    module.tree = SimpleNamespace(leaves=lambda tree: flatten(tree)[0], flatten=flatten, unflatten=unflatten)
    monkeypatch.setitem(sys.modules, "jax", module)


def test_an_environment_of_brax_ends_its_episodes_as_they_end_and_logs_its_metrics(jax: None) -> None:
    rows = 8
    environment = BraxEnvironment(BraxCartPole(rows), rows)
    assert environment.single_observation_space.shape == (4,)
    assert environment.single_action_space == gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    environment.reset(seed=3)
    terminated, truncated = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    for _ in range(600):
        pushes = environment.state.obs[:, 2:3] + environment.state.obs[:, 3:4]  # these balance
        pushes[: rows // 2] = 1.0  # these fall
        _, rewards, falls, cuts, infos = environment.step(pushes)
        assert not (falls & cuts).any()
        assert torch.equal(infos["log"]["upright"], rewards.mean())
        terminated, truncated = terminated | falls, truncated | cuts
    assert terminated[: rows // 2].all()
    assert not truncated[: rows // 2].any()
    assert truncated[rows // 2 :].all()


def test_an_environment_of_brax_goes_on_from_a_saved_state(jax: None) -> None:
    first, second = (BraxEnvironment(BraxCartPole(4), 4) for _ in range(2))
    push = torch.ones(4, 1)
    first.reset(seed=3)
    first.step(push)
    saved = first.state_dict()
    expected = [first.step(push)[0].clone() for _ in range(40)]  # through ends and resets
    second.reset(seed=7)
    second.load_state_dict(saved)
    assert all(torch.equal(second.step(push)[0], observations) for observations in expected)
    with pytest.raises(ValueError, match="other arrays"):
        second.load_state_dict({**saved, "1": torch.zeros(5, 4)})


def test_the_saved_state_of_a_brax_environment_goes_to_its_device(jax: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are read into the memory of the CPU."""
    environment = BraxEnvironment(BraxCartPole(4), 4)
    environment.reset(seed=3)
    saved, environment.device = environment.state_dict(), torch.device("meta")
    monkeypatch.setattr(environment.jax.numpy, "from_dlpack", lambda tensor: tensor)
    environment.load_state_dict(saved)
    assert {x.device.type for x in environment.jax.tree.leaves((environment.key, environment.state))} == {"meta"}


# ---- runs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "lstm"), [("eager", 8), ("compiled", None)])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    engine: str, lstm: int | None, tmp_path: Path, programs: None
) -> None:
    options: dict[str, Any] = SMALL | {"rollout": {"environments": 8, "steps": 16}, "engine": engine, "network": {"lstm": lstm}}
    options |= {"checkpoint": {"every": 128, "keep": 9}, "normalise": {"observations": True, "rewards": True}}
    whole = surefoot.train("tensor/CartPole-v1", steps=512, run_dir=tmp_path / "whole", **options)
    surefoot.train("tensor/CartPole-v1", steps=512, run_dir=tmp_path / "half", callback=stop_after(2), **options)
    half = surefoot.resume(tmp_path / "half")
    assert all(torch.equal(x, half.state_dict()[name]) for name, x in whole.state_dict().items())


def stop_after(iterations: int) -> Callable[[Any], bool]:
    return lambda row: row["iteration"] >= iterations


def test_without_a_state_dict_a_resumed_run_starts_new_episodes_with_a_message() -> None:
    saved = world_of(IsaacLike, rollout={"environments": 4, "steps": 16})
    saved.collector.collect(fresh_state())
    parts = {**saved.checkpoint_parts(), "collector": saved.collector.state_dict()}
    again = world_of(IsaacLike, rollout={"environments": 4, "steps": 16})
    (line,) = again.load(parts, Path("here"), False)
    assert "have no state_dict that fits: all 4 start new episodes, so this resume is not exact" in line
    assert again.collector.starts.all()
    assert list(again.collector.log.finished) == list(saved.collector.log.finished)
    assert not torch.equal(
        again.collector.observations["critic"],
        world_of(IsaacLike, rollout={"environments": 4}).collector.observations["critic"],
    )


def test_an_agent_of_a_tensor_task_is_evaluated_watched_and_exported(tmp_path: Path) -> None:
    options: dict[str, Any] = SMALL | {"rollout": {"environments": 4, "steps": 16}}
    surefoot.train("tensor/CartPole-v1", steps=64, run_dir=tmp_path / "run", **options)
    agent = surefoot.load(tmp_path / "run")
    result = surefoot.evaluate(agent, episodes=3)
    assert len(result.returns) == 3
    from surefoot.control.evaluate import evaluate_agent
    from surefoot.control.export import export_agent

    assert result.returns == evaluate_agent(agent, "CartPole-v1", {}, 3, result.seed).returns, "Gymnasium's own environment"
    exported = export_agent(agent, tmp_path / "agent.pt2", "torch")
    assert "observations of an episode" in exported.compared


def test_evaluation_in_single_rows_sees_the_episodes_of_the_environment_itself() -> None:
    """A function with ``num_envs`` makes the environments of an evaluation too: one row each, seeded like all others."""
    world = world_of(Grouped, rollout={"environments": 4, "steps": 8}, evaluation={"episodes": 3})
    report = world.evaluate()
    assert report is not None
    assert report.score is not None
    assert report.score > 5
    with pytest.raises(
        SurefootError, match=r"makes 4 environments where one is needed.*give the function a parameter num_envs"
    ):
        world_of(lambda: CartPole(4), rollout={"environments": 4, "steps": 8}, evaluation={"episodes": 3}).evaluate()


# ---- what robotics needs -------------------------------------------------------------------------------------------------


def test_a_privileged_critic_reads_parts_that_the_policy_does_not() -> None:
    parts = {"actor_parts": ["policy"], "critic_parts": ["critic"]}
    world = world_of(Grouped, rollout={"environments": 4, "steps": 8}, network=parts)
    policy = world.agent.policy
    rollout = world.collector.collect(fresh_state())
    other = {"policy": rollout.inputs["policy"], "critic": rollout.inputs["critic"] + 1}
    before, after = (policy(inputs, rollout.actions) for inputs in (rollout.inputs, other))
    assert torch.equal(before.log_probs, after.log_probs)
    assert not torch.allclose(before.values, after.values)
    other = {"policy": rollout.inputs["policy"] + 1, "critic": rollout.inputs["critic"]}
    after = policy(other, rollout.actions)
    assert not torch.allclose(before.log_probs, after.log_probs)
    assert torch.equal(before.values, after.values)


def test_an_unknown_part_is_one_line() -> None:
    message = r"the observation has no part 'polcy'; did you mean 'policy'\? \(parts: 'critic', 'policy'\)"
    with pytest.raises(SurefootError, match=message):
        world_of(Grouped, rollout={"environments": 4}, network={"actor_parts": ["polcy"]})


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_an_adaptive_learning_rate_follows_the_kl_of_each_minibatch_and_resumes(
    engine: str, tmp_path: Path, programs: None
) -> None:
    """Against the rule, applied by hand to the KL before each step."""
    options: dict[str, Any] = {
        "rollout": {"environments": 8, "steps": 16},
        "objective": {"reuse": {"epochs": 3, "minibatches": 2}, "kl_estimator": "exact"},
        "optimizer": {"schedule": "adaptive", "learning_rate": 1e-3, "kl_target": 0.005, "micro_batch": 32},
        "evaluation": {"episodes": 0},
        "checkpoint": {"every": 128, "keep": 9},
        "engine": engine,
    }
    rates: list[float] = []
    whole = surefoot.train(
        "tensor/Pendulum-v1",
        steps=512,
        run_dir=tmp_path / "a",
        callback=lambda row: rates.append(row["learning_rate"]),
        **options,
    )
    assert len(set(rates)) > 1
    powers = np.log(np.array(rates) / 1e-3) / np.log(1.5)
    np.testing.assert_allclose(powers, powers.round(), atol=1e-6, err_msg="steps of a factor of 1.5")
    surefoot.train("tensor/Pendulum-v1", steps=512, run_dir=tmp_path / "b", callback=stop_after(2), **options)
    resumed = surefoot.resume(tmp_path / "b")
    assert all(torch.equal(x, resumed.state_dict()[name]) for name, x in whole.state_dict().items())


def test_a_dry_run_makes_one_row_instead_of_thousands() -> None:
    recipe = find_recipe("tensor/Pendulum-v1")
    with closing(make_world(recipe, environments=1)) as world:
        assert world.environments.count == 1
        assert f"{recipe.rollout.environments} environments x" in "\n".join(world.arithmetic())
