"""A resumed environment returns what an undisturbed one would have returned, or the resume says what is different."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeReward, TimeLimit

import surefoot
from surefoot import SurefootError
from surefoot.control.environments.looped import LoopedEnvironments
from surefoot.control.environments.records import KINDS, TOGETHER, restored, saved, wrapped
from surefoot.control.environments.vector import VectorEnvironments
from surefoot.control.environments.workers import WorkerEnvironments
from surefoot.control.spaces import SpaceError
from surefoot.diagnostics.recipe import check_environment

from .test_environments import through_a_file, together
from .test_tensor import Rows
from .tiny import Endless

SHORT: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 16},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "evaluation": {"episodes": 0},
    "display": None,
}


class Curriculum(Endless):
    """Episodes of three steps; each episode raises the level, which shows in one kind of what the environment returns."""

    def __init__(self, shows: str = "rewards") -> None:
        self.shows, self.level, self.t = shows, 0, 0

    def info(self) -> dict[str, Any]:
        masks = {"action_mask": np.array([True, self.level == 0])} if self.shows == "action masks" else {}
        return masks | ({"surefoot": {"score": float(self.level)}} if self.shows == "scores" else {})

    def look(self) -> np.ndarray:
        return np.full(2, self.level / 100 if self.shows == "observations" else 0, np.float32)

    def reset(self, **_: Any) -> Any:
        self.t = 0
        return self.look(), self.info()

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= (3 + min(self.level, 1) if self.shows == "ends" else 3)
        result = self.look(), float(self.level if self.shows == "rewards" else 1), over, False, self.info()
        self.level += over
        return result


class Resumable(Curriculum):
    """The same, which saves its level."""

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


@pytest.mark.parametrize(
    ("shows", "workers"),
    [
        *((shows, 1) for shows in ("rewards", "nothing yet")),
        *((shows, 0) for shows in ("rewards", "scores", "ends", "observations", "action masks", "nothing yet")),
    ],
)
def test_a_state_that_outlives_an_episode_is_noticed_wherever_it_shows(shows: str, workers: int, tmp_path: Path) -> None:
    """Two steps after a reset, in which nothing but the first observation could be compared."""

    def two(task: Any) -> Any:
        if workers:
            return WorkerEnvironments(task, {"shows": shows}, 2, 1, workers, 60)
        return LoopedEnvironments(lambda: task(shows), 2, 1, "task")

    for task in (Curriculum, Resumable):
        environments, again = two(task), two(task)
        try:
            environments.reset()
            for _ in range(11):
                environments.step(np.zeros(2, int))
            state = through_a_file(environments.state_dict(), tmp_path / task.__name__)
            again.reset()
            _, lost = again.load_state_dict(state)
            assert again.forgotten() == (
                dict.fromkeys((0, 1), "Curriculum.level") if task is Curriculum and shows == "nothing yet" else {}
            )
            if task is Curriculum and shows != "nothing yet":
                assert list(lost) == [0, 1]
                assert {"scores": "rewards", "ends": "ended"}.get(shows, shows) in lost[0]
                continue
            assert lost == {}
            for _ in range(9):
                now, then = again.step(np.zeros(2, int)), environments.step(np.zeros(2, int))
                assert [x.tolist() for x in (now.rewards, now.scores, now.terminated, now.observations["observation"])] == [
                    x.tolist() for x in (then.rewards, then.scores, then.terminated, then.observations["observation"])
                ]
        finally:
            environments.close()
            again.close()


@pytest.mark.parametrize("task", [Curriculum, Resumable, lambda: TimeLimit(Resumable(), 50)])
def test_a_resumed_run_is_the_same_or_rejected_in_one_line_unless_changes_are_allowed(task: Any, tmp_path: Path) -> None:
    whole = surefoot.train(task, steps=128, seed=1, run_dir=tmp_path / "whole", **SHORT)
    surefoot.train(task, steps=128, seed=1, run_dir=tmp_path / "cut", callback=lambda metrics: metrics["steps"] >= 64, **SHORT)
    if task is not Curriculum:
        again = surefoot.resume(tmp_path / "cut", task=task, display=None)
        assert all(torch.equal(x, y) for x, y in zip(whole.policy.parameters(), again.policy.parameters(), strict=True))
        return
    before = sorted(path for path in (tmp_path / "cut").rglob("*") if path.is_file() and path.name != "lock")
    with pytest.raises(SurefootError, match=r"environments \[0, 1\] of Curriculum did not replay .* other rewards.*state_dict"):
        surefoot.resume(tmp_path / "cut", task=task, display=None)
    assert before == sorted(path for path in (tmp_path / "cut").rglob("*") if path.is_file() and path.name != "lock")
    surefoot.resume(tmp_path / "cut", task=task, allow_changes=True, display=None)


def test_resume_names_attributes_that_did_not_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = [0]

    class Quiet(Curriculum):
        def step(self, action: Any) -> Any:
            taken[0] += 1
            return super().step(action)

    def quiet() -> Quiet:
        return Quiet("nothing yet")

    surefoot.train(quiet, steps=128, run_dir=tmp_path, callback=lambda metrics: metrics["steps"] >= 64, **SHORT)
    surefoot.resume(tmp_path, task=quiet, display=True)
    out = "".join(capsys.readouterr())
    assert "environments [0, 1] of" in out
    assert "but Quiet.level" in out
    assert "Quiet.step.taken did not come back" in out


def test_a_wrapper_with_running_statistics_is_noticed() -> None:
    def one() -> LoopedEnvironments:
        return LoopedEnvironments(lambda: NormalizeReward(gymnasium.make("CartPole-v1")), 1, 1, "task")

    environments = one()
    environments.reset()
    for _ in range(60):
        environments.step(np.ones(1, int))
    _, lost = one().load_state_dict(environments.state_dict())
    assert "other rewards" in lost[0]


class Altered(Endless):
    """One of its steps returns something else of one kind."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.t = kind, at, 0

    def returned(self, kind: str) -> bool:
        return kind == self.kind and self.t == self.at

    def reset(self, **_: Any) -> Any:
        self.t = 0
        return np.zeros(2, np.float32), {"action_mask": np.array([True, True])}

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = np.array([0, 5e-324 if self.returned("observations") else 0])
        reward = -0.0 if self.returned("rewards") else 0.0
        about = {"score": 1e300 if self.returned("scores") else 0.0, "life_lost": self.returned("ends of episodes")}
        mask = np.array([True, not self.returned("action masks")])
        return seen, reward, False, False, {"action_mask": mask, "surefoot": about}

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)


@pytest.mark.parametrize("at", [1, TOGETHER - 1, TOGETHER, TOGETHER + 1, 2 * TOGETHER + 2])
@pytest.mark.parametrize("kind", [*KINDS, "scores"])
def test_one_other_bit_in_one_step_is_noticed_whatever_was_saved_before(kind: str, at: int) -> None:
    """Whether the hashes were read in between does not matter, and an end is noticed at its step."""

    def after(steps: int, *arguments: Any, asked: int = 0) -> Any:
        environments = LoopedEnvironments(lambda: Altered(*arguments), 1, 1, "task")
        environments.reset()
        for step in range(steps):
            environments.step(np.zeros(1, int))
            if asked and step % asked == 0:
                environments.state_dict()
        return environments.state_dict()

    steps = 2 * TOGETHER + 2
    again = LoopedEnvironments(lambda: Altered(kind, at), 1, 1, "task")
    assert again.load_state_dict(after(steps, kind, at, asked=7))[1] == {}
    for other in (after(steps), after(steps, kind, at - 1)):
        assert {"scores": "rewards"}.get(kind, kind) in again.load_state_dict(other)[1][0]


class Vector(VectorEnvironments):
    """A vector environment that saves its state."""

    def __init__(self) -> None:
        made = together("NEXT_STEP", [Resumable(), Resumable()]).environments
        rows: Any = made.envs  # type: ignore[attr-defined]
        made.state_dict = lambda: {  # type: ignore[attr-defined]
            "rows": [(row.level, row.t) for row in rows],
            "resets": made._autoreset_envs.copy(),  # type: ignore[attr-defined]
        }

        def load(state: Any) -> None:
            for row, (level, t) in zip(rows, state["rows"], strict=True):
                row.level, row.t = level, t
            made._autoreset_envs = state["resets"]  # type: ignore[attr-defined]

        made.load_state_dict = load  # type: ignore[attr-defined]
        super().__init__(made, 1, "task")


def test_a_vector_environment_with_state_continues_exactly(tmp_path: Path) -> None:
    environments, again = Vector(), Vector()
    environments.reset()
    for _ in range(11):
        environments.step(np.zeros(2, int))
    _, lost = again.load_state_dict(through_a_file(environments.state_dict(), tmp_path / "state"))
    assert lost == {}
    for _ in range(9):
        now, then = again.step(np.zeros(2, int)), environments.step(np.zeros(2, int))
        assert (now.rewards.tolist(), now.ignored.tolist()) == (then.rewards.tolist(), then.ignored.tolist())


def test_every_state_comes_back_from_a_checkpoint_with_its_types(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    state = {
        "count": 3,
        "mean": np.array(1.5),
        "table": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        "pair": (1, [2.5, None], {"x": True}),
        "places": {(0, 1): "wall", 7: b"raw"},
        "number": np.float32(2),
        "weights": torch.arange(3),
        "empty": np.zeros((0, 3)),
        "names": np.array(["a", "bc"]),
        "generator": generator.bit_generator.state,
    }
    back = restored(through_a_file(saved(state), tmp_path / "state"))
    assert repr(back) == repr(state)
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in state.items()}
    for bad in ({"a": {1}}, {"a": [object()]}, {"a": np.array([None])}):
        with pytest.raises(SpaceError, match=r"a state_dict with a .* at \['a'\].* can't be saved"):
            saved(bad)


class Reusing(Endless):
    """Writes all its observations into one array; truncated after five steps."""

    def __init__(self) -> None:
        self.seen = np.zeros(2, np.float32)

    def reset(self, **_: Any) -> Any:
        self.seen[:] = 0
        return self.seen, {}

    def step(self, action: Any) -> Any:
        self.seen += 0.1
        return self.seen, 1.0, False, bool(self.seen[0] > 0.45), {}


def test_a_final_observation_that_the_reset_has_overwritten_is_an_error() -> None:
    made = gymnasium.vector.SyncVectorEnv([Reusing] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    environments = VectorEnvironments(made, 1, "task")
    environments.reset()
    for _ in range(4):
        environments.step(np.zeros(2, int))
    with pytest.raises(SurefootError, match=r"final_obs.* is the observation after the reset.*return copies"):
        environments.step(np.zeros(2, int))
    environments.close()


class Batched(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Steps two rows in one array, which its final observations are parts of, or one array of objects; both end together."""

    num_envs, single_observation_space, single_action_space = 2, Endless.observation_space, Endless.action_space

    def __init__(self, of: str) -> None:
        self.of, self.seen = of, np.zeros((2, 2), np.float32)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}

    def reset(self, **_: Any) -> Any:
        self.seen[:] = 0
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        self.seen[:] = 1
        final = list(self.seen) if self.of == "parts" else np.array([*self.seen], dtype=object)
        self.seen[:] = 0
        return self.seen, np.ones(2), np.zeros(2, bool), np.ones(2, bool), {"final_obs": final}


def test_final_observations_of_any_vector_environment_are_those_before_the_reset() -> None:
    environments = VectorEnvironments(Batched("objects"), 1, "task")
    environments.reset()
    finals = environments.step(np.zeros(2, int)).final_observations
    assert [row["observation"].tolist() for row in finals.values()] == [[1, 1], [1, 1]]
    environments = VectorEnvironments(Batched("parts"), 1, "task")
    environments.reset()
    with pytest.raises(SurefootError, match=r"final_obs.* is the observation after the reset.*return copies"):
        environments.step(np.zeros(2, int))
    environments.environments.metadata = None
    with pytest.raises(SurefootError, match=r"metadata\['autoreset_mode'\]=None of this vector environment"):
        VectorEnvironments(environments.environments, 1, "task")


def test_one_environment_inside_several_is_rejected_also_between_training_and_evaluation() -> None:
    one = Reusing()
    make = lambda: TimeLimit(one, 100)  # noqa: E731
    for hidden in (one, [one], {"a": one}, one.step):
        assert one in wrapped(SimpleNamespace(hidden=hidden))
    with pytest.raises(SurefootError, match="environments 0 and 1 are the same Reusing inside"):
        surefoot.train(make, steps=32, **SHORT)
    alone: dict[str, Any] = {"rollout": {"environments": 1, "steps": 16}, "evaluation": {"episodes": 1}}
    with pytest.raises(SurefootError, match="another part of the run steps the same Reusing inside"):
        surefoot.train(make, steps=32, **{**SHORT, **alone})
    surefoot.train(make, steps=16, **{**SHORT, "rollout": {"environments": 1, "steps": 16}})  # released by the runs before


def test_infos_of_a_vector_environment_may_be_a_list() -> None:
    environments = together("NEXT_STEP", [Curriculum("scores"), Curriculum("scores")])
    inner: Any = environments.environments
    reset, step = inner.reset, inner.step
    infos = [{"surefoot": {"score": 7.0}}, {}]
    inner.reset = lambda **k: (reset(**k)[0], infos)
    inner.step = lambda actions: (*step(actions)[:4], infos)
    environments.reset()
    scores = environments.step(np.zeros(2, int)).scores
    assert scores is not None
    assert scores.tolist() == [7.0, 1.0]


def rows(made: type[Curriculum]) -> Any:
    """A tensor environment of two."""
    tensor = Rows([made(), made()])
    if made is Resumable:
        tensor.state_dict = lambda: {"rows": [(row.level, row.t) for row in tensor.rows]}  # type: ignore[attr-defined]
        tensor.load_state_dict = lambda state: [  # type: ignore[attr-defined]
            row.__dict__.update(level=level, t=t) for row, (level, t) in zip(tensor.rows, state["rows"], strict=True)
        ]
    return tensor


@pytest.mark.parametrize("kind", ["single", "vector", "tensor"])
def test_check_compares_a_later_episode_with_one_in_a_new_environment(kind: str) -> None:
    make = {
        "single": (lambda: Curriculum(), lambda: Resumable()),
        "vector": (lambda: together("NEXT_STEP", [Curriculum()]).environments, lambda: Vector().environments),
        "tensor": (lambda: rows(Curriculum), lambda: rows(Resumable)),
    }[kind]
    if kind == "single":  # no episode shows the level yet
        quiet = [each for each in check_environment(lambda: Curriculum("nothing yet"), {}) if each.name == "resume"]
        assert [(each.severity, each.what.split()[0]) for each in quiet] == [("note", "Curriculum.level")]
    found = [each for each in check_environment(make[0], {}) if each.name == "resume"]
    assert [each.severity for each in found] == ["warning"]
    assert "had other rewards" in repr(found[0])
    assert "self.np_random" in repr(found[0])
    assert not [each for each in check_environment(make[1], {}) if each.name == "resume"]
