"""The compiled update against the eager one."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from chain import check_chain
from ranked import on_ranks
from torch._inductor.exc import InductorError
from torch.fx.experimental.proxy_tensor import make_fx

import surefoot
from surefoot.accel import programs as compiling
from surefoot.accel.programs import _compile, _fingerprint, loop, program_of, structure
from surefoot.accel.steps import CompiledStepper, FittingStepper
from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner
from surefoot.core.rollout import Credit, LearnerState, Metrics, map_tensors
from surefoot.core.traces import Recorder
from surefoot.errors import NotCompiledError, NotFiniteError, SurefootError, announced
from surefoot.ranks.launching import join_ranks
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner
from surefoot.store.events import Event, Message

TINY: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 32},
    "network": {"hidden": [8]},
    "objective": {"reuse": {"epochs": 2, "minibatches": 4}, "normalise_advantages": "minibatch"},
    "optimizer": {"learning_rate": 1e-2},
}
LSTM: dict[str, Any] = {
    "task": "CartPole-v1",  # episodes end within rows
    "network": {"hidden": [8], "lstm": 6},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}, "normalise_advantages": "minibatch"},
}
COMPILING = 900.0
"""seconds that a rank waits for another that compiles on a slow machine"""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Libraries are compiled anew, whatever the user's cache holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUREFOOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def trained(engine: str, iterations: int, make: Any = None, **changes: Any) -> tuple[list[Metrics], torch.Tensor, Learner]:
    """A few iterations on a task: their metrics, all parameters, and the learner."""
    table = {"task": "Pendulum-v1", "engine": engine, **TINY, **changes}
    recipe = make_recipe(table)
    world = ControlWorld(recipe, make)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 10_000)
    history = []
    for _ in range(iterations):
        rollout = world.collector.collect(state)
        history.append(learner.update(rollout, assign_credit(rollout, recipe.objective), state))
    world.close()
    return history, torch.cat([p.detach().reshape(-1) for p in world.policy.parameters()]), learner


def made_by(learner: Learner) -> set[str]:
    """What the programs of a learner compute, of those that were made."""
    compiled: Any = getattr(learner.stepper, "compiled", None)
    return set(getattr(getattr(compiled, "passes", compiled), "programs", ()))


def agree(**changes: Any) -> None:
    eager, theirs, _ = trained("eager", 1, **changes)
    compiled, ours, learner = trained("compiled", 1, **changes)
    assert made_by(learner), "nothing was compiled"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert set(compiled[0]) == set(eager[0])
    for name, value in eager[0].items():
        assert compiled[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


WARM: dict[str, Any] = {"optimizer": {"learning_rate": 1e-2, "warmup": 0.01}}
STOP: dict[str, Any] = {"optimizer": {"learning_rate": 1e-1}, "objective": TINY["objective"] | {"target_kl": 0.01}}


@pytest.mark.parametrize("programs", ["interpreted", pytest.param("compiled", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("changes", [WARM, STOP, LSTM], ids=["feed-forward with a warm-up", "stopped by the KL", "lstm"])
def test_compiled_updates_move_the_parameters_as_eager_ones_do(changes: dict[str, Any], programs: None) -> None:
    agree(**changes)


def test_compiled_gradients_of_micro_batches_are_those_of_eager_ones(programs: str) -> None:
    """Adam is not part of the program then, and tanh is computed otherwise."""
    agree(optimizer={"learning_rate": 1e-2, "micro_batch": 4})


def mirrored(observations: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pendulum's mirror image."""
    return observations * torch.tensor([1.0, -1.0, -1.0]), -actions


@pytest.mark.parametrize(
    ("algorithm", "symmetry"),
    [pytest.param("TRPO", None, marks=pytest.mark.slow), ("PPO_CLIP", mirrored), ("TRPO", mirrored)],
    ids=["TRPO", "symmetry", "TRPO with symmetry"],
)
def test_a_compiled_step_of_two_ranks_is_that_of_one_eager_process(
    algorithm: str, symmetry: Any, tmp_path: Path, programs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank learns from its environments, with their mirror images."""
    rollout_settings = {"environments": 4, "steps": 16} | ({"symmetry": "tests:mirrored"} if symmetry else {})
    objective = {"reuse": {"epochs": 1, "minibatches": 1}, "normalise_advantages": "minibatch"}
    table = {**TINY, "task": "Pendulum-v1", "algorithm": algorithm, "objective": objective, "rollout": rollout_settings}
    eager, compiled = [make_recipe({**table, "engine": engine}) for engine in ("eager", "compiled")]
    world = ControlWorld(eager, functions={"rollout.symmetry": symmetry} if symmetry else {})
    rollout = world.collector.collect(LearnerState.seeded(1, 10_000))
    world.close()

    def updated(recipe: Any, rows: list[int]) -> tuple[Metrics, torch.Tensor, Learner]:
        learner, part = make_learner(recipe, world.policy), map_tensors(lambda x: x[rows], rollout)
        metrics = learner.update(part, assign_credit(part, recipe.objective), LearnerState.seeded(1, 10_000))
        return metrics, torch.cat([p.detach().reshape(-1) for p in world.policy.parameters()]), learner

    def compile_once(traced: torch.fx.GraphModule, arguments: Any, library: Path) -> None:
        """Both ranks have the same programs: one compiles each, and the other waits for it."""
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                compile_program(traced, arguments, library)

    def body(rank: int) -> Any:
        if programs == "interpreted":  # they are known to their process alone
            os.environ["SUREFOOT_CACHE"] = str(tmp_path / f"cache {rank}")
        join_ranks()
        own = [row for row in range(len(rollout.actions)) if row % 4 // 2 == rank]  # images follow the steps
        metrics, parameters, learner = updated(compiled, own)
        return metrics, parameters, bool(made_by(learner))

    compile_program = compiling._compile
    monkeypatch.setattr(compiling, "_compile", compile_once)
    outcomes = on_ranks(2, body, tmp_path, timeout=COMPILING)
    before = torch.cat([p.detach().reshape(-1) for p in world.policy.parameters()]).clone()
    expected, moved, _ = updated(eager, list(range(len(rollout.actions))))
    assert not [x for x in outcomes if isinstance(x, str)], outcomes
    assert not torch.allclose(moved, before, rtol=1e-3, atol=1e-4)
    for metrics, parameters, made in outcomes:
        assert made
        torch.testing.assert_close(parameters, moved, rtol=1e-4, atol=1e-5)
        for name in ("policy_loss", "value_loss", "kl"):
            if name in expected:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("optimizer", [pytest.param({}, id="whole"), pytest.param({"micro_batch": 8}, id="micro-batches")])
def test_a_compiled_update_is_traced_as_an_eager_one_and_moves_as_without_a_trace(
    optimizer: dict[str, Any], programs: None
) -> None:
    recipe = make_recipe({"task": "Pendulum-v1", "engine": "compiled", **TINY, "optimizer": TINY["optimizer"] | optimizer})
    results, weights = [], []
    for engine, recorder in (("compiled", None), ("compiled", Recorder(1, 2)), ("eager", Recorder(1, 2))):
        world = ControlWorld(recipe)
        learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 10_000)
        learner.recorder = recorder
        if engine == "eager":
            learner.use_eager()
        rollout = world.collector.collect(state)
        learner.update(rollout, assign_credit(rollout, recipe.objective), state)
        weights.append(torch.cat([p.detach().reshape(-1) for p in world.policy.parameters()]))
        results.append(None if recorder is None else recorder.take(state))
        world.close()
    assert torch.equal(weights[0], weights[1])
    _, compiled, eager = results
    assert compiled is not None
    assert eager is not None
    check_chain(compiled, "minibatch")
    for ours, theirs in zip(compiled.rows, eager.rows, strict=True):
        assert torch.equal(ours.visits.updates, theirs.visits.updates)
        assert len(ours.visits.updates) == 2
        for name in ("log_probs", "ratio", "advantages", "values", "mean", "variance"):
            torch.testing.assert_close(getattr(ours.visits, name), getattr(theirs.visits, name), rtol=1e-3, atol=1e-4)


def test_a_step_that_is_not_finite_ends_a_pass_where_the_eager_engine_ends_it(programs: None) -> None:
    recipe = make_recipe({"task": "Pendulum-v1", "engine": "compiled", **TINY})
    results = []
    for engine in ("compiled", "eager"):
        world = ControlWorld(recipe)
        learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 10_000)
        if engine == "eager":
            learner.use_eager()
        rollout = world.collector.collect(state)
        credit = assign_credit(rollout, recipe.objective)
        order = torch.randperm(64, generator=LearnerState.seeded(1, 10_000).generators["shuffle"])
        returns = credit.returns.clone()
        returns.view(-1)[order[40]] = torch.nan  # in the third minibatch of four
        with pytest.raises(NotFiniteError, match="update 3: value_loss not finite; the step was not taken"):
            learner.update(rollout, Credit(credit.advantages, returns), state)
        assert state.updates == 2
        moments = learner.state_dict()["policy"]
        assert moments["step"] == 2
        results.append((world.policy.state_dict(), moments))
        world.close()
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_a_loop_of_a_program_may_read_constants_and_change_its_own_tensors(programs: str) -> None:
    frozen = torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False)

    def step(index: torch.Tensor, x: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grown = x * frozen + (frozen - 3) + x.new_tensor(0.5)  # read twice
        return index + 1, grown.masked_fill_(grown > 20, 0.0)

    def unfinished(index: torch.Tensor, x: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return (index < end).view(())

    def run(index: torch.Tensor, x: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return loop(unfinished, step, (index, x), (end,))

    def arguments(end: int) -> list[torch.Tensor]:
        return [torch.tensor([0]), torch.tensor([1.0, 2.0]), torch.tensor([end])]

    program = program_of("growing", run, arguments(1))
    for end, expected in ((0, [1.0, 2.0]), (1, [3.5, 6.5]), (2, [11.0, 20.0]), (3, [0.0, 0.0])):
        count, x = program(arguments(end))
        assert (count.item(), x.tolist()) == (end, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"task": "CartPole-v1"}, id="categorical"),
        pytest.param({"network": {"hidden": [8], "shared_trunk": True}}, id="shared-trunk"),
        pytest.param(LSTM | {"network": {**LSTM["network"], "shared_trunk": True}}, id="lstm-shared-trunk"),
        pytest.param(LSTM | {"rollout": {"environments": 4, "steps": 1}}, id="lstm-of-one-step"),
        pytest.param(
            LSTM | {"rollout": {"environments": 4, "steps": 32}, "optimizer": {"learning_rate": 1e-2, "micro_batch": 1}},
            id="lstm-in-parts",
        ),
        pytest.param({"optimizer": {"learning_rate": 1e-2, "critic_learning_rate": 3e-3}}, id="critic-apart"),
        pytest.param({"algorithm": "PPO_PENALTY_ADAPTIVE"}, id="penalty"),
        pytest.param({"objective": TINY["objective"] | {"trust_region": {"beta": 3.0, "fraction": 0.2}}}, id="penalty-on-some"),
        pytest.param({"algorithm": "A2C", "objective": {}}, id="one-update"),
        pytest.param({"algorithm": "TRPO"}, id="natural"),
        pytest.param({"algorithm": "TRPO", "optimizer": {"learning_rate": 1e-2, "micro_batch": 8}}, id="natural-in-parts"),
        pytest.param({"objective": TINY["objective"] | {"value_clip": 0.1, "entropy_coefficient": 0.01}}, id="more-terms"),
    ],
)
def test_compiled_updates_agree_with_eager_ones_whatever_the_switches(changes: dict[str, Any], programs: str) -> None:
    agree(**changes)


@pytest.mark.slow
def test_frozen_parameters_are_part_of_the_program_and_of_its_key() -> None:
    """It lies in the program as a constant: another run's program has another one."""

    def named(weight: float) -> str:
        frozen = torch.nn.Parameter(torch.full((2,), weight), requires_grad=False)
        return _fingerprint(make_fx(lambda x: (x @ frozen,))(torch.ones(2)), [torch.ones(2)])

    with torch.no_grad():
        assert named(1.0) == named(1.0) != named(2.0)


@pytest.mark.parametrize("changes", [{}, LSTM], ids=["feed-forward", "lstm"])
def test_a_program_in_the_cache_is_loaded_without_tracing_and_moves_parameters_alike(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, programs: None
) -> None:
    first, before, _ = trained("compiled", 1, **changes)
    monkeypatch.setattr("surefoot.accel.programs.make_fx", None)  # tracing would raise
    second, after, _ = trained("compiled", 1, **changes)
    assert torch.equal(before, after)
    assert first == second


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {"hidden": [8], "activation": "relu"}},
        {"objective": {**TINY["objective"], "value_coefficient": 0.25}},
        {"rollout": {"environments": 2, "steps": 16}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_program_of_other_settings_is_traced(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, programs: None
) -> None:
    trained("compiled", 1)
    monkeypatch.setattr("surefoot.accel.programs.make_fx", None)
    with pytest.raises(SurefootError, match="can't be traced"):
        trained("compiled", 1, **changes)


def test_the_learning_rate_is_no_part_of_a_program(monkeypatch: pytest.MonkeyPatch, programs: None) -> None:
    trained("compiled", 1)
    monkeypatch.setattr("surefoot.accel.programs.make_fx", None)
    trained("compiled", 1, optimizer={"learning_rate": 3e-3})


def test_constants_of_a_network_are_part_of_its_structure_and_code_of_others_is_unknown() -> None:
    class Scaled(torch.nn.Linear):
        """Code that may change."""

    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 2)
    trained_values = repr(structure(layer, constants=True))
    with torch.no_grad():
        layer.weight.add_(1)
    assert repr(structure(layer, constants=True)) == trained_values, "trained parameters are arguments"
    layer.requires_grad_(False)
    frozen = repr(structure(layer, constants=True))
    assert frozen != trained_values
    with torch.no_grad():
        layer.bias.add_(1)
    assert repr(structure(layer, constants=True)) != frozen
    assert structure(torch.nn.Sequential(Scaled(2, 2)), constants=True) is None


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"algorithm": "TRPO"}, marks=pytest.mark.release), LSTM], ids=["PPO_CLIP", "TRPO", "lstm"]
)
def test_a_compiled_run_resumes_bit_for_bit(changes: dict[str, Any], tmp_path: Path, programs: None) -> None:
    settings = {**TINY, "engine": "compiled", "evaluation": {"episodes": 0}, "checkpoint": {"every": 64}, "seed": 3, **changes}
    task = settings.pop("task", "Pendulum-v1")
    whole = surefoot.train(task, steps=384, run_dir=tmp_path / "whole", **settings)
    half: list[float] = []

    def stop(metrics: Metrics) -> bool:
        half.append(float(metrics["steps"] or 0))
        return half[-1] >= 192

    surefoot.train(task, steps=384, run_dir=tmp_path / "cut", callback=stop, **settings)
    resumed = surefoot.resume(tmp_path / "cut")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_batches_of_another_size_take_the_eager_path(programs: None) -> None:
    recipe = make_recipe({"task": "Pendulum-v1", "engine": "compiled", **TINY})
    world = ControlWorld(recipe)
    learner, state = make_learner(recipe, world.policy), LearnerState.seeded(1, 10_000)
    stepper = learner.stepper
    assert isinstance(stepper, FittingStepper)
    assert isinstance(stepper.compiled, CompiledStepper)
    stepper.rows = 63
    rollout = world.collector.collect(state)
    learner.update(rollout, assign_credit(rollout, recipe.objective), state)
    assert not made_by(learner)
    world.close()


def test_without_a_compiler_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    monkeypatch.setattr("surefoot.accel.programs.compiler", lambda: None)
    with pytest.raises(SurefootError, match=r"needs a C\+\+ compiler"):
        surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", engine="compiled", **TINY)
    assert not (tmp_path / "run").exists()


def test_a_compiler_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    monkeypatch.setattr("surefoot.accel.programs.compiler", lambda: "/bin/false")
    with pytest.raises(SurefootError, match=r"^engine='compiled': /bin/false could not compile the program \(.*set engine"):
        trained("compiled", 1)


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["compiled"], indirect=True)
def test_a_program_in_the_cache_needs_no_compiler_in_memory(programs: str) -> None:
    code = (
        "import sys, surefoot\n"
        f"surefoot.train('Pendulum-v1', steps=64, engine='compiled', evaluation={{'episodes': 0}}, **{TINY | WARM!r})\n"
        "print('torch._inductor' in sys.modules, 'torch._dynamo' in sys.modules)\n"
    )
    for _ in range(2):  # the first may have to compile
        words, environment = [sys.executable, "-c", code], {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- engine = "auto" ---------------------------------------------------------------------------------------------------


def saying(lines: list[str]) -> Callable[[Event], None]:
    """A listener that keeps a run's messages."""

    def listen(event: Event) -> None:
        if isinstance(event, Message):
            lines.append(event.text)

    return listen


LONG = {
    "task": "HalfCheetah-v5",
    "steps": 1_000_000,
    "engine": "auto",
    "objective": {"reuse": {"epochs": 10, "minibatches": 32}},
}


IN_SEQUENCES = {
    "steps": 3_000_000,
    "rollout": {"environments": 8, "steps": 128},
    "objective": {"reuse": {"epochs": 10, "minibatches": 4}},
}


@pytest.mark.parametrize(
    ("changes", "engine", "reason"),
    [
        ({}, "compiled", r"156,480 updates and 1,001,472 calls of the policy save about 93 s, and compiling may take 40 s"),
        ({"steps": 100_000}, "eager", r"15,680 updates and 100,352 calls of the policy save about 9 s"),
        ({"device": "cuda"}, "eager", r"device = 'cuda' is not the CPU$"),
        (
            {"algorithm": "TRPO"},
            "compiled",
            r"156,969 updates and 1,001,472 calls of the policy save about 102 s, .* take 100 s",
        ),
        ({"algorithm": "TRPO", "steps": 900_000}, "eager", r"compiling may take 100 s"),
        ({"optimizer": {"schedule": "adaptive"}}, "eager", r"optimizer\.schedule='adaptive': a compiled step has"),
        ({"network": {"custom": "net.py:make"}}, "eager", r"network\.custom may have code that can't be compiled$"),
        ({"task": "ALE/Pong-v5", "normalise": {}}, "eager", "pictures take most of the time$"),
        ({"network": {"lstm": 64}, **IN_SEQUENCES}, "compiled", r"117,200 updates and 375,040 calls"),
        ({"network": {"lstm": 65}, **IN_SEQUENCES}, "eager", r"network\.lstm = 65 takes most of the time$"),
    ],
)
def test_auto_compiles_if_the_run_is_long_enough_to_pay_for_it(changes: dict[str, Any], engine: str, reason: str) -> None:
    rollout = {"rollout": {"environments": 1, "steps": 2048}}
    chosen, why = make_recipe({**LONG, **rollout, **changes}).engine_choice()
    assert chosen == engine
    assert re.search(reason, why), why


def test_a_run_with_auto_is_that_of_its_choice_to_the_last_bit_records_it_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    listen = saying(lines)
    settings = {"steps": 128, "seed": 3, "evaluation": {"episodes": 1}, **TINY}
    assert make_recipe({"task": "Pendulum-v1"}).engine == "auto"
    auto = surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", display=listen, **settings)
    eager = surefoot.train("Pendulum-v1", engine="eager", display=listen, **settings)
    for a, b in zip(auto.policy.parameters(), eager.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(line.startswith("engine:") for line in lines)
    assert 'engine = "eager"' in (tmp_path / "run" / "config.toml").read_text()
    monkeypatch.setattr("surefoot.recipes.control.COMPILING", 0.0)  # it would choose otherwise now
    assert surefoot.resume(tmp_path / "run", steps=256, display=listen).recipe.engine == "eager"


@pytest.fixture
def long_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every recipe that can be is compiled by "auto", with an empty cache."""
    monkeypatch.setattr("surefoot.recipes.control.COMPILING", 0.0)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, r"no C\+\+ compiler \(g\+\+ or clang\+\+\) is installed"),
        ("/bin/false", "/bin/false can't compile a small program"),
    ],
)
def test_auto_without_a_compiler_that_works_is_the_eager_run_to_the_last_bit_and_one_line(
    found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_enough: None
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("surefoot.accel.programs.compiler", lambda: found)
    settings = {"steps": 128, "seed": 3, "evaluation": {"episodes": 0}, **TINY}
    auto = surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", display=saying(lines), **settings)
    eager = surefoot.train("Pendulum-v1", engine="eager", **settings)
    for a, b in zip(auto.policy.parameters(), eager.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert re.fullmatch(rf"engine: eager \({reason}; with one, this run would be compiled, and faster\)", lines[0])
    assert 'engine = "eager"' in (tmp_path / "run" / "config.toml").read_text()
    assert "engine: eager" not in "".join(lines[1:])


@pytest.mark.parametrize(("failing", "task"), [("acting", "Pendulum-v1"), ("the update", "tensor/Pendulum-v1")])
def test_a_program_that_fails_to_compile_under_auto_is_one_line_and_the_run_goes_on_and_resumes_exactly(
    failing: str, task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_enough: None, programs: None
) -> None:
    lines: list[str] = []

    def fail(name: str, *arguments: Any) -> Any:
        if name == failing:
            raise NotCompiledError("engine='compiled': g++ could not compile the program (Full); set engine = 'eager'")
        return program_of(name, *arguments)

    for part in ("accel.passes", "control.agent", "control.collect.scoring"):
        monkeypatch.setattr(f"surefoot.{part}.program_of", fail)
    settings = {"seed": 3, "evaluation": {"episodes": 0}, "checkpoint": {"every": 64}, **TINY}
    whole = surefoot.train(task, steps=256, run_dir=tmp_path / "whole", display=saying(lines), **settings)
    assert lines.count("engine: eager from here on (g++ could not compile the program (Full))") == 1
    assert whole.recipe.engine == "eager"
    assert 'engine = "eager"' in (tmp_path / "whole" / "config.toml").read_text()
    assert json.loads((tmp_path / "whole" / "environment.json").read_text())["engine"] == "eager"
    surefoot.train(task, steps=256, run_dir=tmp_path / "cut", callback=lambda row: row["steps"] >= 128, **settings)
    resumed = surefoot.resume(tmp_path / "cut")
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_that_was_asked_to_be_compiled_and_a_resumed_one_never_change_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_enough: None, programs: None
) -> None:
    settings = {"steps": 256, "seed": 3, "evaluation": {"episodes": 0}, "checkpoint": {"every": 64}, **TINY}
    surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", callback=lambda row: row["steps"] >= 128, **settings)
    assert 'engine = "compiled"' in (tmp_path / "run" / "config.toml").read_text()
    monkeypatch.setattr("surefoot.accel.programs.compiler", lambda: None)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "none"))
    with pytest.raises(SurefootError, match=r"engine='compiled': needs a C\+\+ compiler"):
        surefoot.resume(tmp_path / "run")


def test_other_kinds_have_one_engine() -> None:
    recipe = make_recipe({"kind": "sft", "model": "pocket", "data": {"train": "x.jsonl"}, "engine": "auto"})
    assert recipe.engine_choice() == ("eager", "kind = 'sft' has no other")


def test_compiling_is_announced_before_and_after_and_loading_is_not(
    programs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    lines: list[str] = []
    for _ in range(2):
        with announced(lines.append):
            double = program_of("doubling", lambda x: (2 * x,), [torch.ones(3)], ["doubling"])
        assert double([torch.ones(3)])[0].tolist() == [2.0, 2.0, 2.0]
    assert lines[0] == "engine: compiling doubling, once for this shape; this may take a minute …"
    assert re.fullmatch(r"engine: compiled doubling in \d+ s; later runs load it from the cache", lines[1])
    assert len(lines) == 2


def test_processes_that_need_the_same_program_compile_it_once(
    programs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    compiled: list[str] = []

    def slowly(exported: Any, package_path: str) -> None:
        time.sleep(0.5)  # both are in here at once, unless one waits
        compiled.append(package_path)
        Path(package_path).write_bytes(b"library")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", slowly)
    traced, library = make_fx(lambda x: (2 * x,))(torch.ones(3)), tmp_path / "one.pt2"
    with ThreadPoolExecutor(2) as pool:  # each opens the lock's file itself, as another process does
        for done in [pool.submit(_compile, traced, [torch.ones(3)], library) for _ in range(2)]:
            done.result()
    assert len(compiled) == 1
    assert library.read_bytes() == b"library"


def test_a_lock_that_is_never_released_only_delays_the_compilation(
    programs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling, "LONGEST_WAIT", 0.1)
    monkeypatch.setattr(
        "torch._inductor.aoti_compile_and_package", lambda program, package_path: Path(package_path).write_bytes(b"library")
    )
    traced, library = make_fx(lambda x: (2 * x,))(torch.ones(3)), tmp_path / "one.pt2"
    with filelock.FileLock(library.with_suffix(".lock")):
        _compile(traced, [torch.ones(3)], library)
    assert library.read_bytes() == b"library"


def test_a_program_whose_memory_pytorch_can_not_plan_is_compiled_without_that_plan(
    programs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch 2.11 fails so on some loops. Any other error is not tried again."""
    reuse: list[bool] = []
    problem: Exception = ValueError("Start index 20 out of bounds [0, 7]")

    def fail_to_plan(exported: Any, package_path: str) -> None:
        reuse.append(torch._inductor.config.allow_buffer_reuse)
        if reuse[-1]:
            raise InductorError(problem, None)
        Path(package_path).write_bytes(b"library")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail_to_plan)
    traced, library = make_fx(lambda x: (2 * x,))(torch.ones(3)), tmp_path / "one.pt2"
    _compile(traced, [torch.ones(3)], library)
    assert reuse == [True, False]
    assert library.read_bytes() == b"library"
    problem = TypeError("another")
    with pytest.raises(NotCompiledError, match="could not compile the program"):
        _compile(traced, [torch.ones(3)], tmp_path / "two.pt2")
    assert reuse == [True, False, True]


def test_a_pytorch_that_is_too_old_for_programs_is_eager_or_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long_enough: None
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    surefoot.train("Pendulum-v1", run_dir=tmp_path / "run", steps=64, evaluation={"episodes": 0}, **TINY)
    assert 'engine = "eager"' in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(SurefootError, match=r"^engine='compiled': PyTorch 2\.9\.1.* is older than 2\.10; install a"):
        surefoot.train("Pendulum-v1", steps=64, engine="compiled", **TINY)
