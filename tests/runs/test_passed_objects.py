"""Functions and classes passed from Python: a run records their names, and resuming needs some of them again."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn

import surefoot
from surefoot import SurefootError
from surefoot.cli.train import dry_run_text
from surefoot.core.optimizer import scheduled
from surefoot.diagnostics.recipe import check_recipe
from surefoot.files import read_toml
from surefoot.recipes.callables import take_objects
from surefoot.recipes.presets import resolve_recipe
from surefoot.runs.factory import prepared_world
from surefoot.store.metrics import read_metrics

TINY: dict[str, Any] = {
    "preset": "none",
    "seed": 1,
    "rollout": {"environments": 2, "steps": 16},
    "evaluation": {"episodes": 0},
    "traces": {"rows": 0},
    "checkpoint": {"every": 32},
}
REUSE = {"epochs": 2, "minibatches": 2}
STEPS = 192


def trained(objective: dict[str, Any] | None = None, **fields: Any) -> surefoot.Agent:
    fields.setdefault("steps", STEPS)
    return surefoot.train("CartPole-v1", objective={"reuse": REUSE, **(objective or {})}, **{**TINY, **fields})


def weights(agent: surefoot.Agent) -> list[Tensor]:
    return [tensor.clone() for tensor in agent.state_dict().values()]


def same(one: surefoot.Agent, other: surefoot.Agent) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


class Net(nn.Module):
    """A network of this module, so that its name can be imported."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(space.shape[0], 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def halved(left: float) -> float:
    return left / 2


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module ``mine`` that can be imported, with this file's network and schedule."""
    module = ModuleType("mine")
    module.Net, module.halved = Net, halved  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def cut(folder: Path, **fields: Any) -> Path:
    """A run that stops after two iterations."""
    stops = iter([False, True])
    trained(run_dir=folder, callback=lambda row: next(stops), **fields)
    assert len(read_metrics(folder / "metrics.jsonl")) == 2
    return folder


# ---- networks ------------------------------------------------------------------------------------------------------------


def test_a_class_trains_like_its_name() -> None:
    assert same(trained(network={"custom": Net}), trained(network={"custom": "mine:Net"}))


def test_an_importable_class_is_recorded_by_name_and_not_needed_again(tmp_path: Path) -> None:
    run = cut(tmp_path / "run", network={"custom": Net})
    name = f"{Net.__module__}:Net"
    assert read_toml(run / "config.toml")["network"]["custom"] == name
    assert same(surefoot.resume(run), trained(network={"custom": Net}))
    assert isinstance(surefoot.load(run).policy.actor_trunk.module, Net)


def test_any_other_function_is_passed_again_to_resume_and_load(tmp_path: Path) -> None:
    def local(space: Any) -> nn.Module:
        return Net(space)

    run = cut(tmp_path / "run", network={"custom": local})
    needed = (
        r"^network\.custom='.*:.*<locals>.*': was passed as a Python object, .* surefoot\.load\(run, network={\"custom\": funct"
    )
    for again in (surefoot.load, surefoot.resume, surefoot.evaluate):
        with pytest.raises(SurefootError, match=needed):
            again(run)
    with pytest.raises(SurefootError, match=r"network='.*:Net': the run has network\.custom='.*'; pass the functions that"):
        surefoot.resume(run, network={"custom": Net})
    assert same(surefoot.resume(run, network={"custom": local}), trained(network={"custom": local}))
    assert isinstance(surefoot.load(run, network={"custom": local}), surefoot.Agent)


def test_a_new_training_starts_from_a_run_with_the_same_passed_network(tmp_path: Path) -> None:
    def local(space: Any) -> nn.Module:
        return Net(space)

    before = trained(network={"custom": local}, run_dir=tmp_path / "first")
    after = trained(network={"custom": local}, start=str(tmp_path / "first"), optimizer={"learning_rate": 1e-30})
    assert torch.equal(before.policy.actor_head.weight, after.policy.actor_head.weight)


# ---- schedules -----------------------------------------------------------------------------------------------------------


def test_functions_equal_to_named_schedules_train_like_the_names() -> None:
    pairs: list[tuple[Any, Any]] = [("linear", lambda left: left), ("constant", lambda left: 1)]
    for name, function in pairs:
        assert same(trained(optimizer={"schedule": name}), trained(optimizer={"schedule": function}))
        fields = ({"trust_region": {"clip": 0.2, "schedule": schedule}} for schedule in (name, function))
        assert same(*(trained(objective) for objective in fields))
    cosine = trained(optimizer={"schedule": "cosine", "warmup": 0.3})
    assert same(cosine, trained(optimizer={"schedule": lambda left: (1 - math.cos(math.pi * left)) / 2, "warmup": 0.3}))


def test_a_run_with_scheduled_functions_resumes_exactly(tmp_path: Path) -> None:
    fields = {"optimizer": {"schedule": lambda left: left}, "objective": {"trust_region": {"clip": 0.2, "schedule": halved}}}
    whole = trained(**fields)
    run = cut(tmp_path / "run", **fields)
    with pytest.raises(SurefootError, match=r"^optimizer\.schedule='.*<lambda>': was passed .*resume\(run, optimizer={\"sched"):
        surefoot.resume(run)
    assert same(surefoot.resume(run, optimizer=fields["optimizer"]), whole)
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_schedule_from_a_file_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decay.py").write_text("def decay(left):\n    return left\n")
    fields: dict[str, Any] = {"optimizer": {"schedule": "decay.py:decay"}}
    run = cut(tmp_path / "run", **fields)
    assert same(surefoot.resume(run), trained(optimizer={"schedule": "linear"}))


def test_an_invalid_schedule_is_rejected_before_training(tmp_path: Path) -> None:
    for schedule, message in (
        (lambda left: 1 / 0, r"^optimizer\.schedule: the function raised ZeroDivisionError.* for 1; fix it"),
        (lambda left: math.nan, r"^optimizer\.schedule: the function returned nan for 1; return a finite factor of at least 0"),
        (lambda left: left - 0.7, r"^optimizer\.schedule: the function returned -0\.2.* for 0\.5; return"),
        (lambda left: "fast", r"^optimizer\.schedule: the function raised ValueError"),
        (
            "lineer",
            r"^optimizer\.schedule='lineer': must be constant, linear, cosine, adaptive or file\.py:function; did you mean "
            r"'linear'\?",
        ),
        (3, r"^optimizer\.schedule=3: must be constant"),
        ("no.py:decay", r"^optimizer\.schedule='no\.py:decay': can't be imported"),
    ):
        with pytest.raises(SurefootError, match=message):
            trained(optimizer={"schedule": schedule}, run_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    for schedule, message in (
        ("cosine", "='cosine': must be constant, linear or file"),
        (lambda left: -1, ": the function re"),
    ):
        with pytest.raises(SurefootError, match=rf"^objective\.trust_region\.schedule{message}"):
            trained({"trust_region": {"clip": 0.2, "schedule": schedule}})
    with pytest.raises(SurefootError, match=r"^optimizer\.learning_rate='.*': is a function; set the largest rate, and"):
        trained(optimizer={"learning_rate": halved})


def test_a_dry_run_and_a_check_try_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decay.py").write_text("def decay(left):\n    return -left\n")
    resolved = resolve_recipe("CartPole-v1", {"optimizer": {"schedule": "decay.py:decay"}})
    with pytest.raises(SurefootError, match=r"^optimizer\.schedule: the function returned -1 for 1; return"):
        dry_run_text(resolved)
    recipe = next(each for each in check_recipe(resolved.recipe, prepared_world) if each.name == "recipe")
    assert recipe.severity == "serious"


def test_the_core_rejects_function_names_as_schedules() -> None:
    assert scheduled("field", "linear", 0.25) == 0.25
    with pytest.raises(SurefootError, match="field='mine:halved': is the name of a function; pass the function itself"):
        scheduled("field", "mine:halved", 0.5)  # type: ignore[arg-type]


# ---- environments --------------------------------------------------------------------------------------------------------


def without_mode() -> Any:
    made = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    made.metadata = {}
    return made


def test_environments_that_can_not_be_used_are_rejected_before_training() -> None:
    rows: list[Any] = []
    workers = {**TINY["rollout"], "backend": "workers"}
    for task, rollout, message in (
        (lambda: gymnasium.make("CartPole-v1"), workers, "at the top of a module"),
        (without_mode, TINY["rollout"], "is not an autoreset mode"),
    ):
        with pytest.raises(SurefootError, match=message) as error:
            surefoot.train(task, steps=64, callback=rows.append, **{**TINY, "rollout": rollout})
        assert ("\n" in str(error.value), rows) == (False, [])


# ---- both ----------------------------------------------------------------------------------------------------------------


def test_resume_accepts_functions_but_no_other_settings(tmp_path: Path) -> None:
    run = cut(tmp_path / "run", network={"custom": Net})
    for fields in ({"optimizer": {"learning_rate": 1.0}}, {"network": {"custom": Net, "hidden": [3]}}, {"network": Net}):
        with pytest.raises(SurefootError, match=r": only functions and classes that train got are passed again"):
            surefoot.resume(run, **fields)


def test_names_stand_for_functions_wherever_they_are_nested() -> None:
    settings = surefoot.Clip(0.1)
    taken, functions = take_objects({"objective": {"trust_region": settings}, "network": {"custom": halved}, "steps": 3})
    assert taken == {
        "objective": {"trust_region": {"clip": 0.1, "clip_high": None, "dual_clip": None, "schedule": "constant"}},
        "network": {"custom": f"{__name__}:halved"},
        "steps": 3,
    }
    assert functions == {"network.custom": halved}
