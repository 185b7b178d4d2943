"""``surefoot check`` of the machine, a recipe and a run: each problem has a remedy, and the exit code shows the result."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import surefoot
from surefoot.diagnostics.machine import EXTRAS, check_compiler, check_device, check_disk, check_extras, check_python
from surefoot.diagnostics.recipe import check_bounds, check_environment

ROOT = Path(__file__).resolve().parent.parent.parent


class Task(gymnasium.Env[np.ndarray, int]):
    """One step is as good as another, unless a test says otherwise."""

    def __init__(self, pays: float = 0.0, sees: float = 0.0, random: bool = False, gives: float = 0.0) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
        self.pays, self.sees, self.random, self.gives, self.steps = pays, sees, random, gives, 0

    def _look(self) -> np.ndarray:
        noise = np.random.default_rng().uniform(-1, 1) if self.random else 0.0
        return np.full(2, self.sees + noise, np.float32).clip(-2, 2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._look(), self.pays * action + self.gives, False, self.steps == 10, {}


def states(task: Any) -> dict[str, tuple[str, str]]:
    return {check.name: (check.state, check.what) for check in check_environment(task, {})}


def test_every_extra_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}


def test_missing_parts_of_the_machine_are_listed_with_a_remedy() -> None:
    assert check_python((3, 9)).state == "failed"
    assert check_extras({"moon": ("no_such_module",)}).fix.endswith("[moon]'")
    assert [check_disk(free=size).state for size in (1e6, 1e9, 1e12)] == ["failed", "warning", "ok"]
    assert check_device("cuda:77").state == "failed"
    assert "device = 'cpu'" in check_device("cuda:77").fix


def test_a_missing_compiler_is_serious_only_if_the_recipe_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.accel.programs.compiler", lambda: None)
    assert [check_compiler(engine).state for engine in ("eager", "auto", "compiled")] == ["absent", "warning", "failed"]
    assert "this run would be compiled with one" in check_compiler("auto").what


def test_a_reward_that_random_actions_never_get_is_a_warning() -> None:
    assert states(lambda: Task(pays=0.0))["reward"][0] == "warning"
    assert "never differs" in states("MountainCar-v0")["reward"][1]
    assert "never differs" in states(lambda: Task(gives=0.3))["reward"][1], "whose mean is not quite 0.3"
    assert states(lambda: Task(pays=1.0))["reward"][0] == "ok"
    assert "hard to fit for a critic" in states(lambda: Task(pays=1e4))["reward"][1]
    assert states(lambda: Task(pays=float("nan")))["reward"][0] == "failed"
    assert states(lambda: Task(pays=1e300))["reward"][0] == "failed", "beyond float32"
    scaled = check_environment(lambda: Task(pays=1e4), {}, scaled=True)
    assert "ok" in [check.state for check in scaled if check.name == "reward"], "normalise.rewards is set already"


class Limited(Task):
    """Ends after ``limit`` steps, by a termination or a truncation, and perhaps at random before."""

    def __init__(self, limit: int, terminates: bool, crashes: float = 0.0) -> None:
        super().__init__(pays=1.0)
        self.limit, self.terminates, self.crashes = limit, terminates, crashes

    def step(self, action: int) -> Any:
        observation, reward, *_ = super().step(action)
        over = self.steps == self.limit or self.np_random.random() < self.crashes
        return observation, reward, over and self.terminates, over and not self.terminates, {}


def test_a_time_limit_that_terminates_is_a_warning() -> None:
    assert "all 5 random episodes are terminated after 100 steps" in states(lambda: Limited(100, True))["ends"][1]
    assert " of " in states(lambda: Limited(40, True, crashes=0.02))["ends"][1], "some crash before"
    assert "ends" not in states(lambda: Limited(100, False))
    assert "ends" not in states(lambda: Limited(400, True, crashes=0.05))
    assert "ends" not in states(lambda: Limited(10, True)), "a short game"
    assert "ends" not in states("CartPole-v1")


class Boxed(Task):
    """Takes one number between bounds."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(pays=1.0)
        self.action_space = spaces.Box(low, high, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(float(action[0]))


@pytest.mark.parametrize(
    ("low", "high", "stretched", "state", "message"),
    [
        (100, 1000, True, "ok", "bounds 100 to 1,000, the policy's −1 to 1 is rescaled to them"),
        (100, 1000, False, "warning", "bounds 100 to 1,000: an untrained policy draws 0 ± 1, of which 0% is within"),
        (-1e-3, 1e-3, False, "warning", "bounds -0.001 to 0.001"),
        (-50, 50, False, "warning", "a small part of that"),
        (-0.4, 0.4, False, "ok", "bounds -0.4 to 0.4, actions are clipped to them"),
        (100, np.inf, True, "warning", "bounds 100 to inf"),
        (-np.inf, np.inf, True, "ok", "bounds -inf to inf"),
    ],
)
def test_bounds_far_from_the_initial_policy_are_a_warning_with_a_remedy(
    low: float, high: float, stretched: bool, state: str, message: str
) -> None:
    (findings,) = (check for check in check_environment(lambda: Boxed(low, high), {}, 1, stretched) if check.name == "actions")
    assert (findings.state, message in findings.what) == (state, True), findings.what
    if state == "warning":
        assert findings.fix == ("set normalise.actions = true" if high < np.inf else "scale actions to about ±1, by a wrapper")


def test_bounds_of_an_action_of_several_parts_name_the_part() -> None:
    arm = spaces.Dict({"mode": spaces.Discrete(2), "near": spaces.Box(-1, 1, (1,)), "thrust": spaces.Box(-50, 50, (2,))})
    (found,) = check_bounds(spaces.Dict({"arm": arm}), False, 1.0)
    assert found.what.startswith('part "arm.thrust": bounds -50 to 50 (number 0 of 2): an untrained policy')


class Sick(gymnasium.Env[Any, Any]):
    """What it shows is not what training takes, from the fifth step on; Gymnasium's checker takes one step."""

    observation_space = gymnasium.spaces.Dict({"near": gymnasium.spaces.Box(-1, 1, (2,)), "far": gymnasium.spaces.Discrete(2)})
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sick: Any) -> None:
        self.sick, self.t = sick, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return {"near": np.zeros(2, np.float32), "far": 0}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        fine = {"near": np.zeros(2, np.float32), "far": 0}
        shown = fine if self.t < 5 else self.sick
        return shown, float(action), self.t > 50, False, shown.get("info", {})


@pytest.mark.parametrize(
    ("sick", "message"),
    [
        ({"near": np.float32([0, np.nan]), "far": 0}, 'step 5 of random actions gave an observation "near" that is not finite'),
        ({"near": np.zeros(2, np.float32)}, 'step 5 of random actions gave an observation without "far"'),
        ({"near": np.zeros(3, np.float32), "far": 0}, "shape (3,)"),
        ({"near": np.zeros(2, np.float32), "far": 7}, "outside"),
        (
            {"near": np.zeros(2, np.float32), "far": 0, "info": {"surefoot": {"life": True}}},
            "'life' in info['surefoot'], which",
        ),
    ],
    ids=["not finite", "a part is missing", "another shape", "out of range", "an unknown key"],
)
def test_errors_at_the_fifth_step_are_reported(sick: Any, message: str) -> None:
    state, line = states(lambda: Sick(sick))["observation"][:2]
    assert state == "failed"
    assert message in line


class Forbidding(gymnasium.Env[Any, Any]):
    """Raises at an action that its mask forbids: only one combination is allowed, another after each step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space: Any, sizes: tuple[int, ...], start: int) -> None:
        self.action_space, self.sizes, self.start, self.t = action_space, sizes, start, 0

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.concatenate([np.arange(size) == self.t % size for size in self.sizes])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.full(2, 0, np.float32), self._info()

    def step(self, action: Any) -> Any:
        assert (np.reshape(action, -1) - self.start).tolist() == [self.t % size for size in self.sizes], action
        assert self.action_space.contains(action)
        self.t += 1
        return np.full(2, self.t / 10, np.float32), float(self.np_random.normal()), self.t >= 10, False, self._info()


@pytest.mark.parametrize(
    ("action_space", "sizes", "start"),
    [
        (spaces.Discrete(3, start=-1), (3,), -1),
        (spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[5, 5], [5, 5]]), (3, 2, 2, 4), 5),
        (spaces.MultiBinary(3), (2, 2, 2), 0),
    ],
    ids=str,
)
def test_an_environment_that_raises_at_forbidden_actions_passes(action_space: Any, sizes: tuple[int, ...], start: int) -> None:
    checks = states(lambda: Forbidding(action_space, sizes, start))
    assert {name: check[:2] for name, check in checks.items() if check[0] != "ok"} == {}
    assert checks["reward"][1].startswith("random allowed actions get ")


def test_a_mask_of_the_wrong_length_is_reported_once_by_its_length() -> None:
    checks = states(lambda: Forbidding(spaces.Discrete(3), (3, 2), 0))
    wrong = "an action mask of length 5 where its action space needs length 3"
    assert [name for name, check in checks.items() if wrong in check[1]] == ["observation"]


def test_an_environment_that_a_seed_does_not_replay_fails() -> None:
    assert states(lambda: Task(random=True))["environment"][0] == "failed"


def test_observations_outside_their_bounds_and_those_that_never_change_are_warnings_by_part() -> None:
    """Training goes on. A small change of a large number is one if the policy reads it, as float32 or normalised."""

    class Robot(Task):
        def __init__(self) -> None:
            super().__init__(pays=1.0)
            clock = spaces.Box(-np.inf, np.inf, (), np.float64)
            self.observation_space = spaces.Dict(
                arm=self.observation_space, clock=clock, map=spaces.Box(0, 1, (36, 36), np.uint8)
            )

        def _look(self) -> Any:
            arm, picture = np.float32([0.5, self.steps / 8]), np.full((36, 36), self.steps, np.uint8)
            return {"arm": arm, "clock": np.array(1.7e9 + self.steps), "map": picture}

    found = {(check.name, check.what) for check in check_environment(Robot, {}) if check.state != "ok"}
    assert found == {
        ("bounds", 'part "arm": observed numbers from 0 to 1.25, outside the bounds (-1 to 1) in 18% of the steps'),
        ("bounds", 'part "map": observed numbers from 0 to 10, outside the bounds (0 to 1) in 82% of the steps'),
        ("constant", 'part "clock": the observation is the same in all of 551 steps, as the policy reads it'),
    }
    found = {(check.name, check.what[:12]) for check in check_environment(Robot, {}, normalised=True) if check.state != "ok"}
    assert found == {("bounds", 'part "arm": '), ("bounds", 'part "map": ')}


def test_the_command_checks_a_machine_and_a_recipe(command: Any) -> None:
    code, out, _ = command("check", "CartPole-v1")
    assert code == 0
    for words in ("Python", "PyTorch", "8 environments x 32 steps = 256 steps", "passes Gymnasium's checker", "steps/s"):
        assert words in out
    code, out, _ = command("check", "--json")
    report = json.loads(out)
    assert code == 0
    assert {check["name"] for check in report["checks"]} >= {"Python", "PyTorch", "extras", "disk", "compiler"}
    assert not report["failed"]


def test_a_recipe_that_can_not_begin_fails_with_its_remedy(command: Any, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def make():\n    raise RuntimeError('the wheels came off\\x1b[2J\\x9b2J')\n")
    (tmp_path / "recipe.toml").write_text('task = "task.py:make"\nsteps = 100\n')
    code, out, _ = command("check", "recipe.toml")
    assert code == 1
    assert re.search(r"✗ recipe .*the wheels came off", out)
    assert "\x1b" not in out, "what a terminal would obey is shown as what it is"
    assert "\x9b" not in out
    code, _, err = command("check", "no_such.toml")
    assert code == 2
    assert err.count("\n") == 1


def test_a_budget_smaller_than_a_batch_is_reported(command: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('task = "CartPole-v1"\nsteps = 10\n')
    code, out, _ = command("check", "recipe.toml")
    assert code == 0
    assert "! budget" in out


def test_the_command_prints_a_runs_findings(command: Any) -> None:
    fields = {"rollout": {"environments": 4, "steps": 32}, "evaluation": {"episodes": 0}}
    surefoot.train("CartPole-v1", steps=2_560, optimizer={"learning_rate": 1e-9}, run_dir="runs/idle", **fields)
    code, out, _ = command("check", "runs/idle")
    assert code == 0, "a warning is no failure"
    assert "warning: the return has hardly risen" in out
    assert "  try: a higher optimizer.learning_rate" in out
    report = json.loads(command("check", "runs/idle", "--json")[1])
    assert report["findings"][0]["evidence"][0]["metric"] == "episode_return"
    assert "config_changed" not in report
    config = Path("runs/idle/config.toml")
    config.write_text(config.read_text().replace("learning_rate = 1e-09", "learning_rate = 0.5"))
    assert "changed since the checkpoint: optimizer.learning_rate: " in command("check", "runs/idle")[1]
    assert json.loads(command("check", "runs/idle", "--json")[1])["config_changed"]
    (Path("runs/idle") / "metrics.jsonl").write_text("")
    assert command("check", "runs/idle")[0] == 2


def test_an_environment_that_fails_in_its_turns_is_a_line_among_the_others(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a: "}\n')
    (tmp_path / "talk.py").write_text(
        "class Broken:\n    def reset(self, row):\n        return 'hi'\n"
        "    def step(self, response):\n        raise RuntimeError('no network')\n"
    )
    (tmp_path / "recipe.toml").write_text(
        'kind = "language"\nmodel = "pocket"\nsteps = 64\ndata = { train = "rows.jsonl" }\nsampling = { max_tokens = 4 }\n'
        'turns = { environment = "talk.py:Broken" }\n'
    )
    code, out, err = command("check", "recipe.toml")
    assert (code, err) == (1, "")
    assert re.search(r"^✗ answers .*no network", out, flags=re.M), out


def test_a_reward_is_tried_on_samples(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a: "}\n{"prompt": "b: "}\n')
    (tmp_path / "paid.py").write_text(
        "def good(responses):\n    return [len(set(text)) for text in responses]\n"
        "def dead(responses):\n    return [-4.5] * len(responses)\n"
        "def short(responses):\n    return [1.0]\n"
    )
    for function, state, code in (("good", "✓", 0), ("dead", "!", 0), ("short", "✗", 1)):
        (tmp_path / "recipe.toml").write_text(
            'kind = "language"\nmodel = "pocket"\nsteps = 64\ndata = { train = "rows.jsonl" }\n'
            f'reward = {{ terms = [{{ function = "paid.py:{function}" }}], missing_eos = "penalty" }}\n'
            "sampling = { max_tokens = 8, stop = ['a', 'e', 'i', 'o', 'u', 's', 't'] }\n"
        )
        actual = command("check", "recipe.toml")
        assert actual[0] == code, actual
        assert re.search(rf"^{re.escape(state)} reward ", actual[1], flags=re.M), actual[1]
        assert "memory" in actual[1]
        above = re.search(r"^! truncated answers +each earns -1, more than (\d) of \1 complete ones", actual[1], flags=re.M)
        assert bool(above) is (function == "dead"), actual[1]


class Listed(gymnasium.Env[Any, int]):
    """Returns lists of numbers, which training reads as arrays."""

    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, space: Any, observation: Any) -> None:
        self.observation_space, self.observation = space, observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation, float(action), bool(self.np_random.random() < 0.1), False, {}


PAIR = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (PAIR, [0, 1]),
        (spaces.Dict(a=PAIR), {"a": [0.0, 1.0]}),
        (spaces.Tuple([PAIR, PAIR]), ([0.0, 1.0], [1.0, 0.0])),
        (spaces.MultiDiscrete([2, 3]), [0, 1]),
        (PAIR, np.array([0, 1])),
        (spaces.Box(-1, 1, (), np.float32), np.float64(0.1)),
    ],
    ids=repr,
)
def test_numbers_of_other_types_pass_if_training_accepts_them(space: Any, observation: Any) -> None:
    actual = states(lambda: Listed(space, observation))
    assert actual["environment"] == ("ok", "<lambda> passes Gymnasium's checker")
    assert not {"observation"} & actual.keys()
    fields: dict[str, Any] = {"rollout": {"environments": 1, "steps": 8}, "evaluation": {"episodes": 0}}
    surefoot.train(lambda: Listed(space, observation), surefoot.A2C, steps=1, **fields)
