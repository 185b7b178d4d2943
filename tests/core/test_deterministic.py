"""Deterministic algorithms: chosen by runs on NVIDIA GPUs alone, and never by the code of others or after a run."""

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import surefoot
from surefoot.control.environments.classic import CartPole
from surefoot.control.environments.tensor import TensorEnvironments
from surefoot.core.deterministic import any_algorithm, deterministic, prepare_gpu
from surefoot.errors import SurefootError
from surefoot.recipes.presets import find_recipe
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


def test_an_operation_without_a_deterministic_algorithm_is_an_error_with_a_remedy() -> None:
    remedy = r"^deterministic=true: PyTorch raised [^\n]*; set deterministic = false$"
    with pytest.raises(SurefootError, match=remedy), deterministic(True):
        only_by_chance()
    with pytest.raises(RuntimeError, match="size"), deterministic(True):
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda:1"}, True),
        ({}, False),
        ({"device": "mps"}, False),
        ({"device": "cuda", "deterministic": False}, False),
    ],
)
def test_only_runs_on_nvidia_gpus_are_deterministic_by_this_setting(fields: dict[str, object], expected: bool) -> None:
    with arithmetic(find_recipe("CartPole-v1", fields)):
        assert torch.are_deterministic_algorithms_enabled() == expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_tensor_environments_may_use_any_algorithm() -> None:
    class Chance(CartPole):
        def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
            only_by_chance()
            return super().step(actions)

    with deterministic(True):
        environments = TensorEnvironments(Chance(2), torch.device("cpu"), 1, "chance")
        environments.reset()
        environments.step(torch.zeros(2, dtype=torch.long))
        assert torch.are_deterministic_algorithms_enabled()


def test_only_a_run_on_a_gpu_sets_the_workspace_of_cublas_which_a_program_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    prepare_gpu("cpu")
    assert WORKSPACE not in os.environ
    prepare_gpu("cuda:1")
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":16:8")
    prepare_gpu("cuda")
    assert os.environ[WORKSPACE] == ":16:8"


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
