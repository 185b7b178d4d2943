"""Mirror images of transitions, by a function of the user: more data for the update where a task has a symmetry."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.control.spaces import BARE
from surefoot.core.seeding import any_algorithm
from surefoot.errors import SurefootError, cause_of


class Symmetry:
    """``function(observations, actions)`` returns both mirrored, as new tensors.

    Observations [N, *part] are as the environments return them: a tensor, or a dict by part. Actions [N] or [N, d] are as the
    policy samples them.

    Raises SurefootError, one line, when the function raises, returns other shapes or types, or does not undo itself.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name, self.checked = function, name, False

    def __call__(self, observed: Mapping[str, Tensor], actions: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """[B, T, *part] each, [B, T] or [B, T, d] -> the same shapes"""
        lead = actions.shape[:2]
        rows = {path: x.flatten(0, 1) for path, x in observed.items()}, actions.flatten(0, 1)
        mirrored = self._mirrored(*rows)
        if not self.checked:
            self._check_twice(rows, self._mirrored(*mirrored))
            self.checked = True
        images = {path: x.reshape(*lead, *x.shape[1:]) for path, x in mirrored[0].items()}
        return images, mirrored[1].reshape(actions.shape)

    def _mirrored(self, observed: Mapping[str, Tensor], actions: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        bare = list(observed) == [BARE]
        copies = {path: x.clone() for path, x in observed.items()}  # the function may write into them
        try:
            with any_algorithm():
                returned, images = self.function(copies[BARE] if bare else copies, actions.clone())
        except (Exception, SystemExit) as error:
            raise self._error(
                f"raised {cause_of(error)} for observations and actions of {len(actions)} steps; fix it"
            ) from error
        returned = {BARE: returned} if bare else returned
        if not isinstance(returned, Mapping) or returned.keys() != observed.keys():
            raise self._error(f"must return observations with the parts {', '.join(observed)}; return them as it gets them")
        for part, before, after in [*((path, x, returned[path]) for path, x in observed.items()), ("actions", actions, images)]:
            if not isinstance(after, Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
                what = f"{list(after.shape)} {after.dtype}" if isinstance(after, Tensor) else type(after).__name__
                raise self._error(f"returned {part} as {what}; return a tensor {list(before.shape)} {before.dtype}")
        return dict(returned), images

    def _check_twice(self, rows: tuple[dict[str, Tensor], Tensor], twice: tuple[dict[str, Tensor], Tensor]) -> None:
        pairs = {path: (x, twice[0][path]) for path, x in rows[0].items()} | {"actions": (rows[1], twice[1])}
        for part, (once, again) in pairs.items():
            if not torch.allclose(once.float(), again.float(), rtol=1e-4, atol=1e-5):
                raise self._error(f"applied twice, it returns other {part}; make it a mirror, which undoes itself")

    def _error(self, what: str) -> SurefootError:
        return SurefootError(f"rollout.symmetry={self.name!r}: {what}")
