"""An agent as a file that other programs run: raw observations in, the action for the environment out, normaliser included."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot import __version__
from surefoot.control.agent import Agent
from surefoot.control.export.acting import Acting
from surefoot.control.export.probes import Situation, asked, situations_of
from surefoot.control.spaces import Array
from surefoot.errors import SurefootError, missing_extra
from surefoot.files import write_bytes

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}
OPSET = 18
"""the oldest that torch writes without converting: the more runtimes read it"""
RTOL, ATOL = 1e-4, 1e-5


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
    situations, compared = situations_of(agent)
    acting = Acting(agent, masked=situations[0].mask is not None)
    with _quiet():
        program = _traced(acting, agent.recipe.task)
        _compare(agent, acting, _from_torch(program.module()), situations, "the traced network")
        content = _onnx(program, acting, about) if format == "onnx" else _pt2(program, about)
        read = _from_onnx(content) if format == "onnx" else _from_torch(torch.export.load(io.BytesIO(content)).module())
        if read is None:
            compared += " (before it was written: onnxruntime, which would run the file, is not installed)"
        else:
            _compare(agent, acting, read, situations, str(path))
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
            acting, tuple(acting.inputs.values()), dynamic_shapes={"given": tuple({0: batch} for _ in acting.inputs)}
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
    shown = [*acting.inputs, *acting.outputs]
    private = [f"surefoot:{i}" for i in range(len(shown))]  # names that nothing in between can have
    made = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=private[: len(acting.inputs)],
        output_names=private[len(acting.inputs) :],
        verbose=False,
    )
    assert made is not None
    model = made.model_proto
    _rename(model.graph, dict(zip(private, shown, strict=True)) | {name: f"{name}:inner" for name in shown})
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


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Call the values of an ONNX graph, and of those within its nodes, otherwise."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, names)


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
            warnings.filterwarnings("ignore", r".*lstm\._flat_weights.* assigned during export", UserWarning)  # as they were
            yield
    finally:
        log.setLevel(level)


# ---- comparing --------------------------------------------------------------------------------------------------------

Reader = Callable[[list[Array]], list[Array]]
"""the inputs for N observations -> the outputs, as some program that is not the agent computes them"""


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


def _compare(agent: Agent, acting: Acting, read: Reader, situations: list[Situation], what: str) -> None:
    """Raise SurefootError unless a reader gives what the agent's ``predict`` does, rounding aside.

    A choice may differ where the logits of both are the same but for rounding.
    """
    rows = [agent.read(situation.observation)[0] for situation in situations]
    given = [np.stack([row[path] for row in rows]) for path in agent.leaves]
    if acting.masked:
        given.append(np.stack([situation.mask for situation in situations if situation.mask is not None]))
    if acting.remembers:
        given.append(np.concatenate([situation.memory for situation in situations if situation.memory is not None]))
        given.append(np.array([situation.start for situation in situations]))
    wanted = [output.numpy() for output in acting(*map(torch.from_numpy, given))]
    answers = [asked(agent, situation) for situation in situations]
    wanted[0] = np.stack([action for action, _ in answers])
    if acting.remembers:
        wanted[-1] = np.concatenate([memory for _, memory in answers])
    for name, ours, theirs in zip(acting.outputs, wanted, read(given), strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(what, f"{name} is {theirs.dtype} {theirs.shape} instead of {ours.dtype} {ours.shape}")
        if acting.bounds is None and name == "action":  # how much less likely than the likeliest is what was chosen
            logits = wanted[acting.outputs.index("logits")]
            first = acting.first.numpy()
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
