"""The examples in the docstrings of functional are right."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import surefoot.functional

NAMES = [f"surefoot.functional.{module.name}" for module in pkgutil.iter_modules(surefoot.functional.__path__)]


@pytest.mark.parametrize("module", [importlib.import_module(name) for name in NAMES], ids=NAMES)
def test_every_example_prints_what_its_docstring_shows(module: ModuleType) -> None:
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert not failed


def test_the_functions_used_most_have_an_example() -> None:
    for name in ("gae", "td_residual", "clipped_surrogate", "kl_k3", "value_loss", "group_advantages", "dpo_loss", "aggregate"):
        assert ">>> " in (getattr(surefoot.functional, name).__doc__ or ""), name
