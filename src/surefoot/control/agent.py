"""The agent: a policy with its normalisers and spaces, ready to act in the environment it was trained for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.func import functional_call

from surefoot.accel.programs import FAST, Program, program_of, structure
from surefoot.control.networks import EPISODE_STARTS, LSTM_STATE
from surefoot.control.normalise import (
    ActionBounds,
    Normalise,
    ObservationNormaliser,
    RewardNormaliser,
    action_converter,
    inputs_of,
    normalised_parts,
    sent_actions,
)
from surefoot.control.policy import ActorCritic, ReparameterisedSampling
from surefoot.control.spaces import (
    MASK,
    NOT_FINITE,
    Array,
    Observations,
    SpaceError,
    action_dtype,
    as_float32,
    check_action_space,
    check_agreement,
    choices,
    mask_of,
    nester,
    numbers,
    observation_parts,
    space_from_json,
    space_to_json,
)
from surefoot.core.learner import parameter_groups
from surefoot.core.optimizer import flatten_parameters
from surefoot.core.seeding import as_found, stream
from surefoot.errors import SurefootError
from surefoot.files import as_path, check_flags, made_from
from surefoot.recipes.callables import NETWORK, Functions
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import control_recipe
from surefoot.store.checkpoint import load_weights, require, save_checkpoint

GENERATOR = "generator"
"""name of the state of ``predict`` beside the weights, whose names have a dot"""
Act = Callable[[Observations, Tensor | None, Array], tuple[Tensor, Array, Tensor | None]]
TensorAct = Callable[[dict[str, Tensor], Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


class Agent(nn.Module):
    """A trained policy with all that turns an environment's observations into its actions.

    The running statistics of the normalisers are buffers, saved with the weights, so training, evaluation and other programs
    compute the same actions.

    functions   the network of ``network.custom``, if it was passed as an object
    """

    def __init__(
        self, recipe: ControlRecipe, observation_space: Any, action_space: Any, functions: Functions | None = None
    ) -> None:
        super().__init__()
        self.recipe, self.observation_space, self.action_space = recipe, observation_space, action_space
        self.parts = observation_parts(observation_space)
        self.masked: bool | None = None
        """whether the task it was trained on masks actions; None if unknown"""
        generator = stream(recipe.seed, "weights")
        critic = recipe.objective.baseline == "critic"
        self.policy = ActorCritic(observation_space, action_space, recipe.network, critic, generator, functions)
        normalise = recipe.normalise
        normalised = normalised_parts(self.parts, normalise.observations)
        exact = [path for path in normalised if self.parts[path].dtype == np.float64]
        self.observation_normaliser = ObservationNormaliser(normalised, normalise.clip, exact) if normalised else None
        self.reward_normaliser = RewardNormaliser(recipe.objective.gamma, normalise.clip) if normalise.rewards else None
        box, self.first_number = numbers(action_space), len(choices(action_space) or ())
        """the column of the first number in an action of several parts"""
        self.bounds = None if box is None else ActionBounds(box, normalise.actions)
        self.policy.to(recipe.device)
        self.generator = stream(recipe.seed, "predict")
        self.functions = {field: made for field, made in (functions or {}).items() if field == NETWORK}

    def __repr__(self) -> str:
        """One line; ``agent.policy`` shows the layers."""
        count = sum(parameter.numel() for parameter in self.policy.parameters())
        return f"<Agent {self.recipe.algorithm} on {self.recipe.task}, {count:,} parameters>"

    @classmethod
    def for_spaces(
        cls, recipe: ControlRecipe, observation_space: Any, action_space: Any, task: str, functions: Functions | None = None
    ) -> "Agent":
        """An untrained agent; SurefootError when a space is not supported."""
        observation_parts(observation_space, task)
        return cls(recipe, observation_space, check_action_space(action_space, task), functions)

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self.policy.actor_head.weight.device

    def normaliser(self) -> Normalise:
        """The function from observations, on any device, to the policy's inputs on its own, with the current statistics."""
        device, normalise = self.device, inputs_of(self.observation_normaliser)
        if device.type == "cpu":
            return normalise
        return lambda observations: {path: x.to(device) for path, x in normalise(observations).items()}

    def tensors(self, observations: Mapping[str, Array]) -> dict[str, Tensor]:
        """Observations as tensors on the CPU, not normalised: other devices may not have float64."""
        return {path: torch.from_numpy(values) for path, values in observations.items()}

    def actor(self, generator: torch.Generator) -> "Act":
        """A function that samples actions with the current weights and statistics.

        observations [B, ...], LSTM state or None, episode starts [B] -> actions as stored, actions as sent, next LSTM state
        """
        policy, normalise, convert = self.policy, self.normaliser(), self.action_converter()

        @torch.inference_mode()
        def act(observations: Observations, state: Tensor | None, starts: Array) -> tuple[Tensor, Array, Tensor | None]:
            inputs = normalise(self.tensors(observations))
            distribution, state = policy.step(with_lstm_state(inputs, state, starts))
            actions = distribution.sample(generator).cpu()
            return actions, convert(actions), state

        return act

    def tensor_actor(self, generator: torch.Generator, steps: int) -> "TensorAct":
        """An actor for ``steps`` calls with observations that are tensors on the policy's device.

        observations [B, ...], LSTM state or None, episode starts [B] -> actions as stored, next LSTM state

        The noise of all calls is drawn at the first, on the CPU, and moved once: a copy per step would wait for the device.
        """
        policy, device = self.policy, self.device
        normalise = inputs_of(self.observation_normaliser, device)
        noises: list[Tensor] = []

        @torch.no_grad()
        def act(observations: dict[str, Tensor], state: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor | None]:
            distribution, state = policy.step(with_lstm_state(normalise(observations), state, starts))
            if not noises:
                noises.extend(distribution.noise(generator, (steps,)).to(device).unbind())
            return distribution.transform(noises.pop()), state

        return act

    def action_converter(self) -> Callable[[Tensor], Array]:
        """The function from actions as stored to actions for an environment."""
        return action_converter(self.action_space, self.recipe.normalise.actions)

    @property
    def value_scale(self) -> float:
        """The task's rewards per unit of the critic's V."""
        return 1.0 if self.reward_normaliser is None else float(self.reward_normaliser.unit)

    @torch.no_grad()
    def values(self, observations: Mapping[str, Array], state: Tensor | None = None, starts: Array | None = None) -> Tensor:
        """V of observations [..., *part] as a tensor on the policy's device, in units of (normalised) rewards.

        With an LSTM state [N, ...] the observations are [N, *part]; ``starts`` [N] defaults to False.
        """
        return self.values_of(self.tensors(observations), state, starts)

    @torch.no_grad()
    def values_of(
        self, observations: Mapping[str, Tensor], state: Tensor | None = None, starts: Array | Tensor | None = None
    ) -> Tensor:
        """V of observations that are tensors, in units of (normalised) rewards."""
        inputs = self.normaliser()(observations)
        if state is not None and starts is None:
            starts = torch.zeros(len(state), dtype=torch.bool, device=state.device)
        return self.policy.values(with_lstm_state(inputs, state, starts))

    @torch.inference_mode()
    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_mask: Any = None,
    ) -> tuple[Any, Any]:
        """The action for one observation, or actions for several [B, ...], and the LSTM state (None without LSTM).

        The signature is Stable-Baselines3's, so its tools work with these agents. Pass observations as the environment returns
        them: an array, or a dict or tuple of arrays. ``deterministic`` takes the likeliest action instead of sampling.
        ``state`` is the state that the last step returned, None at first; ``episode_start``, one flag or [B], resets it.
        ``action_mask`` [choices] or [B, choices] is True where an action is allowed; without it all are. For a Dict or Tuple of
        actions it may be one for each part.
        Raises SurefootError for an observation or a mask of the wrong shape, and for an observation that is not finite.
        """
        check_flags(deterministic=deterministic)
        observations, batch = self.read(observation)
        if action_mask is not None:
            try:
                observations[MASK] = mask_of(self.action_space, action_mask, batch)
            except SpaceError as error:
                raise SurefootError(f"action_mask: is {error}") from None
        inputs, single = self._policy_inputs(observations, batch, state, episode_start)
        distribution, next_state = self.policy.step(inputs)
        actions = distribution.mode() if deterministic else distribution.sample(self.generator)
        sent = self.action_converter()((actions.squeeze(0) if single else actions).cpu())
        sent = sent[()] if isinstance(self.action_space, spaces.Discrete) else nester(self.action_space)(sent)
        return sent, state if next_state is None else next_state.cpu().numpy()

    def value(self, observation: Any, state: Any = None, episode_start: Any = None) -> Any:
        """V(s) of one observation (a float) or of several (an array [B]): the discounted return that the critic expects.

        Its unit is the task's own rewards, even if training normalised them. State and starts are as in ``predict``.

        Raises SurefootError when the agent was trained without a critic, or for an observation of the wrong shape.
        """
        if self.policy.critic_head is None:
            raise SurefootError(f"value: {self.recipe.algorithm} has no critic; train with objective.baseline = 'critic'")
        with torch.inference_mode():
            inputs, single = self._policy_inputs(*self.read(observation), state, episode_start)
            values = self.policy.values(inputs).cpu().numpy() * self.value_scale
        values = values[0] if single else values
        return float(values) if values.ndim == 0 else values

    def _policy_inputs(
        self, observations: Observations, batch: tuple[int, ...], state: Any, episode_start: Any
    ) -> tuple[dict[str, Tensor], bool]:
        """Normalised inputs of a step, and whether a single observation became a batch of one for the LSTM."""
        inputs = self.normaliser()(self.tensors(observations))
        single = self.policy.actor_memory is not None and batch == ()
        if single:
            inputs = {path: x.unsqueeze(0) for path, x in inputs.items()}
        count = batch[0] if batch else 1
        initial = self.policy.initial_lstm_state(count)
        if initial is None:
            return inputs, False
        try:
            starts = np.asarray(False if episode_start is None else episode_start, bool).reshape(-1)
            lstm_state = initial if state is None else torch.from_numpy(np.array(state, np.float32)).to(initial)
        except (TypeError, ValueError, OverflowError) as error:
            raise SurefootError(f"state, episode_start: {error}; pass the state that predict returned, and flags") from None
        if len(starts) not in (1, count):
            raise SurefootError(
                f"episode_start: has {len(starts)} flags for {count} observations; pass one per observation, or one for all"
            )
        starts = np.broadcast_to(starts, count)
        if lstm_state.shape != initial.shape:
            shape, expected = tuple(lstm_state.shape), tuple(initial.shape)
            raise SurefootError(f"state: has shape {shape}; these observations need {expected}")
        return with_lstm_state(inputs, lstm_state, starts), single

    def read(self, observation: Any) -> tuple[Observations, tuple[int, ...]]:
        """The parts of one observation, or of several, and their leading shape: () or (B,)."""
        observations: Observations = {}
        batches = set()
        for path, part in self.parts.items():
            try:
                array = part.plain(part.select(observation))
                batch = array.shape[: array.ndim - len(part.shape)]
                if array.shape[len(batch) :] != part.shape or len(batch) > 1:
                    raise SurefootError(f"{path}: has shape {array.shape}; this agent takes {part.shape}, or a batch of them")
                if not part.vector:
                    part.check_kind(array)
                elif not np.isfinite(as_float32(array)).all():
                    raise SurefootError(f"{path}: is {NOT_FINITE}; pass finite observations")
            except SpaceError as error:
                raise SurefootError(f"observation: is {error}") from None
            except (TypeError, ValueError) as error:
                raise error if isinstance(error, SurefootError) else SurefootError(f"{path}: {error}") from None
            observations[path] = array.astype(part.dtype, copy=False)
            batches.add(batch)
        if len(batches) > 1:
            raise SurefootError(f"observation: its parts have {len(batches)} batch sizes: {sorted(batches)}")
        return observations, batches.pop()

    def checkpoint_parts(self) -> dict[str, Any]:
        """The agent's part of a checkpoint."""
        spaces_ = {"observation": space_to_json(self.observation_space), "action": space_to_json(self.action_space)}
        return {"agent": self.state_dict(), "recipe": self.recipe.table, "spaces": {**spaces_, "masked": self.masked}}

    def save(self, folder: str | Path) -> None:
        """Write the agent to a folder that ``surefoot.load`` reads: weights, normalisers, spaces and recipe; no pickle."""
        save_checkpoint(as_path(folder, "folder"), self.checkpoint_parts())

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, ``copy`` and other processes: what ``save`` writes as bytes, never a tensor in memory that is shared."""
        parts = self.checkpoint_parts()
        state = {name: x.detach().cpu().contiguous().clone() for name, x in parts.pop("agent").items()}
        state[GENERATOR] = self.generator.get_state()
        return _restored, (parts, save(state), self.functions, str(self.device), self.training)

    def load(self, weights: dict[str, Tensor], where: Path) -> None:
        """Load the weights and normalisers of a checkpoint; SurefootError if they don't fit."""
        load_weights(self, weights, where)

    @property
    def spaces(self) -> tuple[Any, Any]:
        """The spaces of observations and actions."""
        return self.observation_space, self.action_space

    def start_from(self, other: "Agent", name: str) -> str:
        """Take the weights and normalisers of another agent, which ``name`` stands for in errors.

        A critic stays new if the other agent has none; rewards are normalised by new statistics unless both normalise them.
        Returns a note if the bounds of observations differ, else an empty text. Raises SurefootError if the spaces, the
        networks, or the scales of observations and actions differ otherwise.
        """
        try:
            note = check_agreement(other.spaces, self.spaces)
        except SpaceError as error:
            raise SurefootError(f"start={name!r}: the task has {error}; choose an agent of the same spaces") from None
        before, now = (
            {f"network.{key}": value for key, value in a.recipe.network}
            | {f"normalise.{key}": getattr(a.recipe.normalise, key) for key in ("observations", "actions")}
            for a in (other, self)
        )
        for field, value in before.items():
            if now[field] != value:
                raise SurefootError(f"{field}={now[field]!r}: start={name!r} was trained with {value!r}; set that")
        own, weights = self.policy.state_dict(), other.policy.state_dict()
        self.policy.load_state_dict({key: weights.get(key, tensor) for key, tensor in own.items()})
        if self.observation_normaliser is not None and other.observation_normaliser is not None:
            self.observation_normaliser.load_state_dict(other.observation_normaliser.state_dict())
        if self.reward_normaliser is not None and other.reward_normaliser is not None:
            self.reward_normaliser.load_state_dict(other.reward_normaliser.state_dict())
        return note

    @classmethod
    def from_parts(cls, parts: dict[str, Any], where: Path, functions: Functions | None = None) -> "Agent":
        """The agent of a checkpoint; SurefootError if weights and recipe don't fit."""
        require(parts, ("agent", "recipe", "spaces"), where)
        recipe = control_recipe({**parts["recipe"], "device": "cpu"})
        with made_from(where):
            observation, action = (space_from_json(parts["spaces"][name]) for name in ("observation", "action"))
            agent = cls.for_spaces(recipe, observation, action, recipe.task, functions)
            agent.masked = parts["spaces"]["masked"]
            agent.load(parts["agent"], where)
            agent._flatten_parameters()
        return agent

    def _flatten_parameters(self) -> None:
        """Lay the weights out in memory as a learner does, one flat buffer per group.

        On some processors the rounding of a product depends on memory alignment, so only then does a loaded agent give the
        same numbers as the trained one.
        """
        critic_rate = self.recipe.optimizer.critic_learning_rate is not None
        for group in parameter_groups(self.policy, self.recipe.objective, critic_rate).values():
            flatten_parameters(group)
            for parameter in group:
                parameter.grad = None


@as_found
def _restored(parts: dict[str, Any], content: bytes, functions: Functions, device: str, training: bool) -> Agent:
    """The agent of ``Agent.__reduce__``, on its device if this process has that, else on the CPU."""
    weights = load(content)
    generator = weights.pop(GENERATOR)
    agent = Agent.from_parts({**parts, "agent": weights}, Path("agent"), functions)
    agent.recipe = control_recipe(parts["recipe"])
    if not device.startswith("cuda") or torch.cuda.is_available():
        agent.to(device)._flatten_parameters()
    agent.generator.set_state(generator)
    return agent.train(training)


def with_lstm_state(inputs: dict[str, Tensor], state: Tensor | None, starts: Array | Tensor | None) -> dict[str, Tensor]:
    """The inputs with the LSTM state and episode starts added; unchanged without a state."""
    if state is None:
        return inputs
    starts = starts if isinstance(starts, Tensor) else torch.tensor(starts, device=state.device)
    return inputs | {LSTM_STATE: state, EPISODE_STARTS: starts}


class CompiledActor:
    """Samples an agent's actions with one compiled program; on the CPU, for a fixed number of observations.

    For a single observation, a small network spends most of its time outside the arithmetic. The program is traced from the
    same code and uses the same noise, so it samples the same actions, up to rounding.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.program: Program | None = None
        self.distribution: ReparameterisedSampling
        """of some observations: it has the shape of the noise"""

    def actor(self, generator: torch.Generator) -> Act:
        """The function that ``Agent.actor`` returns, compiled at its first call.

        That call raises SurefootError without a C++ compiler or if the policy can't be traced.
        """
        run, kind = self._function(generator, ()), action_dtype(self.agent.action_space)

        def act(observations: Observations, state: Tensor | None, starts: Array) -> tuple[Tensor, Array, Tensor | None]:
            inputs = {path: torch.from_numpy(values) for path, values in observations.items()}
            actions, sent, *after = run(with_lstm_state(inputs, state, starts))
            return actions, sent.numpy().astype(kind, copy=False), after[0] if after else None

        return act

    def tensor_actor(self, generator: torch.Generator, steps: int) -> TensorAct:
        """The function that ``Agent.tensor_actor`` returns, compiled at its first call."""
        run = self._function(generator, (steps,))

        def act(observations: dict[str, Tensor], state: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor | None]:
            actions, *after = run(with_lstm_state(observations, state, starts))
            return actions, after[0] if after else None

        return act

    def _function(self, generator: torch.Generator, times: tuple[int, ...]) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
        """The program as a function of observations, with noise that is drawn for ``times`` calls at once, or () for one.

        It returns actions as stored; for one call also actions for the environment, a new tensor; and the next LSTM state.
        """
        agent = self.agent
        acting = _Acting(agent)
        recurrent = agent.policy.actor_memory is not None
        critic = set() if recurrent else {id(p) for p in agent.policy.critic_parameters()}
        named = {name: x.detach() for name, x in (*acting.named_parameters(), *acting.named_buffers()) if id(x) not in critic}
        values, paths = list(named.values()), [*agent.parts, *([MASK] if agent.masked else [])]
        paths += [LSTM_STATE, EPISODE_STARTS] if recurrent else []
        noises: list[Tensor] = []

        def run(observations: Mapping[str, Tensor]) -> list[Tensor]:
            inputs = [observations[path] for path in paths]
            if self.program is None:
                self.program = self._compiled(acting, list(named), paths, [*values, *inputs], single=not times)
            if not noises:
                noise = self.distribution.noise(generator, times)
                noises.extend(noise.unbind() if times else [noise])
            return self.program([*values, *inputs, noises.pop()])

        return run

    def _compiled(
        self, acting: "_Acting", names: list[str], paths: list[str], arguments: list[Tensor], single: bool
    ) -> Program:
        agent, rescaled = self.agent, self.agent.recipe.normalise.actions
        send = sent_actions(agent.action_space, rescaled, agent.device) if single else None

        def act(*tensors: Tensor) -> tuple[Tensor, ...]:
            observations = dict(zip(paths, tensors[len(names) : -1], strict=True))
            actions, state = functional_call(acting, dict(zip(names, tensors, strict=False)), (observations, tensors[-1]))
            sent = () if send is None else (send(actions),)
            return (actions, *sent) if state is None else (actions, *sent, state)

        with torch.no_grad():
            self.distribution = acting.step(dict(zip(paths, arguments[len(names) :], strict=True)))[0]
        parts = structure(acting, constants=False)
        bounds = [single, rescaled, space_to_json(agent.action_space)]
        decided_by = None if parts is None else [names, paths, bounds, *parts]
        noise = self.distribution.noise(torch.Generator())
        return program_of("acting", act, [*arguments, noise], decided_by, None if single else FAST)


class _Acting(nn.Module):
    """An agent's computation from observations to actions and the next LSTM state, as a module."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.policy, self.normaliser = agent.policy, agent.observation_normaliser

    def step(self, observations: dict[str, Tensor]) -> tuple[ReparameterisedSampling, Tensor | None]:
        """[B, *part] each, and the LSTM's inputs if there is one -> a distribution over [B], and the next LSTM state"""
        return self.policy.step(inputs_of(self.normaliser)(observations))

    def forward(self, observations: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor | None]:
        distribution, state = self.step(observations)
        return distribution.transform(noise), state
