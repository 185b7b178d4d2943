"""Recipes of every kind: what decides a run, the machine aside. No torch is imported here, so that ``--help`` is quick."""

from surefoot.kinds.control import ControlRecipe
from surefoot.kinds.language import DemonstrationRecipe, DpoRecipe, LanguageRecipe, ModelRecipe, RewardRecipe, SftRecipe
from surefoot.kinds.recipe import Recipe

KINDS: dict[str, type[Recipe]] = {
    "control": ControlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "language": LanguageRecipe,
}
"""every kind of run, by name"""

__all__ = [
    "KINDS",
    "ControlRecipe",
    "DemonstrationRecipe",
    "DpoRecipe",
    "LanguageRecipe",
    "ModelRecipe",
    "Recipe",
    "RewardRecipe",
    "SftRecipe",
]
