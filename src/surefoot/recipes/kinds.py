"""Recipes of every kind: what decides a run, the machine aside. No torch is imported here, so that ``--help`` is quick."""

from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.language import DemonstrationRecipe, DpoRecipe, LanguageRecipe, ModelRecipe, RewardRecipe, SftRecipe

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
