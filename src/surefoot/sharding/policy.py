"""A policy whose weights may be sharded over ranks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn

from surefoot.core.optimizer import AdamSettings, FlatOptimizer, Optimizer
from surefoot.core.rollout import Policy
from surefoot.sharding import gathered, is_sharded
from surefoot.sharding.optimizer import ShardedOptimizer


class ShardablePolicy(Policy):
    """What the learner asks of a policy, for any layout of its weights."""

    @property
    def sharded(self) -> bool:
        return is_sharded(self)

    def optimizer(self, parameters: Iterable[nn.Parameter], settings: AdamSettings) -> Optimizer:
        return (ShardedOptimizer if self.sharded else FlatOptimizer)(parameters, settings)

    def gathered(self) -> AbstractContextManager[None]:
        return gathered(self)
