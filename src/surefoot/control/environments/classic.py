"""Gymnasium's CartPole, Pendulum, Acrobot and MountainCar for many rows at once, in PyTorch: ``tensor/CartPole-v1`` and so on.

Rewards, ends and states follow Gymnasium's equations step by step. States are float64, as there, so that ends are the same;
Apple's MPS has no float64, so states are float32 there. Rows reset in the step that ends them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from surefoot.errors import SurefootError, did_you_mean
from surefoot.recipes.control import TENSOR, TENSOR_IDS


class ClassicControl(ABC):
    """B rows of one of Gymnasium's classic environments, with its time limit; a tensor environment.

    num_envs           B
    device             of all tensors
    max_episode_steps  steps after which an episode is truncated; None: the limit of the id
    """

    id: ClassVar[str]
    """of Gymnasium's environment"""
    low: ClassVar[tuple[float, ...]]
    """smallest entries of a state after a reset"""
    high: ClassVar[tuple[float, ...]]

    def __init__(self, num_envs: int, device: Any = "cpu", max_episode_steps: int | None = None) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        spec = gymnasium.spec(self.id)
        self.max_episode_steps = spec.max_episode_steps if max_episode_steps is None else max_episode_steps
        with gymnasium.make(self.id) as single:
            self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        self.generator = torch.Generator(self.device)
        self.first = torch.tensor(self.low, dtype=kind, device=self.device)
        self.width = torch.tensor(self.high, dtype=kind, device=self.device) - self.first
        self.state = self.first.expand(num_envs, -1)
        """[B, n]"""
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        """[B] steps of the current episodes"""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Observations of states.   [B, n] -> [B, m] float32"""

    @abstractmethod
    def move(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """One step of the dynamics: the next state [B, n], rewards [B] float32, and where episodes end [B] (None: nowhere)."""

    def initial(self) -> Tensor:
        """Random states as after a reset.   [B, n]"""
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        uniform = torch.rand(self.num_envs, len(self.first), dtype=kind, device=self.device, generator=self.generator)
        return self.first + self.width * uniform

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Start a new episode in every row."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state, self.elapsed = self.initial(), torch.zeros_like(self.elapsed)
        return self.observe(self.state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Act in every row. ``final_obs`` in infos has the observations before the resets."""
        state, rewards, terminated = self.move(self.state, actions)
        self.elapsed = self.elapsed + 1
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(self.elapsed, dtype=torch.bool)
        else:
            truncated = self.elapsed >= self.max_episode_steps
        terminated = torch.zeros_like(truncated) if terminated is None else terminated
        ended = terminated | truncated
        final = self.observe(state)
        self.state = torch.where(ended[:, None], self.initial(), state)
        self.elapsed = self.elapsed.masked_fill(ended, 0)
        return self.observe(self.state), rewards, terminated, truncated, {"final_obs": final}

    def state_dict(self) -> dict[str, Any]:
        """States, steps and the random generator: with them a run continues exactly."""
        return {"state": self.state.clone(), "elapsed": self.elapsed.clone(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.state, self.elapsed = (state[name].to(self.device).clone() for name in ("state", "elapsed"))
        self.generator.set_state(state["generator"].cpu())


class CartPole(ClassicControl):
    """Barto, Sutton and Anderson 1983; state: position, velocity, angle, angular velocity."""

    id = "CartPole-v1"
    low, high = (-0.05,) * 4, (0.05,) * 4

    def observe(self, state: Tensor) -> Tensor:
        return state.float()

    def move(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gravity, pole, total, length, interval = 9.8, 0.1, 1.1, 0.5, 0.02
        x, speed, angle, turning = state.unbind(-1)
        force = torch.where(actions == 1, 10.0, -10.0).to(state.dtype)
        cosine, sine = angle.cos(), angle.sin()
        push = (force + pole * length * turning.square() * sine) / total
        twist = (gravity * sine - cosine * push) / (length * (4.0 / 3.0 - pole * cosine.square() / total))
        thrust = push - pole * length * twist * cosine / total
        following = [x + interval * speed, speed + interval * thrust, angle + interval * turning, turning + interval * twist]
        fallen = (following[0].abs() > 2.4) | (following[2].abs() > 12 * 2 * math.pi / 360)
        return torch.stack(following, -1), torch.ones_like(x, dtype=torch.float32), fallen


class Pendulum(ClassicControl):
    """Swing a pendulum up with a bounded torque; state: angle, angular velocity."""

    id = "Pendulum-v1"
    low, high = (-math.pi, -1.0), (math.pi, 1.0)

    def observe(self, state: Tensor) -> Tensor:
        angle, turning = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), turning], -1).float()

    def move(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        angle, turning = state.unbind(-1)
        torque = actions.squeeze(-1).clamp(-2.0, 2.0)  # its terms are float32, as in Gymnasium
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * turning.square() + 0.001 * torque.square()
        turning = (turning + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        return torch.stack([angle + turning * 0.05, turning], -1), -cost.float(), None


class Acrobot(ClassicControl):
    """Sutton 1996, with the dynamics of Sutton and Barto's book; state: two angles and their velocities."""

    id = "Acrobot-v1"
    low, high = (-0.1,) * 4, (0.1,) * 4

    def initial(self) -> Tensor:
        return super().initial().float().to(self.first.dtype)  # Gymnasium rounds them

    def observe(self, state: Tensor) -> Tensor:
        first, second, *velocities = state.unbind(-1)
        return torch.stack([first.cos(), first.sin(), second.cos(), second.sin(), *velocities], -1).float()

    def move(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        torque, interval = (actions - 1).to(state.dtype), 0.2
        k1 = _acrobot_derivative(state, torque)
        k2 = _acrobot_derivative(state + interval / 2 * k1, torque)
        k3 = _acrobot_derivative(state + interval / 2 * k2, torque)
        k4 = _acrobot_derivative(state + interval * k3, torque)
        first, second, *velocities = (state + interval / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)).unbind(-1)
        first, second = _wrapped(first), _wrapped(second)
        fastest = (4 * math.pi, 9 * math.pi)
        velocities = [v.clamp(-bound, bound) for v, bound in zip(velocities, fastest, strict=True)]
        ended = -first.cos() - (second + first).cos() > 1.0
        return torch.stack([first, second, *velocities], -1), torch.where(ended, 0.0, -1.0), ended


def _acrobot_derivative(state: Tensor, torque: Tensor) -> Tensor:
    """The time derivative of the state; masses, lengths and moments of inertia are 1, centres of mass at half the length."""
    first, second, turning, bending = state.unbind(-1)
    gravity, cosine, sine = 9.8, second.cos(), second.sin()
    d1 = 0.25 + (1.25 + cosine) + 2.0
    d2 = (0.25 + 0.5 * cosine) + 1.0
    phi2 = 0.5 * gravity * (first + second - math.pi / 2.0).cos()
    phi1 = -0.5 * bending**2 * sine - bending * turning * sine + 1.5 * gravity * (first - math.pi / 2).cos() + phi2
    bend = (torque + d2 / d1 * phi1 - 0.5 * turning**2 * sine - phi2) / (1.25 - d2**2 / d1)
    turn = -(d2 * bend + phi1) / d1
    return torch.stack([turning, bending, turn, bend], -1)


def _wrapped(angle: Tensor) -> Tensor:
    """An angle from −π to π, by whole turns."""
    return angle - 2 * math.pi * ((angle - math.pi) / (2 * math.pi)).ceil()


class MountainCar(ClassicControl):
    """Moore 1990: a car too weak to drive straight up; state: position, velocity."""

    id = "MountainCar-v0"
    low, high = (-0.6, 0.0), (-0.4, 0.0)

    def observe(self, state: Tensor) -> Tensor:
        return state.float()

    def move(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, speed = state.unbind(-1)
        speed = (speed + ((actions - 1) * 0.001 + (3 * x).cos() * -0.0025)).clamp(-0.07, 0.07)
        x = (x + speed).clamp(-1.2, 0.6)
        speed = speed.masked_fill((x == -1.2) & (speed < 0), 0)
        return torch.stack([x, speed], -1), torch.full_like(x, -1.0, dtype=torch.float32), (x >= 0.5) & (speed >= 0)


KINDS: dict[str, Callable[..., ClassicControl]] = {
    TENSOR + kind.id: kind for kind in (CartPole, Pendulum, Acrobot, MountainCar)
}
"""by id"""
assert tuple(KINDS) == TENSOR_IDS, "recipes know the ids without importing torch"


def make_classic(task: str, num_envs: int, device: str, arguments: dict[str, Any]) -> ClassicControl:
    """The tensor environment of an id such as ``tensor/CartPole-v1``.

    Raises SurefootError for an unknown id.
    """
    if task not in KINDS:
        raise SurefootError(f"task={task!r}: unknown{did_you_mean(task, KINDS)} (known: {', '.join(KINDS)})")
    return KINDS[task](num_envs, device, **arguments)
