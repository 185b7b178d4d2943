"""Tensor environments: many environments in one object, whose observations, rewards and ends are tensors on one device.

``TensorEnvironment`` is what Surefoot needs of one, Gymnasium's interface of a vector environment with tensors. Simulators of
this form train as they are; ``adapters.py`` has the others.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from surefoot.control.environments.looped import Lost
from surefoot.control.environments.observations import METHOD, RESET, STEP, check_tuple, near_mask, reported_in
from surefoot.control.environments.records import close_all, has_hook
from surefoot.control.spaces import (
    MASK,
    ObservationPart,
    SpaceError,
    check_action_space,
    choices,
    flat_action,
    nester,
    observation_parts,
)
from surefoot.core.seeding import any_algorithm, derived_seed
from surefoot.errors import SurefootError, cause_of, place_of
from surefoot.ranks.collectives import exact_device

FINAL = ("final_obs", "final_observation")
"""keys of ``infos`` with the observations before a reset; the second is ManiSkill's"""
STATE = "environment"


class TensorEnvironment(Protocol):
    """B environments that step together. All tensors are on ``device``.

    Rows reset in the step that ends them (the default, ``AutoresetMode.SAME_STEP``), or in the step after it, if
    ``metadata["autoreset_mode"]`` is ``AutoresetMode.NEXT_STEP``.
    """

    num_envs: int
    device: Any
    """a torch device, or its name"""
    single_observation_space: gymnasium.Space[Any]
    """of one environment; the parts of a Dict are the observation groups"""
    single_action_space: gymnasium.Space[Any]
    """of one environment"""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in every row: observations [B, *part] each, and infos."""
        ...

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Act in every row: observations, rewards [B], terminated [B] bool, truncated [B] bool, infos.

        Actions of a Dict or Tuple are that, of tensors.

        Of infos are read: ``final_obs``, the observations before the resets (only truncated rows matter); ``action_mask`` [B,
        choices] bool of the next action; tensors [B] whose names are in the recipe's ``rollout.info``; and ``log``, a dict of
        numbers or tensors [] such as reward terms, whose means become metrics.

        Optional methods: ``action_masks()``, for masks that are not in infos; ``state_dict()`` and
        ``load_state_dict(state)``, with which a resumed run continues exactly; and ``close()``.
        """
        ...


@dataclass
class TensorStep:
    """The result of one step.   All [B] on the device unless noted."""

    observations: dict[str, Tensor]
    """input of the next action: parts [B, ...], and "action_mask" [B, choices] if the task masks actions"""
    rewards: Tensor
    """float32"""
    terminated: Tensor
    truncated: Tensor
    scores: Tensor
    """the rewards in the environment's own precision, for episode returns"""
    ignored: Tensor | None = None
    """True where the row only reset (NEXT_STEP); None: nowhere"""
    finals: dict[str, Tensor] | None = None
    """parts [B, ...] before the resets; None if the environment does not return them"""
    overwritten: tuple[str, ...] = ()
    """the parts whose ``finals`` are in the memory of ``observations``: after a reset they are not those before it"""
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """the tensors [B] in its infos, by name"""
    log: dict[str, Any] = field(default_factory=dict)
    """numbers or tensors [] that are the environment's own means"""


class TensorEnvironments:
    """A tensor environment with every call checked, and its episodes seeded.

    device   of the policy
    first    the number of its first row, if its rows are a rank's share of more

    Nothing here waits for the device: types, shapes and devices of tensors are known without their numbers.
    """

    def __init__(self, environment: Any, device: torch.device, seed: int, name: str, first: int = 0) -> None:
        self.environment, self.seed, self.name, self.first = environment, seed, name, first
        self.device = _with_index(device)
        self.count = int(environment.num_envs)
        self.observation_space: gymnasium.Space[Any] = environment.single_observation_space
        self.action_space: gymnasium.Space[Any] = environment.single_action_space
        own = _with_index(torch.device(environment.device))
        if own != self.device:
            raise SurefootError(
                f"device={str(device)!r}: task={name!r} has its tensors on {own}; set device = {own.type!r}, or make the "
                "environment on the policy's device"
            )
        self.parts = observation_parts(self.observation_space, name)
        self.choices = choices(check_action_space(self.action_space, name))
        self.nested = nester(
            self.action_space, lambda part, leaf: part.float() if isinstance(leaf, spaces.Box) else part.long()
        )
        self.mode = _mode_of(environment, name)
        self.masked: bool | None = None
        """whether the task masks actions; None before the first reset"""
        self.done: Tensor | None = None
        self.resets = self.steps = 0

    @property
    def resumable(self) -> bool:
        """Whether the environment saves its state."""
        return has_hook(self.environment)

    def reset(self) -> dict[str, Tensor]:
        """Start a new episode in every row, each time another one; return the observations."""
        seed = derived_seed(self.seed, self.first, self.resets)
        self.steps, self.done = 0, None
        with self._errors():
            returned = check_tuple(self.environment.reset(seed=seed), RESET)
        self.resets += 1
        with self._errors():
            return self._read(*returned)

    def step(self, actions: Tensor) -> TensorStep:
        """Act in every row."""
        self.steps += 1
        with self._errors(), torch.no_grad():
            returned = self.environment.step(self.nested(actions))
            observations, rewards, terminated, truncated, infos = check_tuple(returned, STEP)
            double = isinstance(rewards, Tensor) and rewards.dtype == torch.float64
            scores = self._tensor("rewards", rewards, (), torch.float64 if double else torch.float32)
            rewards = scores.float()
            terminated = self._tensor("terminated", terminated, (), torch.bool)
            truncated = self._tensor("truncated", truncated, (), torch.bool)
            step = TensorStep(self._read(observations, infos), rewards, terminated, truncated, scores=scores)
            final = next((infos[key] for key in FINAL if key in infos), None)
            if final is not None and self.mode is AutoresetMode.SAME_STEP:
                step.finals = self._parts(final, "final ")
                step.overwritten = tuple(
                    part.named() for part in self.parts.values() if _same_memory(part.select(observations), part.select(final))
                )
            ended = infos.get("final_info")  # of the episodes that ended in this step
            flat = {**infos, **ended} if isinstance(ended, Mapping) else infos
            reported_in(flat, ())
            step.numbers = {str(key): x for key, x in flat.items() if isinstance(x, Tensor) and x.shape == (self.count,)}
            step.log = dict(infos.get("log") or {})
        if self.mode is AutoresetMode.NEXT_STEP:
            ignored = torch.zeros_like(terminated) if self.done is None else self.done
            step.ignored, step.rewards, step.scores = ignored, rewards.masked_fill(ignored, 0), scores.masked_fill(ignored, 0)
            step.terminated, step.truncated = terminated & ~ignored, truncated & ~ignored
            self.done = step.terminated | step.truncated
        return step

    def _read(self, observations: Any, infos: Any) -> dict[str, Tensor]:
        """The observations, and the masks of the next actions."""
        if not isinstance(infos, Mapping):
            raise SpaceError(f"infos of type {type(infos).__name__} where the interface has a dict")
        return self._parts(observations) | self._mask(infos)

    def _parts(self, observations: Any, what: str = "") -> dict[str, Tensor]:
        return {path: self._part(part, observations, what) for path, part in self.parts.items()}

    def _part(self, part: ObservationPart, observations: Any, what: str) -> Tensor:
        kind = getattr(torch, str(part.dtype))
        if kind == torch.float64 and exact_device(self.device) != self.device:
            kind = torch.float32
        return self._tensor(f"{what}{part.named().removeprefix('an ')}", part.select(observations), part.shape, kind)

    def _mask(self, infos: Mapping[str, Any]) -> dict[str, Tensor]:
        if MASK not in infos and self.choices is not None and callable(method := getattr(self.environment, METHOD, None)):
            infos = {**infos, MASK: method()}
        present = MASK in infos
        if self.masked is None and not present and self.choices is not None:
            arrays = {key: x.cpu().numpy() if isinstance(x, Tensor) else x for key, x in infos.items()}
            if place := near_mask(arrays, self.choices):
                raise SpaceError(f"no infos['{MASK}'], but {place}, which looks like an action mask; return it as '{MASK}'")
        self.masked = present if self.masked is None else self.masked
        if present != self.masked:
            raise SpaceError(f"{'an' if present else 'no'} action mask, unlike at its first reset")
        if not present:
            return {}
        if self.choices is None:
            raise SpaceError("an action mask, but Box actions can't be masked")
        return {MASK: self._tensor("action mask", infos[MASK], (sum(self.choices),), torch.bool)}

    def _tensor(self, name: str, value: Any, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """A tensor [B, *shape] of the environment's; SpaceError, with its name, if it is something else.

        Any floating-point type becomes the one needed, and any integer type too.
        """
        if not isinstance(value, Tensor):
            raise SpaceError(f"{name} of type {type(value).__name__} where a torch tensor is needed")
        expected = (self.count, *shape)
        if value.shape != expected:
            raise SpaceError(f"{name} of shape {tuple(value.shape)} where {expected} is needed")
        if value.device != self.device:
            raise SpaceError(f"{name} on {value.device} where its device is {self.device}")
        if value.dtype != kind:
            both = value.is_floating_point() and kind.is_floating_point
            is_integer = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
            if not both and (kind.is_floating_point or kind in (torch.bool, torch.uint8) or not is_integer):
                raise SpaceError(f"{name} of {value.dtype} where {kind} is needed")
            value = value.to(kind)
        detached: Tensor = value.detach()
        return detached

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the environment as a SurefootError that names the call. It may use any algorithms."""
        try:
            with any_algorithm():
                yield
        except SurefootError:
            raise
        except (Exception, SystemExit) as error:
            what = f"returned {error}" if isinstance(error, SpaceError) else f"raised {cause_of(error)}"
            call = f"call {self.steps} of step()" if self.steps else "reset()"
            line = f" ({where})" if (where := place_of(error)) else ""
            raise SurefootError(f"{self.name}: {what}, in {call}; fix the environment{line}") from error

    def state_dict(self) -> dict[str, Any]:
        """The number of resets, and the state of an environment that saves one."""
        state: dict[str, Any] = {"resets": self.resets}
        if self.resumable and self.mode is AutoresetMode.SAME_STEP:
            with self._errors():
                state[STATE] = self.environment.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], observations: dict[str, Tensor]) -> tuple[dict[str, Tensor], Lost]:
        """Restore a state; return the current observations and the rows that start new episodes.

        observations   the current ones when the state was saved
        """
        self.resets = state.get("resets", 0)
        first = self.reset()  # the environment allocates what the state goes into
        saved = state.get(STATE)
        fits = {path: x.shape for path, x in observations.items()} == {path: x.shape for path, x in first.items()}
        if saved is None or not self.resumable or not fits:
            return first, dict.fromkeys(range(self.count), "")
        with self._errors():
            self.environment.load_state_dict(saved)
        self.resets -= 1  # as when it was saved
        return {path: x.to(self.device) for path, x in observations.items()}, {}

    def close(self) -> None:
        """Close the environment."""
        close_all([self.environment])


class SingleEnvironment(gymnasium.Env[Any, Any]):
    """A tensor environment with one row as a Gymnasium environment, for evaluation, ``watch`` and ``export``."""

    def __init__(self, environment: Any, name: str) -> None:
        device = torch.device(environment.device)
        self.rows = TensorEnvironments(environment, device, 0, name)
        if self.rows.count != 1:
            raise SurefootError(
                f"task={name!r}: makes {self.rows.count} environments where one is needed for evaluation; give the function a "
                "parameter num_envs, or set evaluation.episodes = 0"
            )
        if self.rows.mode is not AutoresetMode.SAME_STEP:
            raise SurefootError(
                f"task={name!r}: resets in the step after an end (NEXT_STEP), and evaluation needs SAME_STEP; set "
                "evaluation.episodes = 0"
            )
        self.observation_space, self.action_space = self.rows.observation_space, self.rows.action_space
        self.render_mode = getattr(environment, "render_mode", None)
        self.metadata = dict(getattr(environment, "metadata", {}))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.rows.seed, self.rows.resets = 0 if seed is None else seed, 0
        return self._one(self.rows.reset())

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = self.rows.step(torch.as_tensor(flat_action(self.action_space, action), device=self.rows.device)[None])
        terminated, truncated = bool(step.terminated), bool(step.truncated)
        shown = step.observations
        if step.finals is not None and (terminated or truncated):
            shown = shown | step.finals
        observation, info = self._one(shown)
        return observation, float(step.scores), terminated, truncated, info | {k: float(x) for k, x in step.numbers.items()}

    def _one(self, parts: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
        arrays = {path: x[0].cpu().numpy() for path, x in parts.items()}
        info = {MASK: arrays.pop(MASK)} if MASK in arrays else {}
        return nested(self.observation_space, arrays), info

    def render(self) -> Any:
        frame: Any = self.rows.environment.render()
        return frame[0] if getattr(frame, "ndim", 3) == 4 else frame

    def close(self) -> None:
        self.rows.close()


def nested(space: gymnasium.Space[Any], parts: Mapping[str, Any], prefix: str = "") -> Any:
    """An observation of a space from its parts by path."""
    if isinstance(space, spaces.Dict):
        return {key: nested(part, parts, f"{prefix}{key}.") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nested(part, parts, f"{prefix}{index}.") for index, part in enumerate(space.spaces))
    return parts[prefix.removesuffix(".") or next(iter(parts))]


def _mode_of(environment: Any, name: str) -> AutoresetMode:
    stated = (getattr(environment, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
    if stated in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        return AutoresetMode(stated)
    raise SurefootError(
        f"task={name!r}: metadata['autoreset_mode']={stated!r} of this tensor environment; it must be AutoresetMode.SAME_STEP "
        "or AutoresetMode.NEXT_STEP"
    )


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:0``, since tensors have the index."""
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def _same_memory(a: Tensor, b: Tensor) -> bool:
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()
