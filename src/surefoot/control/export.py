"""An agent as a file that other programs run: raw observations in, the action for the environment out, normaliser included."""

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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
from surefoot.control.episodes import check_same_spaces, greedy_episode
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, missing_extra
from surefoot.run.folder import write_bytes

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}
OPSET = 18
"""the oldest that torch writes without converting: the more runtimes read it"""
SAMPLES, EPISODE = 128, 256
"""random observations, and steps of a real episode, on which the file is compared with the agent"""
RTOL, ATOL = 1e-4, 1e-5


class Acting(nn.Module):
    """What an agent does with a batch of raw observations, as one graph without state.

    Outputs are (action, the parameters of the distribution, V if there is a critic), named by ``outputs``.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        if agent.policy.actor_memory is not None:
            raise SurefootError(
                f"network.lstm={agent.recipe.network.lstm}: an agent with memory can't be exported: the file has no state"
            )
        self.policy = copy.deepcopy(agent.policy).cpu().requires_grad_(False)
        self.normalise = agent.normaliser()
        space = agent.action_space
        self.shape, self.discrete = tuple(space.shape or ()), isinstance(space, spaces.Discrete)
        self.kind = torch.from_numpy(np.empty(0, space.dtype)).dtype
        bounds = (space.low, space.high) if isinstance(space, spaces.Box) else (getattr(space, "start", 0),)
        self.bounds = [torch.from_numpy(np.array(bound)) for bound in bounds]
        self.inputs = {
            path: torch.from_numpy(np.full((2, *leaf.shape), 0 if leaf.bounds is None else leaf.bounds[0], leaf.dtype))
            for path, leaf in agent.leaves.items()
        }
        distribution, _ = self.policy.step(self._inputs(*self.inputs.values()))
        self.outputs = ["action", *(field.name for field in fields(distribution))]
        if self.policy.critic_head is not None:
            self.outputs.append("value")

    def forward(self, *observations: Tensor) -> tuple[Tensor, ...]:
        """The leaves of N observations, in the order of ``inputs`` -> what ``outputs`` names."""
        inputs = self._inputs(*observations)
        distribution, _ = self.policy.step(inputs)
        action = distribution.mode()
        action = action.reshape(action.shape[:1] + self.shape)
        if len(self.bounds) == 2:  # within a Box, counted from a start elsewhere
            action = torch.minimum(torch.maximum(action, self.bounds[0]), self.bounds[1])
        else:
            action = action + self.bounds[0]
        found = [action.to(self.kind), *(getattr(distribution, field.name) for field in fields(distribution))]
        if self.policy.critic_head is not None:
            found.append(self.policy.values(inputs))
        return tuple(found)

    def _inputs(self, *observations: Tensor) -> dict[str, Tensor]:
        """What the policy reads."""
        return self.normalise(dict(zip(self.inputs, observations, strict=True)))


@dataclass(frozen=True)
class Exported:
    """A file that was written, and on what it was found to act as the agent does."""

    path: Path
    signature: str
    compared: str

    def line(self) -> str:
        """All of it in one line."""
        return f"{self.path}: {self.signature}; acts as the agent does on {self.compared}"


def export_agent(agent: Agent, path: Path, format: str, steps: str = "") -> Exported:
    """Write an agent as an ONNX model or a ``torch.export`` program, and compare the file with the agent.

    path     where it goes: there whole in the end, or nothing is changed
    format   "onnx" or "torch"
    steps    of training, for the file's metadata, where it is a number

    Raises SurefootError when a package is missing, torch can't trace the network, or the file acts otherwise than the agent.
    """
    assert format in ENDINGS, format
    if path.suffix != ENDINGS[format]:
        raise SurefootError(f"out={str(path)!r}: must end in {ENDINGS[format]} where the format is {format}")
    if format == "onnx":
        _check_onnx()
    about = {"surefoot": __version__, "task": agent.recipe.task, "algorithm": agent.recipe.algorithm}
    about |= {"steps": steps} if steps.isdigit() else {}
    acting = Acting(agent)
    observations, compared = _observations(agent)
    with _quiet():
        program = _traced(acting, agent.recipe.task)
        _compare(agent, acting, _from_torch(program.module()), observations, "the traced network")
        content = _onnx(program, acting, about) if format == "onnx" else _pt2(program, about)
        read = _from_onnx(content) if format == "onnx" else _from_torch(torch.export.load(io.BytesIO(content)).module())
        if read is None:
            compared += " (before it was written: onnxruntime, which would run the file, is not installed)"
        else:
            _compare(agent, acting, read, observations, str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise SurefootError(f"{path}: can't be written ({error.strerror}); choose another place with --out") from None
    return Exported(path, _signature(acting), compared)


def _signature(acting: Acting) -> str:
    """``observation [N, 4] -> action [N], logits [N, 2], value [N]``"""

    def shown(name: str, tensor: Tensor) -> str:
        return f"{name} [{', '.join(['N', *map(str, tensor.shape[1:])])}]"

    given = acting(*acting.inputs.values())
    left = ", ".join(shown(*pair) for pair in acting.inputs.items())
    return f"{left} -> {', '.join(shown(*pair) for pair in zip(acting.outputs, given, strict=True))}"


# ---- writing ----------------------------------------------------------------------------------------------------------


def _traced(acting: Acting, task: str) -> torch.export.ExportedProgram:
    """The graph, for any number of observations."""
    batch = torch.export.Dim("N", min=1)
    try:
        program = torch.export.export(
            acting, tuple(acting.inputs.values()), dynamic_shapes={"observations": tuple({0: batch} for _ in acting.inputs)}
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise SurefootError(
            f"task={task!r}: torch.export can't trace this agent's network ({type(error).__name__}: {reason})"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of this machine
    return program


def _pt2(program: torch.export.ExportedProgram, about: dict[str, str]) -> bytes:
    """The program as a .pt2 archive."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"surefoot.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(program: torch.export.ExportedProgram, acting: Acting, about: dict[str, str]) -> bytes:
    """The program as an ONNX model."""
    made = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=list(acting.inputs),
        output_names=acting.outputs,
        verbose=False,
    )
    assert made is not None
    model = made.model_proto
    # What the exporter notes about itself is most of the file; and what it calls the batch differs from run to run.
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


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "onnx", "export", "surefoot export --format onnx") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say about themselves: nothing of it is about the agent."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")  # that torchvision is not installed
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        log.setLevel(level)


# ---- comparing --------------------------------------------------------------------------------------------------------

Reader = Callable[[list[Array]], list[Array]]
"""leaves of N observations -> the outputs, as some program that is not the agent computes them"""


def _from_torch(module: Any) -> Reader:
    return lambda leaves: [output.numpy() for output in module(*map(torch.from_numpy, leaves))]


def _from_onnx(content: bytes) -> Reader | None:
    """None where onnxruntime is not installed: who exports need not be who runs it."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda leaves: list(session.run(None, dict(zip(names, leaves, strict=True))))


def _observations(agent: Agent) -> tuple[list[Any], str]:
    """Observations to compare on, random ones and those of a greedy episode, and what they are in words."""
    space = copy.deepcopy(agent.observation_space)
    space.seed(0)
    found: list[Any] = [space.sample() for _ in range(SAMPLES)]
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:  # an unbounded sample may be beyond all reason
        found = [np.clip(observation, -100, 100) for observation in found]
        if agent.observation_normaliser is not None:
            found += [100 * observation for observation in found]  # so that its clip is reached
    recipe, count = agent.recipe, len(found)
    try:
        with closing(maker(recipe.task, recipe.environment, "evaluation")()) as environment:
            check_same_spaces(agent, environment, recipe.task)
            found += [moment.observation for moment in greedy_episode(agent, environment, recipe.task, 0, 0, EPISODE)]
    except Exception:  # the environment need not be here: an agent is exported to be used elsewhere
        return found[:count], f"{count} random observations alone, as {recipe.task} does not run here"
    return found, f"{len(found) - count} observations of an episode and {count} random ones"


def _compare(agent: Agent, acting: Acting, read: Reader, observations: list[Any], what: str) -> None:
    """Raise SurefootError unless a reader gives what the agent's ``predict`` does, rounding aside.

    A choice may differ where the logits of both are the same but for rounding.
    """
    read_ = [agent.read(observation)[0] for observation in observations]
    leaves = [np.stack([row[path] for row in read_]) for path in acting.inputs]
    wanted = [output.numpy() for output in acting(*map(torch.from_numpy, leaves))]
    wanted[0] = np.stack([agent.predict(observation, deterministic=True)[0] for observation in observations])
    for name, ours, theirs in zip(acting.outputs, wanted, read(leaves), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(what, f"{name} is {theirs.dtype} {theirs.shape} instead of {ours.dtype} {ours.shape}")
        if len(acting.bounds) == 1 and name == "action":  # how much less likely than the likeliest is what was chosen
            logits = wanted[acting.outputs.index("logits")]
            first = acting.bounds[0].numpy()
            ours, theirs = (_logits_of((actions - first).reshape(logits.shape[:-1]), logits) for actions in (ours, theirs))
        finite = np.isfinite(ours)
        bound = ATOL * max(1.0, float(np.abs(ours[finite]).max(initial=0))) + RTOL * np.abs(np.where(finite, ours, 0))
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            off = np.where(ours == theirs, 0, np.abs(ours - theirs))
        if not (off <= bound).all():
            raise _differs(what, f"{name} is off by up to {off.max():.2g}")


def _logits_of(choices: Array, logits: Array) -> Array:
    """The logits of what was chosen, equal where choices are equally likely; NaN where there is no such choice.

    [...] counted from 0, [..., n] -> [...]
    """
    index = choices[..., None]
    known = (index >= 0) & (index < logits.shape[-1])
    return np.where(known, np.take_along_axis(logits, np.where(known, index, 0), -1), np.nan)[..., 0]


def _differs(what: str, how: str) -> SurefootError:
    return SurefootError(f"{what}: acts otherwise than the agent ({how}); nothing was written, please report this")
