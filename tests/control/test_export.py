"""Exported agents: another program gets the agent's actions from raw observations."""

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from torch.onnx._internal.exporter._registration import ONNXRegistry

import surefoot
from surefoot import SurefootError
from surefoot.control import export
from surefoot.control.environments.looped import episode_seed
from surefoot.control.export import export_agent, export_probes
from surefoot.control.spaces import BARE, MASK

from .test_masks import MANY, SEEN, at
from .test_masks import masks as random_masks
from .tiny import QUIET, Clockwork, Sampled

QUICK: dict[str, Any] = {
    "evaluation": {"episodes": 0},
    "normalise": {"observations": True, "rewards": True, "clip": 2.0},
    "rollout": {"environments": 2, "steps": 256},
    "objective": {"reuse": {"epochs": 4, "minibatches": 8}},
    "seed": 1,
}
FORMATS = ["onnx", "torch"]
LATER = pytest.mark.release
"""for cases whose parts other cases have in another combination: exporting one with a memory takes three seconds"""
Program = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


def program(path: Path) -> Program:
    """A file as its own runtime runs it: its inputs by name, in their order -> its outputs."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda arguments: session.run(None, arguments)
    module = torch.export.load(path).module()
    return lambda arguments: [output.numpy() for output in module(*map(torch.from_numpy, arguments.values()))]


@pytest.fixture(autouse=True, scope="module")
def one_registry() -> Iterator[None]:
    """PyTorch parses the signatures of 500 ONNX functions at each export, half of its time: once is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="module")
def agents() -> dict[str, surefoot.Agent]:
    cheetah = {**QUICK, "rollout": {"environments": 1, "steps": 512}}
    return {
        "CartPole-v1": surefoot.train("CartPole-v1", surefoot.PPO_CLIP, steps=2048, **QUICK),
        "HalfCheetah-v5": surefoot.train("HalfCheetah-v5", surefoot.PPO_CLIP, steps=1024, **cheetah),
    }


@pytest.fixture(scope="module")
def files(agents: dict[str, surefoot.Agent], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for task, agent in agents.items():
        for format in FORMATS:
            path = folder / f"{task}{export.SUFFIXES[format]}"
            made[task, format] = export_agent(agent, path, format, "4096").path
    return made


@pytest.mark.parametrize(("task", "format"), [("CartPole-v1", "onnx"), ("CartPole-v1", "torch"), ("HalfCheetah-v5", "onnx")])
def test_the_file_acts_as_the_agent_does_over_whole_episodes(
    task: str, format: str, agents: dict[str, surefoot.Agent], files: dict[tuple[str, str], Path]
) -> None:
    """The program acts; the agent is asked at every step what it would have done."""
    run, agent, environment = program(files[task, format]), agents[task], gymnasium.make(task, disable_env_checker=True)
    lengths, seen = [], []
    for episode in range(2 if task == "CartPole-v1" else 1):
        observation, _ = environment.reset(seed=episode_seed(7, episode, 0))
        over, length = False, 0
        while not over:
            action = run({BARE: observation[None].astype(agent.parts[BARE].dtype)})[0][0]
            wanted = agent.predict(observation, deterministic=True)[0]
            if task == "CartPole-v1":
                assert action == wanted
            else:
                assert np.allclose(action, wanted, rtol=1e-5, atol=1e-6)
            seen.append(np.array(action))
            observation, _, terminated, truncated, _ = environment.step(action)
            over, length = terminated or truncated, length + 1
        lengths.append(length)
    environment.close()
    assert min(lengths) == 1000 if task == "HalfCheetah-v5" else min(lengths) >= 20
    assert np.std(seen, axis=0).min() > 0, "always the same action would prove nothing"


@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_observations_can_be_given(
    format: str, agents: dict[str, surefoot.Agent], files: dict[tuple[str, str], Path]
) -> None:
    for task, agent in agents.items():
        run = program(files[task, format])
        for count in (1, 2, 7, 64):
            observations = np.random.default_rng(count).normal(size=(count, *agent.observation_space.shape))
            observations = observations.astype(agent.parts[BARE].dtype)
            action = run({BARE: observations})[0]
            wanted = agent.predict(observations, deterministic=True)[0]
            assert (action.shape, action.dtype) == (wanted.shape, wanted.dtype)
            assert np.allclose(action, wanted, rtol=1e-5, atol=1e-6)


def test_the_onnx_file_describes_its_inputs_outputs_and_origin(files: dict[tuple[str, str], Path]) -> None:
    model = onnx.load(files["HalfCheetah-v5", "onnx"])
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert model.ir_version <= 10
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {"observation": ["N", 17], "action": ["N", 6], "mean": ["N", 6], "log_std": ["N", 6], "value": ["N"]}
    about = {entry.key: entry.value for entry in model.metadata_props}
    version = surefoot.__version__
    assert about == {"task": "HalfCheetah-v5", "algorithm": "PPO_CLIP", "steps": "4096", "surefoot": version}
    discrete = onnx.load(files["CartPole-v1", "onnx"])
    assert [value.name for value in discrete.graph.output] == ["action", "logits", "value"]


def test_the_torch_file_describes_its_origin(files: dict[tuple[str, str], Path]) -> None:
    extra = {"surefoot.json": ""}
    torch.export.load(files["CartPole-v1", "torch"], extra_files=extra)
    about = json.loads(extra["surefoot.json"])
    assert (about["task"], about["steps"]) == ("CartPole-v1", "4096")


def test_exported_files_contain_no_local_paths(files: dict[tuple[str, str], Path]) -> None:
    here = str(Path(export.__file__).parent).encode()
    for (_, format), path in files.items():
        content = path.read_bytes()
        if format == "torch":
            with zipfile.ZipFile(path) as archive:
                content = b"".join(archive.read(name) for name in archive.namelist())
        assert here not in content
        assert b"export.py" not in content
        assert b"site-packages" not in content


def test_the_same_agent_gives_the_same_bytes(
    agents: dict[str, surefoot.Agent], files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    again = export_agent(agents["CartPole-v1"], tmp_path / "a.pt2", "torch", "4096").path
    assert again.read_bytes() == files["CartPole-v1", "torch"].read_bytes()
    assert list(tmp_path.iterdir()) == [again]


# ---- actions as the environment takes them ----------------------------------------------------------------------------


def test_discrete_actions_are_counted_from_their_start(tmp_path: Path) -> None:
    make = lambda: Clockwork(action_space=spaces.Discrete(3, start=-5))  # noqa: E731
    agent = surefoot.train(make, surefoot.A2C, steps=1, **QUIET)
    with torch.no_grad():
        agent.policy.actor_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    made = export_agent(agent, tmp_path / "a.pt2", "torch")
    observations = np.random.default_rng(1).normal(size=(200, 4)).astype(np.float32)
    actions = program(made.path)({BARE: observations})[0]
    assert set(actions.tolist()) == {-5, -4, -3}
    assert np.array_equal(actions, agent.predict(observations, deterministic=True)[0])
    assert "random observations only, as " in made.line(), "a local function can't be made again"


def test_box_actions_are_kept_within_their_bounds_and_without_a_critic_there_is_no_value(tmp_path: Path) -> None:
    agent = surefoot.train("Pendulum-v1", surefoot.REINFORCE, steps=1, evaluation={"episodes": 0})
    with torch.no_grad():
        agent.policy.actor_head.weight.mul_(1e4)
    made = export_agent(agent, tmp_path / "a.pt2", "torch")
    assert made.signature == "observation [N, 3] -> action [N, 1], mean [N, 1], log_std [N, 1]"
    observations = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    action, mean, _ = program(made.path)({BARE: observations})
    assert set(np.unique(action)) >= {-2.0, 2.0}
    assert np.abs(action).max() == 2
    assert np.abs(mean).max() > 2


def test_exporting_does_not_change_the_agent(tmp_path: Path) -> None:
    agent = surefoot.train("Pendulum-v1", surefoot.A2C, steps=1, evaluation={"episodes": 0})
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    space = agent.observation_space.np_random.bit_generator.state
    export_agent(agent, tmp_path / "a.pt2", "torch")
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())
    assert all(parameter.requires_grad for parameter in agent.policy.parameters())
    assert agent.observation_space.np_random.bit_generator.state == space


# ---- what is rejected --------------------------------------------------------------------------------------------------


def altered(acting: export.ExportedPolicy, name: str, by: float) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """A program that gives one output a little differently."""

    def read(leaves: list[np.ndarray]) -> list[np.ndarray]:
        outputs = [output.numpy().copy() for output in acting(*map(torch.from_numpy, leaves))]
        outputs[acting.outputs.index(name)][0] += np.asarray(by).astype(outputs[acting.outputs.index(name)].dtype)
        return outputs

    return read


@pytest.mark.parametrize(
    ("task", "name", "by"),
    [
        ("CartPole-v1", "action", 1),
        ("CartPole-v1", "logits", 0.01),
        ("CartPole-v1", "value", np.nan),
        ("HalfCheetah-v5", "action", 1e-3),
    ],
)
def test_a_program_that_differs_in_one_entry_is_detected(
    task: str, name: str, by: float, agents: dict[str, surefoot.Agent]
) -> None:
    agent, acting = agents[task], export.ExportedPolicy(agents[task], masked=False)
    rng = np.random.default_rng(1)
    observations = [rng.normal(size=agent.observation_space.shape) for _ in range(10)]
    if (task, name) == ("CartPole-v1", "action"):  # so that 0 + 1 is the other action
        observations.sort(key=lambda observation: agent.predict(observation, deterministic=True)[0])
    probes = [export.ExportProbe(observation) for observation in observations]
    export._compare(agent, acting, altered(acting, name, 0), probes, "it")
    with pytest.raises(SurefootError, match=f"it: acts differently from the agent \\({name} is off by up to"):
        export._compare(agent, acting, altered(acting, name, by), probes, "it")


def test_nothing_is_written_when_the_file_differs(
    agents: dict[str, surefoot.Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.export.load

    def spoiled(file: Any) -> Any:
        loaded = load(file)
        next(iter(loaded.state_dict.values())).add_(0.1)
        return loaded

    monkeypatch.setattr(torch.export, "load", spoiled)
    with pytest.raises(SurefootError, match=r"a\.pt2: acts differently from the agent"):
        export_agent(agents["CartPole-v1"], tmp_path / "out" / "a.pt2", "torch")
    assert list(tmp_path.iterdir()) == []


def test_ties_between_equally_likely_actions_may_break_differently(agents: dict[str, surefoot.Agent]) -> None:
    agent = surefoot.train("CartPole-v1", surefoot.A2C, steps=1, evaluation={"episodes": 0})
    with torch.no_grad():
        agent.policy.actor_head.weight.zero_()
        agent.policy.actor_head.bias.zero_()
    acting, probes = export.ExportedPolicy(agent, masked=False), [export.ExportProbe(np.zeros(4))]
    greedy = int(agent.predict(np.zeros(4), deterministic=True)[0])
    other = altered(acting, "action", 1 - 2 * greedy)
    assert int(other([np.zeros((1, 4), np.float32)])[0][0]) == 1 - greedy, "it is the other action"
    export._compare(agent, acting, other, probes, "it")
    with torch.no_grad():
        agent.policy.actor_head.bias[greedy] += 1e-2
    acting = export.ExportedPolicy(agent, masked=False)
    other = altered(acting, "action", 1 - 2 * greedy)
    with pytest.raises(SurefootError, match="it: acts differently from the agent"):
        export._compare(agent, acting, other, probes, "it")


def test_a_network_that_cannot_be_traced_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = surefoot.train("CartPole-v1", surefoot.A2C, steps=1, evaluation={"episodes": 0})
    plain = type(agent.policy).step

    def undecided(self: Any, inputs: Any) -> Any:
        return plain(self, inputs if inputs[BARE].sum() > 0 else {BARE: -inputs[BARE]})

    monkeypatch.setattr(type(agent.policy), "step", undecided)
    with pytest.raises(SurefootError, match=r"task='CartPole-v1': torch\.export can't trace this agent's network \("):
        export_agent(agent, tmp_path / "a.pt2", "torch")


def test_missing_packages_are_named(agents: dict[str, surefoot.Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxscript", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SurefootError, match=rf"{name}, which is not installed; run: pip install .*\[export\]'"):
            export_agent(agents["CartPole-v1"], tmp_path / "a.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


# ---- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    fields = {"rollout": {"environments": 1, "steps": 64}, "evaluation": {"episodes": 0}, "checkpoint": {"every": 64}}
    surefoot.train("CartPole-v1", surefoot.A2C, steps=128, seed=1, run_dir=path, **fields)
    return path


def test_export_writes_one_file_and_prints_one_line(command: Any, run: Path) -> None:
    code, out, err = command("export", str(run), "--format", "torch", "--checkpoint", "64")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.startswith(
        f"{run}/exports/cartpole-v1-64.pt2: observation [N, 4] -> action [N], logits [N, 2], value [N]; acts "
    )
    assert " acts as the agent does on " in out
    assert out.endswith(" observations of an episode and 128 random ones\n")
    assert [path.name for path in (run / "exports").iterdir()] == ["cartpole-v1-64.pt2"]


def test_without_onnxruntime_the_line_states_that_the_file_was_not_run(
    command: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, out, err = command("export", str(run), "--out", str(tmp_path / "a.onnx"))
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.endswith(" (compared before it was written: onnxruntime, which could run the file, is not installed)\n")
    session = onnxruntime.InferenceSession((tmp_path / "a.onnx").read_bytes())
    assert {entry.name for entry in session.get_inputs()} == {"observation"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--format", "tflite"], ["--format", "'onnx', 'torch'"]),
        (["--out", "a.pt2"], ["out='a.pt2'", "must end in .onnx for format=onnx"]),
        (["--out", "/dev/null/a.pt2", "--format", "torch"], ["/dev/null/a.pt2: can't be written", "--out"]),
        (["--checkpoint", "best"], ["checkpoint='best'", "there is 64, 128"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bad_words_are_rejected_in_one_line(command: Any, run: Path, words: list[str], parts: list[str]) -> None:
    before = sorted(run.rglob("*"))
    code, out, err = command("export", str(run), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [part for part in parts if part not in err] == []
    assert sorted(run.rglob("*")) == before


def test_observations_of_other_kinds_are_exported_too(tmp_path: Path) -> None:
    agent = surefoot.train("Taxi-v4", surefoot.A2C, steps=1, evaluation={"episodes": 0})
    done = export.export_agent(agent, tmp_path / "agent.pt2", "torch")
    assert "acts as the agent does on" in done.line()


class TwoParts(gymnasium.Env[dict[str, np.ndarray], int]):
    """Observations of two parts, at random; an episode is 8 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, one: str = "near", other: str = "far") -> None:
        self.observation_space = spaces.Dict({one: spaces.Box(-1, 1, (2,)), other: spaces.Box(-9, 9, (3,))})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observation_space.sample(), float(action), False, self.t == 8, {}


PLACE = f"{__name__}:{TwoParts.__name__}"
BRIEF: dict[str, Any] = {
    "evaluation": {"episodes": 0},
    "rollout": {"environments": 2, "steps": 64},
    "normalise": {"observations": True, "rewards": False},
}


class Own(torch.nn.Module):
    """A network of somebody's own, for one observation or a dict of parts."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        self.layers = torch.nn.ModuleList(torch.nn.Linear(spaces.flatdim(part), 8) for part in parts.values())

    def forward(self, inputs: Any) -> torch.Tensor:
        parts = inputs.values() if isinstance(inputs, dict) else [inputs]
        both = zip(self.layers, parts, strict=True)
        return torch.stack([layer(part.reshape(part.shape[0], -1)) for layer, part in both]).sum(0).relu()


@pytest.mark.parametrize(("lstm", "parts", "format"), [(None, True, "torch"), pytest.param(4, False, "onnx", marks=LATER)])
def test_an_agent_with_a_network_of_ones_own_is_exported(
    lstm: int | None, parts: bool, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with the agent on batches of several sizes before it is written."""
    monkeypatch.setitem(sys.modules, "owned", module := ModuleType("owned"))
    module.Own = Own  # type: ignore[attr-defined]
    vector = spaces.Box(-1, 1, (3,), np.float32)
    space = spaces.Dict({"arm": spaces.Box(-1, 1, (2, 2), np.float32), "eye": vector}) if parts else vector
    fields = {**QUICK, "network": {"custom": "owned:Own", "lstm": lstm}, "objective": {"reuse": {"minibatches": 2}}}
    agent = surefoot.train(lambda: Sampled(space, spaces.Discrete(3)), steps=512, **fields)
    exported = export_agent(agent, tmp_path / f"own{export.SUFFIXES[format]}", format)
    assert "acts as the agent does" in exported.line()


@pytest.mark.parametrize("format", FORMATS)
def test_an_agent_that_normalises_several_parts_is_exported_without_a_warning(format: str, tmp_path: Path) -> None:
    agent = surefoot.train(PLACE, surefoot.A2C, steps=128, **BRIEF)
    done = export_agent(agent, tmp_path / f"a{export.SUFFIXES[format]}", format)
    assert done.signature == "far [N, 3], near [N, 2] -> action [N], logits [N, 2], value [N]"
    assert done.compared == "9 observations of an episode and 128 random ones"


@pytest.mark.parametrize(("names", "lstm"), [(("near", "value"), None), (("memory", "far"), 4), (("next_memory", "far"), 4)])
def test_a_part_with_the_name_of_something_else_in_the_file_is_rejected(
    names: tuple[str, str], lstm: int | None, tmp_path: Path
) -> None:
    parts = dict(zip(("one", "other"), names, strict=True))
    agent = surefoot.train(PLACE, surefoot.A2C, steps=1, network={"lstm": lstm}, environment=parts, **BRIEF)
    (taken,) = set(names) - {"near", "far"}
    with pytest.raises(
        SurefootError, match=f"observation '{taken}': an exported file uses that name for something else; rename"
    ):
        export_agent(agent, tmp_path / "agent.onnx", "onnx")


def test_a_part_may_have_the_name_of_a_graph_node(tmp_path: Path) -> None:
    agent = surefoot.train(PLACE, surefoot.A2C, steps=1, environment={"one": "tanh", "other": "linear"}, **BRIEF)
    path = tmp_path / "agent.onnx"
    export_agent(agent, path, "onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert {value.name for value in onnxruntime.InferenceSession(path).get_inputs()} >= {"tanh", "linear"}


def counted(kind: str) -> Sampled:
    """Actions of a kind of number that is not the usual one."""
    several = spaces.MultiDiscrete([2, 3], dtype=np.dtype(kind))
    return Sampled(SEEN, several if kind == "uint16" else spaces.Discrete(3, dtype=np.dtype(kind)))


@pytest.mark.parametrize(("kind", "format"), [("uint8", "torch"), pytest.param("uint16", "onnx", marks=LATER)])
def test_actions_keep_the_dtype_of_their_space(kind: str, format: str, tmp_path: Path) -> None:
    agent = surefoot.train(f"{__name__}:counted", surefoot.A2C, steps=1, environment={"kind": kind}, **BRIEF)
    path = tmp_path / f"agent{export.SUFFIXES[format]}"
    export_agent(agent, path, format)  # which compares with what the agent does
    if format == "onnx":
        onnx.checker.check_model(onnx.load(path), full_check=True)
    assert agent.action_space.dtype == kind


# ---- memory -----------------------------------------------------------------------------------------------------------


def remembering_agent(task: str, shared: bool = False, **changes: Any) -> surefoot.Agent:
    """An agent whose LSTM weighs so much that what it remembers decides what it does."""
    network = {"hidden": [8], "lstm": 6, "shared_trunk": shared}
    agent = surefoot.train(task, surefoot.A2C, steps=128, network=network, seed=2, **{**BRIEF, **changes})
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        agent.policy.actor_head.weight.normal_(generator=draws)
        for name, parameter in agent.policy.named_parameters():
            if "lstm" in name:
                parameter.normal_(generator=draws)
    return agent


@pytest.fixture(scope="module")
def probed() -> tuple[surefoot.Agent, export.ExportedPolicy, list[export.ExportProbe]]:
    """An agent with a memory, its policy to export, and the observations that they are compared on."""
    agent = remembering_agent("Pendulum-v1")
    return agent, export.ExportedPolicy(agent, masked=False), export_probes(agent)[0]


@pytest.mark.parametrize(
    ("task", "format", "shared"), [("CartPole-v1", "onnx", False), pytest.param("Pendulum-v1", "torch", True, marks=LATER)]
)
def test_the_file_carries_the_lstm_state_like_the_agent(task: str, format: str, shared: bool, tmp_path: Path) -> None:
    """The program acts on its own memory, the agent is asked at every step, and the second episode forgets the first."""
    agent = remembering_agent(task, shared)
    made = export_agent(agent, tmp_path / f"a{export.SUFFIXES[format]}", format)
    run = program(made.path)
    environment = gymnasium.make(task, disable_env_checker=True)
    memory, state = np.full((1, 1 if shared else 2, 2, 6), 7, np.float32), None  # of no episode: to be forgotten
    taken, forgetful = [], []
    for episode in range(2):
        observation, _ = environment.reset(seed=episode)
        start, over = True, False
        while not over:
            seen = observation[None].astype(np.float32)
            action, *_, value, memory = run({"observation": seen, "memory": memory, "episode_start": np.array([start])})
            expected_value = agent.value(seen, state, [start])
            wanted, state = agent.predict(seen, state, [start], deterministic=True)
            assert np.allclose(action, wanted, rtol=1e-4, atol=1e-5)
            assert np.allclose(value, expected_value, rtol=1e-4, atol=1e-5)
            assert np.allclose(memory, state, rtol=1e-4, atol=1e-5)
            taken.append(action[0])
            forgetful.append(agent.predict(seen, deterministic=True)[0][0])
            observation, _, terminated, truncated, _ = environment.step(action[0])
            start, over = False, terminated or truncated
    assert len(taken) > 10
    assert not np.allclose(taken, forgetful), "without its memory the agent would act otherwise"


def blind(acting: export.ExportedPolicy, name: str, value: int) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """A program that reads one of its inputs as always this value."""

    def read(arguments: list[np.ndarray]) -> list[np.ndarray]:
        kept = [np.full_like(x, value) if at == name else x for at, x in zip(acting.inputs, arguments, strict=True)]
        return [output.numpy() for output in acting(*map(torch.from_numpy, kept))]

    return read


@pytest.mark.parametrize("forgotten", ["memory", "episode_start"])
def test_a_program_that_ignores_the_lstm_state_or_starts_is_detected(forgotten: str, probed: Any) -> None:
    agent, acting, probes = probed
    with pytest.raises(SurefootError, match="it: acts differently from the agent"):
        export._compare(agent, acting, blind(acting, forgotten, 0), probes, "it")


# ---- action masks -----------------------------------------------------------------------------------------------------


class Forbidding(Sampled):
    """Of 1,000 actions few are allowed, a forbidden one is an error, and what is said at an episode's end means nothing."""

    def __init__(self, kind: str, masked: bool = True) -> None:
        super().__init__(SEEN, MANY[kind], masked)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, over, info = super().step(action)
        return *rest, over, {"action_mask": np.zeros(1000, bool)} if over and self.masked else info


FORBIDDING = f"{__name__}:{Forbidding.__name__}"


def masking_agent(kind: str, folder: Path | None = None, masked: bool = True, **network: Any) -> surefoot.Agent:
    """An agent that likes some actions much better than others, and not the same ones everywhere."""
    fields: dict[str, Any] = {"environment": {"kind": kind, "masked": masked}, "network": {"hidden": [8], **network}}
    agent = surefoot.train(FORBIDDING, surefoot.A2C, steps=128, seed=2, run_dir=folder, **fields, **BRIEF)
    with torch.no_grad():
        agent.policy.actor_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    return agent


@pytest.mark.parametrize(
    ("kind", "format"), [("discrete", "onnx"), ("multidiscrete", "torch"), pytest.param("multibinary", "onnx", marks=LATER)]
)
def test_of_a_thousand_actions_the_file_chooses_an_allowed_one_and_the_agents(kind: str, format: str, tmp_path: Path) -> None:
    agent = masking_agent(kind)
    made = export_agent(agent, tmp_path / f"a{export.SUFFIXES[format]}", format)
    assert made.signature.startswith("observation [N, 3], action_mask [N, 1000] -> action [N")
    assert made.compared == "5 observations of an episode and 256 random ones"
    run, seen = program(made.path), np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    free, _ = agent.predict(seen, deterministic=True)
    for share in (0.001, 0.3, 1.0):
        allowed = random_masks(kind, 200, share)
        actions, logits, _ = run({"observation": seen, "action_mask": allowed.numpy()})
        wanted, _ = agent.predict(seen, deterministic=True, action_mask=allowed.numpy())
        assert allowed.gather(-1, at(kind, torch.from_numpy(actions).long())).all()
        assert np.array_equal(actions, wanted)
        assert (np.isfinite(logits).sum(axis=tuple(range(1, logits.ndim))) == allowed.sum(-1).numpy()).all()
        assert (share == 1.0) == allowed.gather(-1, at(kind, torch.from_numpy(free).long())).all(), "else masks change nothing"


def test_masks_and_lstm_states_can_be_combined(tmp_path: Path) -> None:
    agent = masking_agent("multidiscrete", lstm=4)
    made = export_agent(agent, tmp_path / "a.pt2", "torch")
    assert made.signature.startswith(
        "observation [N, 3], action_mask [N, 1000], memory [N, 2, 2, 4], episode_start [N] -> action [N, 3], "
    )
    run, draws = program(made.path), np.random.default_rng(1)
    memory, state, starts = np.zeros((7, 2, 2, 4), np.float32), None, np.ones(7, bool)
    for step in range(4):
        seen = draws.normal(size=(7, 3)).astype(np.float32)
        allowed = random_masks("multidiscrete", 7, 0.3, step).numpy()
        actions, *_, memory = run({"observation": seen, "action_mask": allowed, "memory": memory, "episode_start": starts})
        wanted, state = agent.predict(seen, state, starts, deterministic=True, action_mask=allowed)
        assert np.array_equal(actions, wanted)
        assert np.allclose(memory, state, rtol=1e-4, atol=1e-5)
        starts = draws.random(7) < 0.3


@pytest.mark.parametrize(("kind", "lstm"), [("discrete", 4), ("multibinary", None)])
def test_a_program_that_ignores_masks_is_detected(kind: str, lstm: int | None) -> None:
    agent = masking_agent(kind, lstm=lstm)
    acting, (probes, _) = export.ExportedPolicy(agent, masked=True), export_probes(agent)
    export._compare(agent, acting, altered(acting, "action", 0), probes, "it")
    with pytest.raises(SurefootError, match="it: acts differently from the agent \\(action is off by up to inf"):
        export._compare(agent, acting, blind(acting, MASK, 1), probes, "it")


@pytest.mark.parametrize("masked", [True, False])
def test_whether_its_task_masks_is_saved_with_an_agent(masked: bool, tmp_path: Path) -> None:
    agent = masking_agent("discrete", tmp_path / "run", masked)
    agent.save(tmp_path / "agent")
    for folder in ("run", "agent"):
        assert surefoot.load(tmp_path / folder).masked is masked
