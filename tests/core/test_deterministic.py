"""Deterministic algorithms: chosen by runs on NVIDIA GPUs alone, and never by the code of others or after a run."""

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor

import surefoot
from surefoot.control.environments.classic import CartPole
from surefoot.core.seeding import any_algorithm, deterministic, prepare_gpu
from surefoot.errors import SurefootError
from surefoot.recipes.presets import find_recipe
from surefoot.runs.api import launch
from surefoot.runs.session.arithmetic import arithmetic

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[bool, bool, bool]:
    memory = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.fixture(params=[False, True], ids=["any", "warnings only"])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool, bool]]:
    """PyTorch's settings in the program that trains."""
    torch.use_deterministic_algorithms(request.param, warn_only=request.param)
    yield settings()
    torch.use_deterministic_algorithms(False)


def only_by_chance() -> Tensor:
    """An operation that has no deterministic algorithm, on the CPU too."""
    return torch.zeros(3).put_(torch.tensor([0, 2]), torch.ones(2))


def test_settings_are_those_from_before_after_a_block_and_after_an_error(before: tuple[bool, bool, bool]) -> None:
    with deterministic(True):
        assert settings() == (True, False, False)
        with any_algorithm():
            assert settings() == (False, False, False)
            only_by_chance()
        assert settings() == (True, False, False)
    assert settings() == before
    with suppress(KeyError), deterministic(True), any_algorithm():
        raise KeyError
    assert settings() == before
    with deterministic(False):
        assert settings() == before


REMEDY = (
    r"^deterministic=true: put_ does not have a deterministic implementation; set deterministic = false \(to resume a run, "
)


def test_the_remedy_is_that_of_the_cause_whatever_a_layer_between_made_of_it() -> None:
    def layer() -> None:
        try:
            only_by_chance()
        except RuntimeError as error:
            raise SurefootError("network.custom: forward raised an error; fix it") from error

    with pytest.raises(SurefootError, match=REMEDY), deterministic(True):
        layer()


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("my non-deterministic double failed")
    with pytest.raises(RuntimeError) as raised, deterministic(True):
        raise error
    assert raised.value is error


def test_a_workspace_of_cublas_that_pytorch_rejects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":1:1")
    expected = (
        f"^deterministic=true: the environment variable {WORKSPACE} is :1:1; set it to :4096:8, or deterministic = false$"
    )
    with pytest.raises(SurefootError, match=expected), deterministic(True):
        raise RuntimeError(f"Deterministic behavior was enabled with … CuBLAS …, set {WORKSPACE}=:4096:8")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"device": "cuda:1"}, True), ({"device": "mps"}, False), ({"device": "cuda", "deterministic": False}, False)],
)
def test_only_runs_on_nvidia_gpus_are_deterministic_by_this_setting(fields: dict[str, object], expected: bool) -> None:
    with arithmetic(find_recipe("CartPole-v1", fields)):
        assert torch.are_deterministic_algorithms_enabled() == expected
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions on the CPU compute as those on a GPU do."""
    monkeypatch.setattr("surefoot.runs.session.arithmetic", lambda recipe: deterministic(True))


class ByChance(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with such an operation in both calls."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **options: Any) -> Any:
        only_by_chance()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        only_by_chance()
        return super().step(action)


class TensorsByChance(CartPole):
    """The same with tensors."""

    def reset(self, seed: int | None = None) -> Any:
        only_by_chance()
        return super().reset(seed=seed)

    def step(self, actions: Tensor) -> Any:
        only_by_chance()
        return super().step(actions)


class Calls(surefoot.Callback):
    """A callback with such an operation."""

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def on_iteration(self, run: surefoot.Run, metrics: Any) -> None:
        only_by_chance()
        self.calls.append(torch.are_deterministic_algorithms_enabled())


def mirror(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """CartPole's mirror image, with such an operation."""
    only_by_chance()
    return -observations, 1 - actions


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (ByChance, {"evaluation": {"episodes": 2}}),
        (lambda num_envs, device: TensorsByChance(num_envs, device), {"evaluation": {"episodes": 0}}),
        (ByChance, {"evaluation": {"episodes": 0}, "rollout": {"symmetry": mirror}}),
    ],
    ids=["environment", "tensor environment", "symmetry"],
)
def test_the_code_of_users_may_use_any_algorithm(task: Any, fields: dict[str, Any], as_on_a_gpu: None) -> None:
    """Updates between its calls are deterministic."""
    inside: list[bool] = []
    callback = Calls()

    def function(metrics: Any) -> None:
        only_by_chance()
        inside.append(torch.are_deterministic_algorithms_enabled())

    rollout = {"environments": 2, "steps": 16, **fields.get("rollout", {})}
    reuse = {"objective": {"reuse": {"epochs": 1, "minibatches": 1}}, "engine": "eager"}
    surefoot.train(
        task,
        preset="none",
        steps=64,
        display=False,
        callback=function,
        callbacks=callback,
        **{**fields, **reuse, "rollout": rollout},
    )
    assert callback.calls == inside == [False] * 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_update_is_deterministic_and_its_error_has_the_remedy(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.Tensor.backward

    def spy(*arguments: Any, **options: Any) -> None:
        only_by_chance()
        backward(*arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", spy)
    with pytest.raises(SurefootError, match=REMEDY):
        surefoot.train("CartPole-v1", steps=64, display=False, run_dir=None, engine="eager", evaluation={"episodes": 0})


def test_only_a_run_on_a_gpu_sets_the_workspace_of_cublas_which_a_program_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    prepare_gpu("cpu")
    assert WORKSPACE not in os.environ
    prepare_gpu("cuda:1")
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":16:8")
    prepare_gpu("cuda")
    assert os.environ[WORKSPACE] == ":16:8"
    monkeypatch.delenv(WORKSPACE)
    prepare_gpu("cuda", deterministic=False)
    assert WORKSPACE not in os.environ


def test_training_and_resuming_prepare_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared: list[tuple[str, bool]] = []
    monkeypatch.setattr(launch, "prepare_gpu", lambda device, deterministic: prepared.append((device, deterministic)))
    fields = {"display": False, "evaluation": {"episodes": 0}, "deterministic": False}
    surefoot.train("CartPole-v1", run_dir=tmp_path / "run", steps=600, **fields, callback=lambda metrics: True)
    surefoot.resume(tmp_path / "run", display=False)
    assert prepared == [("cpu", False)] * 2


def test_a_run_on_a_gpu_begins_without_the_models_of_runs_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    gc.disable()
    try:
        agent = surefoot.train("CartPole-v1", run_dir=None, display=False, steps=64, evaluation={"episodes": 0})
        policy = weakref.ref(agent.policy)
        del agent
        prepare_gpu("cuda")
        assert policy() is None
    finally:
        gc.enable()
