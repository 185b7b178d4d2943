"""What stands between a person and a run: this machine, and what a recipe asks of it. ``surefoot check`` prints it."""

from surefoot.checkup.check import Check, failed
from surefoot.checkup.machine import check_machine
from surefoot.checkup.recipe import check_recipe

__all__ = ["Check", "check_machine", "check_recipe", "failed"]
