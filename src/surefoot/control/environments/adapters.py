"""Tensor environments of other forms: rsl_rl's, Brax's, and Gymnasium's vector environments with arrays of others (DLPack)."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from surefoot.control.spaces import mapped
from surefoot.errors import SurefootError


class RslRlEnvironment:
    """An environment with the interface of rsl_rl's ``VecEnv``, as Isaac Lab and mjlab have for it.

    Its observation groups (a TensorDict or dict) become the parts of a Dict observation. Actions are not bounded. Its ends are
    ``dones``; ``extras["time_outs"]`` shows which of them are truncations. Final observations are not returned, so V of the
    observation before the last step stands for theirs, as in rsl_rl.
    """

    def __init__(self, environment: Any, name: str) -> None:
        self.environment, self.name = environment, name
        self.num_envs, self.device = int(environment.num_envs), environment.device
        groups = {key: x for key, x in self._groups(environment.get_observations()).items() if isinstance(x, Tensor)}
        unbounded: dict[str, gymnasium.Space[Any]] = {key: _box(tuple(x.shape[1:])) for key, x in groups.items()}
        self.single_observation_space: gymnasium.Space[Any] = spaces.Dict(unbounded)
        self.single_action_space: gymnasium.Space[Any] = _box((int(environment.num_actions),))

    def _groups(self, observations: Any) -> dict[str, Any]:
        """The observation groups; older versions return (observations, extras)."""
        if isinstance(observations, tuple):
            observations = observations[0]
        return {"policy": observations} if isinstance(observations, Tensor) else dict(observations.items())

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes if the environment has ``reset``; else the first observations are the present ones."""
        if seed is not None and callable(seeded := getattr(self.environment, "seed", None)):
            seeded(seed % 2**32)
        if callable(reset := getattr(self.environment, "reset", None)):
            reset()
        return self._groups(self.environment.get_observations()), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Act in every row. Raises SurefootError if the extras don't show how episodes end."""
        observations, rewards, dones, extras = self.environment.step(actions)
        if "time_outs" not in extras:
            raise SurefootError(
                f"{self.name}: ends episodes without extras['time_outs'] [B], which shows whether an end is a truncation; add "
                "it to what step() returns"
            )
        dones, time_outs = dones.bool(), extras["time_outs"].bool()  # those of an earlier step may still be there
        log = extras.get("log") or extras.get("episode") or {}
        return self._groups(observations), rewards, dones & ~time_outs, dones & time_outs, {**extras, "log": log}

    def close(self) -> None:
        """Close the environment."""
        if callable(close := getattr(self.environment, "close", None)):
            close()


class DLPackEnvironment:
    """A Gymnasium vector environment whose arrays are JAX's, or of any library with DLPack, as a tensor environment.

    Arrays are shared, not copied. Actions are converted by the library of the observations (its array namespace).

    device   of the tensors
    """

    def __init__(self, environment: Any, device: Any = "cpu") -> None:
        self.environment, self.device = environment, torch.device(device)
        self.num_envs, self.metadata = environment.num_envs, environment.metadata
        self.single_observation_space = environment.single_observation_space
        self.single_action_space = environment.single_action_space
        self.render_mode = getattr(environment, "render_mode", None)
        self.library: Any = None
        """the array namespace of the environment's arrays; None if it returns tensors"""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in every row."""
        observations, infos = self.environment.reset(seed=None if seed is None else seed % 2**31)
        leaf = observations
        while isinstance(leaf, (Mapping, tuple)):
            leaf = next(iter(leaf.values() if isinstance(leaf, Mapping) else leaf))
        self.library = None if isinstance(leaf, Tensor) else leaf.__array_namespace__()
        return as_tensors(observations), as_tensors(infos)

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        """Act in every row."""
        returned = self.environment.step(actions if self.library is None else self.library.from_dlpack(actions.contiguous()))
        return tuple(as_tensors(part) for part in returned)

    def render(self) -> Any:
        """A frame."""
        return self.environment.render()

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


class BraxEnvironment:
    """An environment of the form of Brax and MuJoCo Playground: functions of a state, in JAX.

    Wrap it first with its library's function for training (``mujoco_playground.wrapper.wrap_for_brax_training``,
    ``brax.envs.training.wrap``), which adds rows, time limits and resets. ``reset`` and ``step`` are compiled by ``jax.jit``.
    Arrays are shared, not copied. Actions are in [-1, 1]. Final observations are not returned, so V of the observation before
    the last step stands for theirs. The state is saved, so that resumed runs continue exactly.

    ``step`` raises SurefootError if the environment is not wrapped.

    environment   the wrapped environment
    num_envs      B
    device        of the tensors, where JAX's arrays must be
    """

    def __init__(self, environment: Any, num_envs: int, device: Any = "cpu") -> None:
        import jax

        self.jax, self.num_envs, self.device = jax, num_envs, torch.device(device)
        self._reset, self._step = jax.jit(environment.reset), jax.jit(environment.step)
        self.key = jax.random.PRNGKey(0)
        self.state: Any = None
        sizes = environment.observation_size
        boxes = {name: _box(_shape(size)) for name, size in sizes.items()} if isinstance(sizes, Mapping) else None
        self.single_observation_space = _box(_shape(sizes)) if boxes is None else spaces.Dict(dict(boxes))
        self.single_action_space = spaces.Box(-1, 1, (int(environment.action_size),), np.float32)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in every row."""
        if seed is not None:
            self.key = self.jax.random.PRNGKey(seed % 2**31)
        self.key, key = self.jax.random.split(self.key)
        self.state = self._reset(self.jax.random.split(key, self.num_envs))
        return as_tensors(self.state.obs), {}

    def step(self, actions: Tensor) -> tuple[Any, ...]:
        """Act in every row."""
        self.state = self._step(self.state, self.jax.numpy.from_dlpack(actions.contiguous()))
        if "truncation" not in self.state.info:
            raise SurefootError("BraxEnvironment: state.info has no 'truncation'; wrap the environment for training first")
        done, truncated = (from_dlpack(x).bool() for x in (self.state.done, self.state.info["truncation"]))
        log = {name: from_dlpack(x).mean() for name, x in self.state.metrics.items()}
        return as_tensors(self.state.obs), from_dlpack(self.state.reward), done & ~truncated, done & truncated, {"log": log}

    def state_dict(self) -> dict[str, Tensor]:
        """All arrays of the state, and the key of resets."""
        return {str(at): from_dlpack(x).clone() for at, x in enumerate(self.jax.tree.leaves((self.key, self.state)))}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state. Raises ValueError if its arrays are not those of this environment."""
        ours, tree = self.jax.tree.flatten((self.key, self.state))
        if [tuple(x.shape) for x in ours] != [tuple(x.shape) for x in state.values()]:
            raise ValueError("the saved state has other arrays")
        saved = [self.jax.numpy.from_dlpack(x.to(self.device, copy=True)) for x in state.values()]
        self.key, self.state = self.jax.tree.unflatten(tree, saved)


def _shape(size: Any) -> tuple[int, ...]:
    """The shape of a row's observation, given as Brax does: a number or a tuple."""
    return (size,) if isinstance(size, int) else tuple(size)


def _box(shape: tuple[int, ...]) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def as_tensors(tree: Any) -> Any:
    """The arrays of a tree of dicts and tuples as tensors that share their memory; everything else as it is."""
    return mapped(lambda x: from_dlpack(x) if hasattr(x, "__dlpack__") and not isinstance(x, Tensor) else x, tree)
