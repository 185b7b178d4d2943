"""What stands between a person and a run: this machine, and what a recipe asks of it. ``surefoot check`` prints it."""

from surefoot.diagnostics.check import Check, failed
from surefoot.diagnostics.machine import check_machine
from surefoot.diagnostics.recipe import check_recipe

__all__ = ["Check", "check_machine", "check_recipe", "failed"]
