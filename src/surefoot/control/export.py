"""Export an agent to a file for other programs: raw observations in, actions for the environment out, normaliser included.

The file is an ONNX model or a ``torch.export`` program. Before it is written, it is compared with the agent on random
observations and on those of an episode.
"""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from surefoot import __version__
from surefoot.control.agent import Agent
from surefoot.control.environments import maker
from surefoot.control.environments.records import closing
from surefoot.control.evaluate import EpisodeStep, check_same_spaces, greedy_episode
from surefoot.control.networks import EPISODE_STARTS, LSTM_STATE
from surefoot.control.normalise import inputs_of, sent_actions
from surefoot.control.spaces import MASK, Array, action_columns, choices, flat_action, mask_of
from surefoot.errors import SurefootError, require_package
from surefoot.files import write_bytes, writing

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
OPSET = 18
"""the oldest that torch writes without conversion, for the most runtimes"""
RTOL, ATOL = 1e-4, 1e-5
MEMORY, START, NEXT_MEMORY = "memory", "episode_start", "next_memory"
"""names of the extra inputs and the last output of a recurrent agent"""
SAMPLES, EPISODE = 128, 256
"""random observations, and steps of a real episode"""


class ExportedPolicy(nn.Module):
    """An agent from raw observations to actions, as one stateless module.

    Inputs are the parts of the observation, the action mask [N, choices] if ``masked``, and for an LSTM its state and a flag
    that resets it. Outputs are the action, the parameters of the distribution, V if there is a critic, and the next LSTM
    state; ``outputs`` has their names.
    Raises SurefootError if a part of the observation has the name of another input or output.
    """

    def __init__(self, agent: Agent, masked: bool) -> None:
        super().__init__()
        self.policy = copy.deepcopy(agent.policy).cpu().requires_grad_(False)
        self.normalise = inputs_of(agent.observation_normaliser)
        space, self.value_unit = agent.action_space, agent.value_scale
        self.send = sent_actions(space, agent.recipe.normalise.actions, torch.device("cpu"))
        self.actions = {".".join(["action", *map(str, keys)]): (leaf, where) for keys, leaf, where in action_columns(space)}
        """space and columns of each part of an action, by the name of its output"""
        self.inputs = {
            path: torch.from_numpy(np.full((2, *part.shape), 0 if part.bounds is None else part.bounds[0], part.dtype))
            for path, part in agent.parts.items()
        }
        self.parts = list(self.inputs)
        self.masked = masked
        if masked:
            self.inputs[MASK] = torch.ones(2, sum(choices(agent.action_space) or ()), dtype=torch.bool)
        state = self.policy.initial_lstm_state(2)
        self.recurrent = state is not None
        if state is not None:
            _check_names(self.parts, [MEMORY, START])
            self.inputs |= {MEMORY: state, START: torch.ones(2, dtype=torch.bool)}
        distribution, _ = self.policy.step(self._inputs(*self.inputs.values()))
        self.outputs = [*self.actions, *(field.name for field in fields(distribution))]
        if self.policy.critic_head is not None:
            self.outputs.append("value")
        if self.recurrent:
            self.outputs.append(NEXT_MEMORY)
        _check_names(self.parts, self.outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs for N observations, in the order of ``self.inputs`` -> the outputs in the order of ``outputs``."""
        named = self._inputs(*inputs)
        distribution, state = self.policy.step(named)
        action = self.send(distribution.mode())
        outputs = [
            action.reshape(action.shape[0], -1)[:, where].reshape(action.shape[:1] + leaf.shape).to(_kind(leaf))
            for leaf, where in self.actions.values()
        ]
        outputs += [getattr(distribution, field.name) for field in fields(distribution)]
        if self.policy.critic_head is not None:
            outputs.append(self.policy.values(named) * self.value_unit)
        if state is not None:
            outputs.append(state)
        return tuple(outputs)

    def _inputs(self, *inputs: Tensor) -> dict[str, Tensor]:
        named = self.normalise(dict(zip(self.parts, inputs, strict=False)))
        if self.masked:
            named[MASK] = inputs[len(self.parts)]
        if self.recurrent:
            named |= {LSTM_STATE: inputs[-2], EPISODE_STARTS: inputs[-1]}
        return named


def _kind(space: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, space.dtype)).dtype


def _check_names(parts: list[str], taken: list[str]) -> None:
    for name in set(parts) & set(taken):
        raise SurefootError(
            f"observation {name!r}: an exported file uses that name for something else; rename this part of the space"
        )


# ---- probes ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportProbe:
    """An input to compare an exported file on: an observation with its mask and LSTM state, if any."""

    observation: Any
    lstm_state: Array | None = None
    """[1, LSTMs, 2, width]"""
    start: bool = False
    mask: Array | None = None
    """[choices] booleans"""


def export_probes(agent: Agent) -> tuple[list[ExportProbe], str]:
    """Probes to compare on, random ones and those of a greedy episode, and a description of them.

    Either all have a mask or none has. If the agent doesn't know whether its task has masks, the environment decides; if that
    doesn't run here, all probes have masks where the action space allows them, since a mask input does no harm.
    """
    space = copy.deepcopy(agent.observation_space)
    space.seed(0)
    observations: list[Any] = [space.sample() for _ in range(SAMPLES)]
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:  # unbounded samples may be huge
        observations = [np.clip(observation, -100, 100) for observation in observations]
        if agent.observation_normaliser is not None:
            observations += [100 * observation for observation in observations]  # to reach its clip
    recipe, sizes, masked = agent.recipe, choices(agent.action_space), agent.masked
    try:
        with closing(maker(recipe.task, recipe.environment, "evaluation")()) as environment:
            check_same_spaces(agent, environment, recipe.task)
            steps = list(greedy_episode(agent, environment, recipe.task, 0, 0, EPISODE))
            if masked is None:
                masked = steps[0].mask is not None
            episode = _episode_probes(agent, steps, bool(masked and sizes))
    except Exception:  # an agent may be exported where its environment is not installed
        random = _random_probes(agent, observations, None if masked is False else sizes)
        return random, f"{len(random)} random observations only, as {recipe.task} does not run here"
    random = _random_probes(agent, observations, sizes if masked else None)
    return random + episode, f"{len(episode)} observations of an episode and {len(random)} random ones"


def _random_probes(agent: Agent, observations: list[Any], sizes: tuple[int, ...] | None) -> list[ExportProbe]:
    """Observations with a random LSTM state, which every other one resets, and a random mask."""
    initial = agent.policy.initial_lstm_state(1)
    states, masks = np.random.default_rng(0), np.random.default_rng(1)
    return [
        ExportProbe(
            observation,
            None if initial is None else states.uniform(-1, 1, initial.shape).astype(np.float32),
            initial is not None and index % 2 == 0,
            None if sizes is None else _random_mask(sizes, masks),
        )
        for index, observation in enumerate(observations)
    ]


def _random_mask(sizes: tuple[int, ...], generator: np.random.Generator) -> Array:
    """A random mask that allows at least one option of every choice.   [Σ sizes] booleans"""
    allowed: Array = generator.random(sum(sizes)) < generator.random()
    allowed[np.cumsum((0, *sizes[:-1])) + generator.integers(sizes)] = True
    return allowed


def _episode_probes(agent: Agent, steps: list[EpisodeStep], masked: bool) -> list[ExportProbe]:
    """The observations of an episode with the LSTM state before each; without a mask everything is allowed."""
    initial = agent.policy.initial_lstm_state(1)
    state, probes = None if initial is None else initial.cpu().numpy(), []
    for index, step in enumerate(steps):
        mask = None
        if masked:
            space = agent.action_space
            mask = np.ones(sum(choices(space) or ()), bool) if step.mask is None else mask_of(space, step.mask)
        probes.append(ExportProbe(step.observation, state, state is not None and index == 0, mask))
        if state is not None:
            state = predicted(agent, probes[-1])[1]
    return probes


def predicted(agent: Agent, probe: ExportProbe) -> tuple[Any, Any]:
    """The agent's action and its next LSTM state."""
    start = None if probe.lstm_state is None else probe.start
    return agent.predict(probe.observation, probe.lstm_state, start, deterministic=True, action_mask=probe.mask)


# ---- export ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """A written file, its signature, and the observations it was compared on."""

    path: Path
    signature: str
    compared: str

    def line(self) -> str:
        """All fields in one line."""
        return f"{self.path}: {self.signature}; acts as the agent does on {self.compared}"


def export_agent(agent: Agent, path: Path, format: str, steps: str = "") -> Exported:
    """Write an agent as an ONNX model or a ``torch.export`` program, and compare the file with the agent.

    path     written atomically
    format   "onnx" or "torch"
    steps    training steps for the file's metadata, if a number

    Raises SurefootError when a package is missing, torch can't trace the network, or the file acts differently from the agent.
    """
    assert format in SUFFIXES, format
    if path.suffix != SUFFIXES[format]:
        raise SurefootError(f"out={str(path)!r}: must end in {SUFFIXES[format]} for format={format}")
    for package in ("onnx", "onnxscript") if format == "onnx" else ():
        require_package(package, "export", "surefoot export --format onnx")
    about = {"surefoot": __version__, "task": agent.recipe.task, "algorithm": agent.recipe.algorithm}
    about |= {"steps": steps} if steps.isdigit() else {}
    probes, compared = export_probes(agent)
    policy = ExportedPolicy(agent, masked=probes[0].mask is not None)
    with _quiet():
        program = _traced(policy, agent.recipe.task)
        _compare(agent, policy, _from_torch(program.module()), probes, "the traced network")
        content = _onnx(program, policy, about) if format == "onnx" else _pt2(program, about)
        read = _from_onnx(content) if format == "onnx" else _from_torch(torch.export.load(io.BytesIO(content)).module())
        if read is None:
            compared += " (compared before it was written: onnxruntime, which could run the file, is not installed)"
        else:
            _compare(agent, policy, read, probes, str(path))
    with writing(path, "choose another path with --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return Exported(path, _signature(policy), compared)


def _signature(policy: ExportedPolicy) -> str:
    """``observation [N, 4] -> action [N], logits [N, 2], value [N]``"""

    def shown(name: str, tensor: Tensor) -> str:
        return f"{name} [{', '.join(['N', *map(str, tensor.shape[1:])])}]"

    outputs = policy(*policy.inputs.values())
    left = ", ".join(shown(*pair) for pair in policy.inputs.items())
    return f"{left} -> {', '.join(shown(*pair) for pair in zip(policy.outputs, outputs, strict=True))}"


# ---- writing ----------------------------------------------------------------------------------------------------------


def _traced(policy: ExportedPolicy, task: str) -> torch.export.ExportedProgram:
    """The graph, for any number of observations."""
    batch = torch.export.Dim("N", min=1)
    try:
        program = torch.export.export(
            policy, tuple(policy.inputs.values()), dynamic_shapes={"inputs": tuple({0: batch} for _ in policy.inputs)}
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise SurefootError(
            f"task={task!r}: torch.export can't trace this agent's network ({type(error).__name__}: {reason})"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


def _pt2(program: torch.export.ExportedProgram, about: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"surefoot.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(program: torch.export.ExportedProgram, policy: ExportedPolicy, about: dict[str, str]) -> bytes:
    shown = [*policy.inputs, *policy.outputs]
    private = [f"surefoot:{i}" for i in range(len(shown))]  # unique names
    made = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=private[: len(policy.inputs)],
        output_names=private[len(policy.inputs) :],
        verbose=False,
    )
    assert made is not None
    model = made.model_proto
    _rename(model.graph, dict(zip(private, shown, strict=True)) | {name: f"{name}:inner" for name in shown})
    # The exporter's own metadata is most of the file, and its name for the batch size differs from run to run.
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del part.metadata_props[:]
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == batch:
                size.dim_param = "N"
    del model.metadata_props[:]
    for key, value in about.items():
        model.metadata_props.add(key=key, value=value)
    return bytes(model.SerializeToString())


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Rename the values of an ONNX graph and of its subgraphs."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' messages, which are not about the agent."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")  # about missing torchvision
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", r".*lstm\._flat_weights.* assigned during export", UserWarning)
            yield
    finally:
        log.setLevel(level)


# ---- comparing --------------------------------------------------------------------------------------------------------

Reader = Callable[[list[Array]], list[Array]]
"""the inputs for N observations -> the outputs of an exported program"""


def _from_torch(module: Any) -> Reader:
    return lambda inputs: [output.numpy() for output in module(*map(torch.from_numpy, inputs))]


def _from_onnx(content: bytes) -> Reader | None:
    """None if onnxruntime is not installed; exporting does not need it."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda inputs: list(session.run(None, dict(zip(names, inputs, strict=True))))


def _compare(agent: Agent, policy: ExportedPolicy, read: Reader, probes: list[ExportProbe], what: str) -> None:
    """Raise SurefootError unless ``read`` returns the same as the agent's ``predict``, up to rounding.

    A choice may differ if the logits of both options are equal up to rounding.
    """
    rows = [agent.read(probe.observation)[0] for probe in probes]
    inputs = [np.stack([row[path] for row in rows]) for path in agent.parts]
    if policy.masked:
        inputs.append(np.stack([probe.mask for probe in probes if probe.mask is not None]))
    if policy.recurrent:
        inputs.append(np.concatenate([probe.lstm_state for probe in probes if probe.lstm_state is not None]))
        inputs.append(np.array([probe.start for probe in probes]))
    expected = [output.numpy() for output in policy(*map(torch.from_numpy, inputs))]
    answers = [predicted(agent, probe) for probe in probes]
    flat = np.stack([flat_action(agent.action_space, action) for action, _ in answers])
    for index, (leaf, where) in enumerate(policy.actions.values()):
        expected[index] = flat.reshape(len(flat), -1)[:, where].reshape(len(flat), *leaf.shape).astype(leaf.dtype)
    if policy.recurrent:
        expected[-1] = np.concatenate([state for _, state in answers])
    for name, ours, theirs in zip(policy.outputs, expected, read(inputs), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(what, f"{name} is {theirs.dtype} {theirs.shape} instead of {ours.dtype} {ours.shape}")
        leaf, where = policy.actions.get(name, (None, slice(None)))
        if leaf is not None and not isinstance(leaf, spaces.Box):  # compare the logits of the chosen options
            logits = expected[policy.outputs.index("logits")]
            logits = logits.reshape(len(logits), -1, logits.shape[-1])[:, where]
            first = np.array(getattr(leaf, "start", 0), np.int64)
            ours, theirs = (_logits_of((chosen - first).reshape(logits.shape[:-1]), logits) for chosen in (ours, theirs))
        finite = np.isfinite(ours)
        bound = ATOL * max(1.0, float(np.abs(ours[finite]).max(initial=0))) + RTOL * np.abs(np.where(finite, ours, 0))
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            off = np.where(ours == theirs, 0, np.abs(ours - theirs))
        if not (off <= bound).all():
            raise _differs(what, f"{name} is off by up to {off.max():.2g}")


def _logits_of(chosen: Array, logits: Array) -> Array:
    """The logits of chosen options; NaN for options that don't exist.

    [...] counted from 0, [..., n] -> [...]
    """
    index = chosen[..., None]
    allowed = (index >= 0) & (index < logits.shape[-1])
    return np.where(allowed, np.take_along_axis(logits, np.where(allowed, index, 0), -1), np.nan)[..., 0]


def _differs(what: str, how: str) -> SurefootError:
    return SurefootError(f"{what}: acts differently from the agent ({how}); nothing was written, please report this")
