"""Environments: every autoreset mode keeps the same transitions, episodes replay, and errors name the environment."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import surefoot
from surefoot import SurefootError, errors
from surefoot.control.environments import make_environments
from surefoot.control.environments.looped import Environments, LoopedEnvironments, episode_seed
from surefoot.control.environments.observations import Reader
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint

from .misbehaving import Misbehaving
from .tiny import Clockwork, Endless, clockworks, one_by_one

SEED = 7
MODES = ("looped", *(mode.name for mode in AutoresetMode))


def together(mode: str, single: Sequence[Any]) -> Environments:
    """Environments behind one interface: our loop, or Gymnasium's vector environment in one of its autoreset modes."""
    if mode == "looped":
        return LoopedEnvironments(one_by_one(single), len(single), SEED, "tiny")
    vector = SyncVectorEnv([partial(next, iter([env])) for env in single], autoreset_mode=AutoresetMode[mode])
    return VectorEnvironments(vector, SEED, "tiny")


# ---- episode seeds ----------------------------------------------------------------------------------------------------


def test_every_episode_is_reset_with_the_seed_of_its_run_environment_and_number() -> None:
    single = clockworks()
    environments = together("looped", single)
    environments.reset()
    for _ in range(20):
        environments.step(np.zeros(3, int))
    for b, env in enumerate(single):
        assert env.seeds == [episode_seed(SEED, b, episode) for episode in range(len(env.seeds))]
        assert len(env.seeds) > 5


def test_episode_seeds_do_not_repeat_between_runs_environments_or_episodes() -> None:
    places = [(seed, b, episode) for seed in range(5) for b in range(8) for episode in range(50)]
    assert len({episode_seed(*place) for place in places}) == len(places)
    assert episode_seed(1, 2, 3) == episode_seed(1, 2, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_begins_another_episode_and_not_the_first_one_again(mode: str) -> None:
    single = clockworks()
    environments = together(mode, single)
    environments.reset()
    environments.step(np.zeros(3, int))
    observations, restarted = environments.restart(1)
    assert 1 in restarted
    assert observations["observation"][1].tolist() == [1, 1, 0, 0]
    assert len(set(single[1].seeds)) == len(single[1].seeds) == 2
    if mode == "looped":
        assert restarted == [1]
        assert observations["observation"][0].tolist() == [0, 0, 1, 0]


# ---- replay -----------------------------------------------------------------------------------------------------------


def actions_for(environments: Environments, seed: int, steps: int) -> np.ndarray:
    """[steps, B, ...] drawn from the action space."""
    space = environments.action_space
    space.seed(seed)
    return np.array([[space.sample() for _ in range(environments.count)] for _ in range(steps)])


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    save_checkpoint(folder, {"environments": state})
    return load_checkpoint(folder)["environments"]


@pytest.mark.parametrize(("task", "steps"), [("CartPole-v1", 57), ("Pendulum-v1", 0), ("MountainCarContinuous-v0", 1)])
def test_environments_are_restored_exactly_from_a_saved_state(task: str, steps: int, tmp_path: Path) -> None:
    environments, again = make_environments(task, {}, 3, SEED), make_environments(task, {}, 3, SEED)
    observations = environments.reset()
    script = actions_for(environments, 1, steps + 250)
    for actions in script[:steps]:
        observations = environments.step(actions).observations
    restored, lost = again.load_state_dict(through_a_file(environments.state_dict(), tmp_path / "state"))
    assert lost == {}
    assert np.array_equal(restored["observation"], observations["observation"])
    ends = 0
    for actions in script[steps:]:
        a, b = environments.step(actions), again.step(actions)
        assert np.array_equal(a.observations["observation"], b.observations["observation"])
        for name in ("rewards", "terminated", "truncated", "ignored"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert a.final_observations.keys() == b.final_observations.keys()
        ends += int((a.terminated | a.truncated).sum())
    assert ends or task == "MountainCarContinuous-v0"


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_resumed_vector_environment_replays_all_since_its_reset_or_says_what_is_different(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def vector(end: tuple[int, str] = (5, "terminated")) -> Environments:
        return together(mode, [Clockwork(0), Clockwork(1, (end,))])

    environments, again = vector(), vector()
    environments.reset()
    for step in range(9):
        environments.step(np.array([step % 2, 1]))
    state = through_a_file(environments.state_dict(), tmp_path / "state")
    _, lost = again.load_state_dict(state)
    assert lost == {}
    step = environments.step(np.ones(2, int))
    assert [x.tolist() for x in (step.rewards, step.ignored)] == [
        x.tolist() for x in (lambda other: (other.rewards, other.ignored))(again.step(np.ones(2, int)))
    ]
    _, lost = vector((6, "truncated")).load_state_dict(state)
    assert lost.keys() == {0, 1}
    assert lost[0].startswith("its 9 steps since the last reset had other observations and rewards and ends of episodes")
    _, lost = together(mode, [Clockwork(0), Clockwork(1), Clockwork(2)]).load_state_dict(state)
    assert lost == {0: "", 1: "", 2: ""}, "another number of ranks has other rows"
    monkeypatch.setattr("surefoot.control.environments.vector.REPLAYED", 17)
    environments.reset()
    for _ in range(9):
        environments.step(np.zeros(2, int))
    single = [Clockwork(0), Clockwork(1)]
    _, lost = together(mode, single).load_state_dict(environments.state_dict())
    assert lost == {0: "", 1: ""}
    assert single[0].seeds == [episode_seed(SEED, 0, 2)]


@pytest.mark.filterwarnings(
    "ignore:.*Received the following error", "ignore:.*wheels came off", "ignore:.*Raising the last", "ignore:.*Traceback"
)
def test_a_vector_environment_that_fails_in_its_replay_is_made_again(tmp_path: Path) -> None:
    """The process of an environment that raised in an AsyncVectorEnv is gone."""
    fuse = tmp_path / "fuse"
    row = partial(Misbehaving, doom=None, fuse=str(fuse))
    environments, again = (
        make_environments(lambda: gymnasium.vector.AsyncVectorEnv([row, row]), {}, 2, SEED) for _ in range(2)
    )
    environments.reset()
    for _ in range(4):
        environments.step(np.zeros(2, int))
    state = environments.state_dict()
    fuse.touch()
    try:
        _, lost = again.load_state_dict(state)  # type: ignore[call-arg]
        assert "raised RuntimeError: the wheels came off" in lost[0]
        assert lost.keys() == {0, 1}
        assert again.step(np.zeros(2, int)).observations["observation"][:, 0].tolist() == [1, 1]
    finally:
        environments.close()
        again.close()


# ---- faults -----------------------------------------------------------------------------------------------------------


GONE = object()
"""in place of a value that is left out"""


class Faulty(Endless):
    """Says other things at one step of its second episode (at its reset for step 0); episodes take three steps.

    What can be called is called instead.
    """

    def __init__(self, at: int | None = None, space: Any = None, **said: Any) -> None:
        self.observation_space, self.at, self.said = space or spaces.Box(-1, 1, (2,), np.float32), at, said
        self.observation_space.seed(0)
        self.episode, self.t = -1, 0

    def says(self, **usual: Any) -> Any:
        now = self.said if self.episode == 1 and self.t == self.at else {}
        values = [x() if callable(x) else x for x in (usual | now).values() if x is not GONE]
        return values[0] if len(values) == 1 else tuple(values)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return self.says(observation=self.observation_space.sample(), info={})

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = self.observation_space.sample()
        return self.says(observation=seen, reward=1.0, terminated=self.t == 3, truncated=False, info={})


def run(environments: Environments) -> None:
    environments.reset()
    for _ in range(6):
        environments.step(np.zeros(environments.count, int))


def boom() -> Any:
    raise RuntimeError("the wheels came off")


PAIR = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
REPORTED: list[tuple[Any, str]] = [
    ({"scor": 1.0}, r"'scor' in info\['surefoot'\], which may have only score and life_lost"),
    (1.0, r"info\['surefoot'\] of type (float|ndarray) instead of a dict of score and life_lost"),
    ({"score": None}, "a score of type NoneType instead of a number"),
    ({"life_lost": "False"}, "surefoot.life_lost='False' instead of True or False"),
]
FAULTS: list[tuple[int, dict[str, Any], str]] = [
    (0, {"observation": boom}, "raised RuntimeError: the wheels came off"),
    (2, {"observation": boom}, "raised RuntimeError: the wheels came off"),
    (1, {"observation": torch.zeros(2, requires_grad=True)}, r"raised RuntimeError: Can't call numpy\(\)"),
    (1, {"info": GONE}, "gave 4 values where Gymnasium's interface has 5"),
    (0, {"info": GONE}, "gave one ndarray where .* has 2"),
    (2, {"reward": None}, "gave a reward of type NoneType"),
    (2, {"reward": np.zeros(1)}, r"gave a reward of shape \(1,\)"),
    (2, {"reward": np.complex64(1)}, "gave a reward of type complex64"),
    *((2, {"info": {"surefoot": reported}}, f"gave {message}") for reported, message in REPORTED),
    (1, {"truncated": np.zeros(2, bool)}, r"gave truncated of shape \(2,\) instead of True or False"),
    (1, {"truncated": "no"}, "gave truncated='no' instead of True or False"),
    (1, {"observation": np.zeros(3, np.float32)}, r"gave an observation of shape \(3,\)"),
    (0, {"observation": [0.0, "a"]}, "a list that contains more than numbers"),
    (1, {"observation": np.array([1j, 2])}, "gave an observation of complex128 where"),
    (0, {"observation": np.array([1, None])}, "gave an observation of Python objects where"),
    (1, {"observation": np.ma.array([1.0, 2.0], mask=[True, False])}, "gave an observation with masked entries"),
    (2, {"space": PAIR, "observation": {"a": np.zeros(2)}}, 'gave an observation without "b"'),
    (2, {"space": PAIR, "observation": {"a": np.zeros(3), "b": 1}}, r'"a" of shape \(3,\) where its space has shape \(2,\)'),
    (2, {"space": PAIR, "observation": {"a": np.zeros(2), "b": 3}}, r'an observation "b" 3 outside Discrete\(3\)'),
    (2, {"space": PAIR, "observation": {"a": np.zeros(2), "b": 1.0}}, '"b" of float.* where its space has integers'),
    (2, {"space": spaces.MultiBinary(2), "observation": np.array([0, 2], np.int8)}, r"\[0 2\] outside MultiBinary\(2\)"),
    (2, {"space": spaces.Box(0, 255, (36, 40, 3), np.uint8), "observation": np.zeros((36, 40, 3))}, "float64 where .* uint8"),
]


@pytest.mark.parametrize(("at", "said", "message"), FAULTS)
def test_a_faulty_environment_is_named_with_its_episode_and_step(at: int, said: dict[str, Any], message: str) -> None:
    single = [Faulty(space=said.get("space")), Faulty(at, **said)]
    with pytest.raises(SurefootError) as caught:
        run(LoopedEnvironments(one_by_one(single), 2, SEED, "faulty"))
    line, call = str(caught.value), rf"in {'step' if at else 'reset'}\(\), episode 1, step {at};"
    assert re.match(rf"faulty: environment 1 .*{message}.*{call}.*, then resume with --allow-changes$", line), line
    assert ("fix the environment (test_environments.py:" in line) == (said.get("observation") is boom)


def test_environments_made_before_a_failure_are_closed() -> None:
    made: list[Any] = []
    closed: list[Any] = []

    class Kept(Endless):
        def close(self) -> None:
            closed.append(self)

    def make() -> Any:
        if len(made) == 2:
            boom()
        made.append(Kept())
        return made[-1]

    with pytest.raises(SurefootError, match="could not be made"):
        make_environments(make, {}, 3, SEED)
    assert closed == made
    assert len(made) == 2


def test_an_environment_that_fails_while_replaying_is_lost_and_starts_a_new_episode() -> None:
    environments = LoopedEnvironments(Endless, 1, SEED, "faulty")
    environments.reset()
    for _ in range(3):
        environments.step(np.zeros(1, int))
    state = environments.state_dict()

    class Broken(Endless):
        def step(self, action: Any) -> Any:
            return boom()

    again = LoopedEnvironments(Broken, 1, SEED, "faulty")
    _, lost = again.load_state_dict(state)
    assert list(lost) == [0]
    assert again.records[0].number == 1


@pytest.mark.parametrize(("mode", "at"), [("NEXT_STEP", 0), ("NEXT_STEP", 2), ("SAME_STEP", 1), ("DISABLED", 0)])
def test_a_fault_inside_a_vector_environment_is_a_one_line_error(mode: str, at: int) -> None:
    environments = together(mode, [Faulty(), Faulty(at, observation=boom)])
    call = at + (4 if mode == "NEXT_STEP" else 3)  # the first episode takes three, and its end one more where a step resets
    with pytest.raises(
        SurefootError, match=rf"^tiny: raised RuntimeError: the wheels came off, in call {call} of step\(\)"
    ) as caught:
        run(environments)
    assert ("has metadata['autoreset_mode']=NEXT_STEP" in str(caught.value)) == (mode == "NEXT_STEP" and not at)


@pytest.mark.parametrize(("mode", "at"), [("NEXT_STEP", 2), ("SAME_STEP", 3), ("DISABLED", 3)])
@pytest.mark.parametrize(("reported", "message"), REPORTED)
def test_what_a_vector_environment_reports_wrongly_is_an_error(mode: str, at: int, reported: Any, message: str) -> None:
    with pytest.raises(SurefootError, match=rf"^tiny: gave {message}, in call 6 of step\(\)"):
        run(together(mode, [Faulty(), Faulty(at, info={"surefoot": reported})]))


# ---- what can't be made -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is out of date")
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("NoSuchTask-v0", r"task='NoSuchTask-v0': could not be made \(NameNotFound"),
        ("Walker2d-v3", "^task='Walker2d-v3': was removed from Gymnasium; use 'Walker2d-v5'$"),
        (lambda: sys.exit(), r"could not be made \(SystemExit\); fix it \(test_environments\.py"),
        (lambda size: None, "missing 1 required positional argument: 'size'.*; its arguments are the table environment"),
        (dict, r"made a dict, not a gymnasium\.Env"),
    ],
)
def test_what_can_not_be_made_is_named(task: Any, message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        make_environments(task, {}, 1, SEED)


@pytest.mark.parametrize(
    ("error", "extra"),
    [
        (gymnasium.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`'), "mujoco"),
        (ModuleNotFoundError("No module named 'ale_py'"), "atari"),
    ],
    ids=["mujoco", "ale module"],
)
def test_a_missing_package_names_the_extra_to_install(error: Exception, extra: str) -> None:
    def needs_more() -> Any:
        raise error

    with pytest.raises(SurefootError, match=rf"needs_more.*pip install .*\[{extra}\]'"):
        surefoot.train(needs_more, surefoot.PPO_CLIP, steps=100)


def test_the_line_that_fails_while_an_environment_is_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(legs=2):\n    assert legs == 4\n")
    with pytest.raises(SurefootError, match=r"could not be made \(AssertionError\); fix it \(mine\.py:2\)$"):
        make_environments(f"{tmp_path / 'mine.py'}:make", {}, 1, SEED)
    (tmp_path / "worse.py").write_text("legs = 2\nassert legs == 4\n")
    with pytest.raises(SurefootError, match=r"can't be imported \(AssertionError in worse\.py:2\); fix the file"):
        make_environments(f"{tmp_path / 'worse.py'}:make", {}, 1, SEED)


def test_an_assertion_of_a_library_is_named_with_its_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of packages that don't fit the installed MuJoCo: there is no text, and no line of the user's."""
    (tmp_path / "robots.py").write_text("def make():\n    assert __name__ is None\n")
    monkeypatch.setattr(errors.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    line = r"could not be made \(AssertionError: [^/]+/robots\.py:2, assert __name__ is None\)$"
    with pytest.raises(SurefootError, match=line):
        make_environments(f"{tmp_path / 'robots.py'}:make", {}, 1, SEED)


def test_a_vector_environment_without_single_spaces_is_rejected_in_one_line() -> None:
    class Bare(VectorEnv[Any, Any, Any]):
        num_envs = 2
        observation_space = action_space = spaces.Discrete(2)

    with pytest.raises(SurefootError, match=r"^task='Bare': .*without single_observation_space and single_action_space"):
        make_environments(Bare, {}, 2, SEED)


PLUGIN = """\
import gymnasium
gymnasium.register("{id}", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
"""


@pytest.mark.parametrize(
    ("states", "task"),
    [(True, "Mazestrue-Small-v0"), (False, "lab/Fetch-v4"), (False, "Arm-v1")],
    ids=["says so", "in a namespace", "of another name"],
)
def test_an_id_that_an_installed_package_registers_is_named_with_its_package(
    states: bool, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"mazes{task.partition('-')[0].replace('/', '')}".lower()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(PLUGIN.format(id=task))
    about = tmp_path / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: gymnasium>=1\n")
    (about / "top_level.txt").write_text(package)
    if states:
        (about / "entry_points.txt").write_text(f"[gymnasium.envs]\n__root__ = {package}.within:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SurefootError, match=rf"^task='{task}': .*name it '{package}:{task}'$"):
        surefoot.train(task, steps=100)
    assert surefoot.train(f"{package}:{task}", steps=1, evaluation={"episodes": 0}) is not None


def test_a_package_that_needs_no_gymnasium_is_not_imported_for_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(SurefootError, match="'this-v0': no recipe"):
        surefoot.train("this-v0", steps=100)
    assert "this" not in sys.modules


def test_a_task_may_be_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import gymnasium\n\ndef make(**a):\n    return gymnasium.make('CartPole-v1', **a)\n")
    made = make_environments(f"{tmp_path / 'mine.py'}:make", {"sutton_barto_reward": True}, 2, SEED)
    assert made.reset()["observation"].shape == (2, 4)
    assert (made.step(np.zeros(2, np.int64)).rewards == 0).all(), "and gets its arguments"


def two_actions_then_three(made: Path) -> Endless:
    """An environment with two actions for the first caller of any process, and with three for others."""
    environment = Endless()
    try:
        made.touch(exist_ok=False)
    except FileExistsError:
        environment.action_space = spaces.Discrete(3)
    return environment


@pytest.mark.parametrize("backend", ["loop", "workers"])
def test_environments_of_one_run_with_other_actions_are_rejected(backend: str, tmp_path: Path) -> None:
    """One policy acts in all: with bounds of ±5 it would send 5 to an environment that takes up to 1."""
    rollout = {"environments": 2, "steps": 4, "backend": backend} | ({"workers": 2} if backend == "workers" else {})
    with pytest.raises(SurefootError, match=r"environment 1 has Discrete\(\d\), the first has Discrete\(\d\); make all with"):
        surefoot.train(partial(two_actions_then_three, tmp_path / "made"), "A2C", steps=8, rollout=rollout)


# ---- spaces -----------------------------------------------------------------------------------------------------------


def endless_with(**space: spaces.Space[Any]) -> Callable[[], Endless]:
    def strange() -> Endless:
        env = Endless()
        for name, value in space.items():
            setattr(env, f"{name}_space", value)
        return env

    return strange


NODES = spaces.Graph(spaces.Box(0, 1, (2,)), None)
TWICE = {"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}


@pytest.mark.parametrize(
    ("kind", "space", "message"),
    [
        ("observation", spaces.Text(5), "Text is not supported.*; wrap the environment"),
        ("observation", spaces.Box(0, 1, (0,)), r"Box\(0,\) of float32 is not supported \(it has no entries\)"),
        ("observation", spaces.Dict({"camera": spaces.Dict({"depth": NODES})}), r'part "camera\.depth": Graph'),
        ("observation", spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), 'part "1": Text'),
        ("observation", spaces.Dict(TWICE), r'part "a\.b": two parts have this name'),
        ("observation", spaces.Dict({"action_mask": spaces.MultiBinary(2)}), r'"action_mask": .*info\["action_mask"\]'),
        ("observation", spaces.Dict({}), "Dict is empty"),
        ("action", spaces.Box(0, 1, (2, 0)), r"Box\(2, 0\).* is not supported"),
        ("action", spaces.Box(0, 5, (2,), np.int64), r"Box\(2,\) of int64 is not supported"),
    ],
    ids=str,
)
def test_a_space_that_is_not_supported_is_named(kind: str, space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(SurefootError, match=rf"strange.*: {kind} space .*{message}"):
        surefoot.train(endless_with(**{kind: space}), surefoot.PPO_CLIP, steps=100)


def test_leaves_of_a_vector_environment_lie_in_memory_as_they_are_read_whatever_its_own_layout() -> None:
    space = spaces.Box(-1, 1, (2,))
    reader = Reader(space, spaces.Discrete(2), 3, "rows")
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    for seen in (table, np.asfortranarray(table), np.ascontiguousarray(table.T).T):
        actual = reader.batch(seen)["observation"]
        assert actual.flags.c_contiguous
        assert np.array_equal(actual, table)


# ---- spaces and sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no observation_space and no action_space; set observation_space and action_space, of gymnasium.spaces"),
        ({"observation_space": "Box(2)", "action_space": None}, "observation_space of builtins and no action_space; set"),
    ],
)
def test_an_environment_without_spaces_is_one_line(fields: dict[str, Any], words: str) -> None:
    bare = type("Bare", (gymnasium.Env,), fields)
    with pytest.raises(SurefootError, match=f"^task='Bare': made an environment with {words}"):
        surefoot.train(bare, steps=64)
    vector = type("Rows", (), {"num_envs": 2, "device": "cpu", "step": None})
    with pytest.raises(SurefootError, match=r"^task='Rows': made an environment with no single_observation_space and"):
        surefoot.train(vector, steps=64)


class Tenths(Endless):
    """Pays a tenth in each of ten steps, which float32 does not have."""

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(2, np.float32), 0.1, self.t == 10, False, {}


class TenthsInTensors:
    num_envs, device, metadata = 2, "cpu", {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = Endless.observation_space, Endless.action_space

    def reset(self, *, seed: int | None = None) -> Any:
        self.t = 0
        return torch.zeros(2, 2), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        over = torch.full((2,), self.t % 10 == 0)
        return torch.zeros(2, 2), torch.full((2,), 0.1, dtype=torch.float64), over, torch.zeros(2, dtype=torch.bool), {}


@pytest.mark.parametrize("kind", ["loop", "vector", "tensors"])
def test_returns_are_sums_of_rewards_in_float64(kind: str) -> None:
    makers: dict[str, Any] = {"loop": Tenths, "tensors": TenthsInTensors, "vector": lambda: SyncVectorEnv([Tenths] * 2)}
    fields: dict[str, Any] = {"rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}}
    seen: list[float] = []
    listen = lambda metrics: seen.append(metrics["episode_return"])  # noqa: E731
    agent = surefoot.train(makers[kind], surefoot.A2C, steps=32, callback=listen, **fields)
    assert set(seen) == {sum([0.1] * 10)}
    if kind == "loop":
        assert surefoot.evaluate(agent, Tenths, episodes=2).returns == [sum([0.1] * 10)] * 2
