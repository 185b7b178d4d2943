"""Several ranks are one run: split data, one folder, a common decision to stop, and one error."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from killing import assert_same, rows_of
from ranked import on_ranks, two_of_which_one_fails

import surefoot
from surefoot import SurefootError, demos, files
from surefoot.control.world import ControlWorld
from surefoot.core.learner import Learner
from surefoot.demos import control
from surefoot.errors import NotFiniteError
from surefoot.ranks.collectives import (
    check_same_weights,
    exchange,
    mean_over_ranks,
    on_first,
    rank,
    share,
    together,
    world_size,
)
from surefoot.ranks.launching import choose_gpu, first_host, join_ranks, launch_of
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe
from surefoot.runs import session
from surefoot.runs.display import Display
from surefoot.runs.session import saving
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.metrics import read_metrics

RECIPE = {
    "steps": 384,
    "rollout": {"environments": 3, "steps": 32},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "normalise": {"observations": True, "rewards": True},
    "evaluation": {"every": 192, "episodes": 3},
    "checkpoint": {"every": 96, "keep": 9},
    "traces": {"rows": 1},
}


def trained(run: Path, ranks: int = 2, **fields):
    """Train on some ranks; the results of all."""

    def body(_):
        agent = surefoot.train("CartPole-v1", preset="none", run_dir=run, **{**RECIPE, **fields})
        return {name: p.detach().clone() for name, p in agent.policy.named_parameters()}

    return on_ranks(ranks, body, run.with_name(f"{run.name} results"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run of two ranks, of which one has one environment and the other two, and the weights of each."""
    run = tmp_path_factory.mktemp("two") / "run"
    return run, trained(run)


def test_all_ranks_end_with_the_same_weights_and_the_first_writes_the_run(two):
    run, (first, second) = two
    assert_same(first, second)
    steps = [row["steps"] for row in rows_of(run)]
    assert steps == [96, 192, 288, 384], "the steps of both ranks together"
    saved = load_checkpoint(latest_checkpoint(run / "checkpoints"))
    assert_same({name: saved["agent"][f"policy.{name}"] for name in first}, first)


def test_the_same_seed_gives_the_same_run_of_two_ranks(two, tmp_path):
    run, _ = two
    trained(tmp_path / "again")
    assert rows_of(tmp_path / "again") == rows_of(run)
    newest = [load_checkpoint(latest_checkpoint(path / "checkpoints")) for path in (run, tmp_path / "again")]
    assert_same(*[{**parts, "manifest": None} for parts in newest])


def test_ranks_step_the_environments_of_one_process(two, tmp_path):
    """The first observation of each environment depends on the run's seed and its number, not on its rank."""
    run, _ = two
    surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "one", **RECIPE)
    states = [load_checkpoint(path / "checkpoints" / "96")["collector"] for path in (run, tmp_path / "one")]
    assert [len(state["running_return"]) for state in states] == [3, 3]
    assert [len(state["environments"]["rows"]) for state in states] == [3, 3]


def test_an_evaluation_on_two_ranks_is_that_of_one_process(two):
    run, _ = two
    for steps, row in ((192, 1), (384, 3)):
        agent = surefoot.load(run / "checkpoints" / str(steps))
        alone = surefoot.evaluate(agent, episodes=3, seed=agent.recipe.evaluation.seed)
        assert rows_of(run)[row]["evaluation_return"] == alone.mean_return


@pytest.mark.parametrize("stopped_on", [2, 3, pytest.param(1, marks=pytest.mark.release)])
def test_a_run_of_two_ranks_resumes_on_two_exactly_and_on_others_with_the_same_state(two, tmp_path, stopped_on):
    whole, _ = two
    trained(tmp_path / "run", steps=192)

    def body(_):
        agent = surefoot.resume(tmp_path / "run", steps=384)
        return {name: p.detach().clone() for name, p in agent.policy.named_parameters()}

    results = on_ranks(stopped_on, body, tmp_path / "results")
    for other in results[1:]:
        assert_same(results[0], other)
    now, before = rows_of(tmp_path / "run"), rows_of(whole)
    assert [row["steps"] for row in now] == [96, 192, 288, 384]
    assert now[0] == before[0]
    if stopped_on == 2:
        assert now == before
    else:
        assert now[2]["episodes"] >= now[1]["episodes"], "episodes continue where they were"


# ---- errors ---------------------------------------------------------------------------------------------------------


class Fragile(gymnasium.Env):
    """CartPole whose environment of one number fails at its 40th step, once a file exists: ``what`` says how."""

    def __init__(self, what: str, number: int, file: Path) -> None:
        self.inner, self.what, self.number, self.file = gymnasium.make("CartPole-v1"), what, number, file
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        self.steps, self.failed = 0, False

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed)

    def step(self, action):
        self.steps += 1
        observation, *rest = self.inner.step(action)
        if self.steps == 40 and rank() == self.number and not self.failed:
            self.failed = True
            while not self.file.exists():  # the checkpoint is written while training goes on
                time.sleep(0.01)
            if self.what == "raises":
                raise ValueError("a joint broke")
            if self.what == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            observation = np.full_like(observation, np.nan)
        return (observation, *rest)


def failing(tmp_path, what, number, **fields):
    def body(_):
        recipe = {**RECIPE, "rollout": {"environments": 2, "steps": 32}, "evaluation": {"episodes": 0}, **fields}
        recipe["checkpoint"] = {"every": 64}
        agent = surefoot.train(
            lambda: Fragile(what, number, tmp_path / "run/checkpoints/64/manifest.json"), run_dir=tmp_path / "run", **recipe
        )
        return [p.detach().clone() for p in agent.policy.parameters()]

    return two_of_which_one_fails(body, tmp_path / "results", number if what == "hangs" else None)


def test_an_environment_that_fails_on_one_rank_ends_all_with_its_message(tmp_path):
    number = 1
    results = failing(tmp_path, "raises", number)
    assert "a joint broke" in results[number]
    assert results[1 - number].startswith(f"SurefootError: rank {number}: ")
    assert "a joint broke" in results[1 - number]
    assert load_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints"))["state"]["steps"] == 64


def test_an_observation_that_is_not_finite_on_one_rank_skips_the_update_of_all(tmp_path):
    first, second = failing(tmp_path, "is not finite", 0)
    assert_same(first, second)
    assert [row["steps"] for row in rows_of(tmp_path / "run")] == [64, 128, 192, 256, 320, 384]


@pytest.mark.parametrize(("what", "number"), [("dies", 1), pytest.param("hangs", 0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_hangs_ends_the_other_with_one_message(tmp_path, what, number):
    results = failing(tmp_path, what, number)
    assert results[number] is None
    how = "has died, or did not answer" if what == "dies" else "did not answer"
    assert results[1 - number].startswith(f"RankLostError: rank {1 - number} of 2: another rank {how} in time")
    assert load_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints"))["state"]["steps"] == 64


PHASES = {
    "learning": (Learner, "update"),
    "evaluation": (ControlWorld, "evaluate"),
    "checkpoint": (session, "check_same_weights"),
    "writing": (saving, "write_snapshot"),
}
"""a function that ranks call in each phase; only the first writes"""


FAILING = [*((phase, 0, "raises") for phase in PHASES), ("learning", 1, "raises")]
FAILING += [("evaluation", 1, "dies"), ("checkpoint", 0, "dies"), ("writing", 0, "dies")]
FAILING += [pytest.param("evaluation", 0, "hangs", marks=pytest.mark.release)]


@pytest.mark.parametrize(("phase", "number", "what"), FAILING)
def test_a_rank_that_fails_in_any_phase_ends_the_other(tmp_path, monkeypatch, phase, number, what):
    place, name = PHASES[phase]
    before, calls = getattr(place, name), []

    def failing_call(*arguments):
        calls.append(name)
        if rank() == number and len(calls) == 3:
            if what == "raises":
                raise SurefootError("out of luck")
            os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)
        return before(*arguments)

    monkeypatch.setattr(place, name, failing_call)

    def body(_):
        fields = {**RECIPE, "evaluation": {"every": 96, "episodes": 2}}
        surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "run", **fields)

    results = two_of_which_one_fails(body, tmp_path / "results", number if what == "hangs" else None)
    if what == "raises":
        assert "out of luck" in results[0], "the first rank shows it"
        assert "out of luck" in results[1] or results[1].startswith("RankLostError")
    else:
        assert results[number] is None
        assert results[1 - number].startswith("RankLostError")
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name in ("96", "192")


def test_a_callback_that_stops_on_one_rank_stops_all_with_a_checkpoint(tmp_path):
    class Stopper(surefoot.Callback):
        def on_iteration(self, run, metrics):
            return rank() == 1 and metrics["steps"] >= 192

    results = on_ranks(
        2,
        lambda _: (
            surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "run", callbacks=Stopper(), **RECIPE) and rank()
        ),
        tmp_path / "results",
    )
    assert results == [0, 1]
    assert [row["steps"] for row in rows_of(tmp_path / "run")] == [96, 192]
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "192"


@pytest.mark.parametrize("when", ["while it collects", "when all have agreed to go on"])
def test_a_signal_to_a_rank_stops_all_with_a_checkpoint(tmp_path, when, monkeypatch):
    class Signal(surefoot.Callback):
        def on_iteration(self, run, metrics):
            if rank() == 1 and metrics["steps"] == 192 and when == "while it collects":
                os.kill(os.getpid(), signal.SIGTERM)

    sent = []

    def agreed(values):
        everyone = exchange(values)
        if when != "while it collects" and not sent and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return everyone

    monkeypatch.setattr(session, "exchange", agreed)

    def body(_):
        surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "run", callbacks=Signal(), **RECIPE)

    results = on_ranks(2, body, tmp_path / "results")
    assert all(result.startswith("Interrupted: stopped at step 192") for result in results)
    assert "continue with: surefoot.resume(" in results[0]
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "192"


def test_too_few_environments_for_the_ranks_are_rejected_before_the_folder_is_made(tmp_path):
    results = trained(tmp_path / "run", rollout={"environments": 1, "steps": 32})
    assert all("rollout.environments=1: too few for 2 ranks; set at least 2" in result for result in results)
    assert not (tmp_path / "run").exists()


DIFFERENT = {
    "version": "ranks: rank 1 runs surefoot 9.9, torch .*, rank 0 surefoot .*; install the same versions on all machines",
    "checkout": "ranks: rank 1 runs the code 0123, rank 0 the code .*; use the same checkout on all machines",
    "command": "ranks: rank 1 runs surefoot resume, rank 0 surefoot train; start the same command on all machines",
    "recipe": "ranks: the recipe of rank 1 differs from that of rank 0 .seed: 1 -> 2.; start all ranks with the same one",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_rejected_on_all_ranks_before_the_folder_is_made(what, tmp_path, monkeypatch):
    def body(number):
        if what == "version" and number:
            monkeypatch.setattr(surefoot, "__version__", "9.9")
        if what == "checkout" and number:
            monkeypatch.setattr(files, "package_source", lambda: "0123")
        if what == "command":
            monkeypatch.setattr(sys, "argv", ["surefoot", ("train", "resume")[number]])
        fields = {**RECIPE, "seed": 1 + (number if what == "recipe" else 0)}
        surefoot.train("CartPole-v1", preset="none", run_dir=tmp_path / "run", **fields)

    for result in on_ranks(2, body, tmp_path / "results"):
        assert re.fullmatch(f"SurefootError: {DIFFERENT[what]}", result), result
    assert not (tmp_path / "run").exists()


BATCHES = [
    ("control", {"rollout": {"environments": 1}}, "rollout.environments=1: too few for 2 ranks; set at least 2"),
    (
        "control",
        {"rollout": {"environments": 3, "steps": 4}, "objective": {"reuse": {"epochs": 1, "minibatches": 6}}},
        "objective.reuse.minibatches=6: a rank has only 4 of the rows of rollout.environments=3 on 2 ranks; set at most 4, or "
        "a larger rollout.environments",
    ),
    ("sft", {"data": {"batch": 1}}, "data.batch=1: too few for 2 ranks; set at least 2"),
    ("language", {"sampling": {"prompts": 1}}, "sampling.prompts=1: too few for 2 ranks; set at least 2"),
    (
        "language",
        {"algorithm": "GRPO", "sampling": {"prompts": 1, "samples": 4}},
        "sampling.prompts=1: too few for 2 ranks; set at least 2",
    ),
    (
        "language",
        {"sampling": {"prompts": 4}, "objective": {"reuse": {"epochs": 1, "minibatches": 4}}},
        "objective.reuse.minibatches=4: a rank has only 2 of the rows of sampling.prompts=4 on 2 ranks; set at most 2, or a "
        "larger sampling.prompts",
    ),
    (
        "language",
        {"sampling": {"prompts": 4}, "mixing": {"sft_coefficient": 1.0, "demonstrations": "d", "batch": 1}},
        "mixing.batch=1: too few for 2 ranks; set at least 2",
    ),
]


def test_a_batch_that_does_not_give_every_rank_enough_is_one_line():
    for kind, fields, message in BATCHES:
        tables = {
            "control": {"task": "CartPole-v1", "objective": {"reuse": {"epochs": 1, "minibatches": 1}}},
            "sft": {"kind": "sft", "model": "m", "data": {"train": "t"}},
            "language": {
                "kind": "language",
                "model": "m",
                "data": {"train": "t"},
                "reward": {"terms": [{"function": "f:g"}]},
                "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
            },
        }
        recipe = make_recipe(merged(tables[kind], fields))
        recipe.check_ranks(1)
        with pytest.raises(SurefootError, match=f"^{re.escape(message)}$"):
            recipe.check_ranks(2)


def merged(table, changes):
    return {**table, **{name: {**table.get(name, {}), **x} if isinstance(x, dict) else x for name, x in changes.items()}}


# ---- the exchanges themselves ---------------------------------------------------------------------------------------


def test_an_error_within_together_is_the_error_of_every_rank(tmp_path):
    def body(number):
        join_ranks()
        seen = []
        for errors in ({}, {1: SurefootError("a")}, {1: NotFiniteError("b")}, {0: NotFiniteError("c"), 2: ValueError("d")}):
            try:
                with together():
                    if number in errors:
                        raise errors[number]
                seen.append("none")
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}")
        try:
            on_first(lambda: 1 / 0)
        except Exception as error:
            seen.append(type(error).__name__)
        assert mean_over_ranks(float(number), 2 * number) == pytest.approx(5 / 3), "means weigh as many numbers as they are of"
        return [*seen, exchange(number), list(share(7)), on_first(lambda: "first")]

    first, second, third = on_ranks(3, body, tmp_path)
    named = ["none", "SurefootError: rank 1: a", "NotFiniteError: rank 1: b"]
    both, ended = "SurefootError: rank 2: ValueError: d", "SurefootError"
    everyone = [0, 1, 2]
    assert first == [*named, both, "ZeroDivisionError", everyone, [0, 1], "first"]
    assert second == ["none", "SurefootError: a", "NotFiniteError: b", both, ended, everyone, [2, 3], "first"]
    assert third == [*named, "ValueError: d", ended, everyone, [4, 5, 6], "first"]


def test_weights_that_differ_in_one_bit_are_detected_on_every_rank(tmp_path):
    def body(number):
        join_ranks()
        layer = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(layer.weight), torch.nn.init.ones_(layer.bias)
        check_same_weights(layer)
        if number == 1:
            with torch.no_grad():
                layer.bias[0] = layer.bias[0].nextafter(torch.tensor(2.0))
        check_same_weights(layer)

    assert all("the weights of rank 1 differ from those of rank 0" in result for result in on_ranks(2, body, tmp_path))


def test_code_run_on_the_first_rank_alone_sees_one_process(tmp_path):
    def body(number):
        join_ranks()
        before = rank(), world_size()
        inside = on_first(lambda: (rank(), world_size(), exchange(number), on_first(lambda: world_size())))
        return before, inside, (rank(), world_size())

    first, second = on_ranks(2, body, tmp_path)
    assert first == ((0, 2), (0, 1, [0], 1), (0, 2))
    assert second == ((1, 2), (0, 1, [0], 1), (1, 2))


def test_a_demo_on_two_ranks_is_one_run_that_the_first_evaluates(tmp_path, monkeypatch):
    short = {"steps": 512, "evaluation": {"episodes": 1}}
    monkeypatch.setattr(demos, "find_recipe", lambda name, changes: find_recipe(name, {**changes, **short}))

    def body(number):
        join_ranks()
        return demos.run_demo(control.demo(), tmp_path / "runs", 1, lambda recipe, folder: Display())

    assert len(set(map(str, on_ranks(2, body, tmp_path / "results")))) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]
    assert read_metrics(tmp_path / "runs" / "demo" / "metrics.jsonl")[-1]["steps"] == 512


def test_rank_and_world_size_are_read_from_every_launcher():
    for variables, expected in (
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1, "torchrun")),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1, "srun")),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 0, "mpirun")),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            (1, 2, 0, "mpirun"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({}, None),
    ):
        launch = launch_of(variables)
        assert (launch and (launch.rank, launch.size, launch.local_rank, launch.launcher)) == expected


def test_a_rank_uses_the_gpu_of_its_number_or_the_only_one_that_slurm_shows_it(monkeypatch):
    used = []
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    choose_gpu("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SurefootError, match="ranks: rank 1 has no GPU, this machine has 1"):
        choose_gpu("cuda")
    for name, value in (
        ("SLURM_GPUS_PER_TASK", "h100:1"),
        ("SLURM_GPUS_PER_TASK", "1"),
        ("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu=1"),
        ("SLURM_TRES_PER_TASK", "gres/gpu:1"),
        ("SLURM_GPUS_ON_NODE", "2"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            choose_gpu("cuda")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    with pytest.raises(SurefootError, match="ranks: rank 1 has no GPU"):
        choose_gpu("cuda")
    assert used == [1, 0, 0, 0, 0, 0]


def test_the_first_host_of_a_slurm_list_is_the_master_address():
    for nodes, host in (
        ("gpu[003-007,9],login", "gpu003"),
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[1,3]", "n1"),
        ("r[1-2]-ib", "r1-ib"),
    ):
        assert first_host(nodes) == host
