"""A call in a bigger program takes nothing that belongs to the process, and leaves all of it as it found it."""

import contextlib
import copy
import ctypes
import faulthandler
import io
import logging
import multiprocessing
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from runs.forked import Forked

import surefoot
from surefoot import signals
from surefoot.cli import main as cli
from surefoot.errors import Interrupted, SurefootError
from surefoot.signals import STOPPING, SignalHandler
from surefoot.store.events import Phase
from surefoot.terminal import Output, is_terminal

SMALL: dict[str, Any] = {"rollout": {"environments": 2, "steps": 32}, "objective": {"reuse": {"epochs": 1, "minibatches": 2}}}
SMALL |= {"evaluation": {"episodes": 1, "every": 128}, "display": False}


def train(steps: int = 128, **arguments: Any) -> Any:
    return surefoot.train("CartPole-v1", steps=steps, **{**SMALL, **arguments})


def weights(agent: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in agent.policy.parameters()]


def process() -> dict[str, Any]:
    """What belongs to the process."""
    every = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    loggers = [logging.getLogger(), *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    legacy: Any = np.random.get_state()  # the global generator is what is compared
    return {
        "handlers": {number: (signal.getsignal(number), signals._action(number).raw[:8]) for number in every},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timers": [signal.getitimer(kind)[1] for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "alarm is set": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "threads": (torch.get_num_threads(), [thread.name for thread in threading.enumerate()]),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "matmul": torch.get_float32_matmul_precision(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "logging": [(x.name, x.level, list(x.handlers), x.propagate, x.disabled) for x in loggers],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "generators": (torch.get_rng_state().tolist(), legacy[1].tolist(), legacy[2], random.getstate()),
        "files": sorted(os.listdir("/proc/self/fd")),
        "children": [child.pid for child in psutil.Process().children()],
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, threading.excepthook),
        "path": list(sys.path),
    }


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An agent: what is imported and opened once per process is there."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    agent = train(run_dir=folder)
    surefoot.resume(folder, steps=256, display=False)
    surefoot.evaluate(agent, episodes=1)
    return agent


@pytest.fixture
def program() -> Iterator[None]:
    """A program with settings of its own, all of which differ from Python's and PyTorch's."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)}
    left = signal.setitimer(signal.ITIMER_REAL, 300.0, 7.0)
    for number in before:
        signal.signal(number, lambda number, frame: heard.append(number))
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield
    torch.set_float32_matmul_precision("highest")
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    faulthandler.unregister(signal.SIGUSR2)
    signal.setitimer(signal.ITIMER_REAL, *left)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(metrics: dict[str, Any]) -> None:
    signal.raise_signal(signal.SIGINT)


def fail(metrics: dict[str, Any]) -> None:
    raise SurefootError("callback: fails")


def in_the_folder(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "train": lambda: train(),
        "train in a folder": lambda: train(run_dir=folder / "run"),
        "resume": lambda: surefoot.resume(folder / "run", steps=256, display=False),
        "evaluate": lambda: surefoot.evaluate(folder / "run", episodes=2),
        "interrupt": lambda: train(callback=interrupt),
        "error": lambda: train(run_dir=folder / "failed", callback=fail),
        "bad input": lambda: train(steps=-1),
    }


def test_a_call_leaves_the_process_as_it_found_it(warm: Any, program: None, tmp_path: Path) -> None:
    for name, call in in_the_folder(tmp_path).items():
        before = process()
        with contextlib.suppress(SurefootError, Interrupted):
            call()
        after = process()
        assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}, name


def test_the_modes_of_the_program_change_no_weight(warm: Any, request: pytest.FixtureRequest) -> None:
    plain = train()
    request.getfixturevalue("program")
    ours = train()
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(ours), strict=True))
    with torch.inference_mode():
        ours = train()
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(ours), strict=True))


# ---- signals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", sorted(STOPPING - {signal.SIGINT, signal.SIGTERM}))
def test_every_signal_that_is_sent_to_stop_a_program_asks_a_run_to_stop_unless_it_is_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with SignalHandler() as handler:
            signal.raise_signal(number)
            assert handler.stop_requested
        assert signal.signal(number, signal.SIG_IGN) is signal.SIG_DFL
        with SignalHandler() as handler:
            signal.raise_signal(number)
            assert not handler.stop_requested
    finally:
        signal.signal(number, before)


def test_only_signals_that_insist_stop_at_once_when_they_come_again() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with SignalHandler():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)  # a closed terminal sends it twice
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted, match="stopped at once"):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_iteration_that_takes_too_long_is_ended_without_the_timer_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.2)
    left = signal.setitimer(signal.ITIMER_REAL, 300.0)
    try:
        with SignalHandler():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted, match=r"took over 0.2 s"):
                time.sleep(60)
        assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] < 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)


def test_a_handler_of_the_program_is_called_when_the_run_has_ended() -> None:
    heard: list[bool] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(inside))
    try:
        inside = True
        with SignalHandler() as outer:
            with SignalHandler() as inner:
                signal.raise_signal(signal.SIGTERM)
            assert (inner.stop_requested, outer.stop_requested, heard) == (True, True, [])
            inside = False
        assert heard == [False]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_handler_of_c_code_is_left_alone(number: int) -> None:
    """As in a program that embeds Python: Python does not know the handler, and could not give it back."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = signal.signal(number, signal.SIG_DFL)
    own = libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))
    try:
        assert signals.is_foreign(number)
        ours = signals._action(number).raw[:8]
        with SignalHandler() as handler:
            assert number not in handler._give_back
        assert signals._action(number).raw[:8] == ours
    finally:
        libc.signal(number, own)
        signal.signal(number, before)


def test_a_closed_terminal_saves_the_run_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the shell send one SIGHUP each, and nothing can be written to the terminal any more."""
    words = ["train", "CartPole-v1", "--steps", "60000", "--run-dir", str(tmp_path / "run"), "--evaluation.episodes", "0"]
    monkeypatch.setattr(sys, "argv", ["surefoot", *words, "--checkpoint-every", "1000000"])
    primary, secondary = os.openpty()

    def body() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.stdout = open(os.dup(secondary), "w")  # noqa: SIM115
        for end in (primary, secondary):
            os.close(end)
        cli.main()

    child = Forked(body, tmp_path)
    os.close(secondary)
    rows = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 100
    while not (rows.exists() and rows.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.close(primary)
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGHUP)
    _, _, err = child.finish()
    assert "stopped at step" in err
    assert len(list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))) == 1


def test_what_was_trained_is_in_the_exception_that_ends_a_run() -> None:
    with pytest.raises(Interrupted, match="attribute result") as stopped:
        train(callback=interrupt)
    assert surefoot.evaluate(stopped.value.result, episodes=1).episodes == 1
    with pytest.raises(SurefootError, match="fails") as failed:
        train(callback=fail)
    assert isinstance(failed.value.result, surefoot.Agent)


# ---- streams ----------------------------------------------------------------------------------------------------------------


class WriteOnly:
    def write(self, text: str) -> None:
        pass


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("main thread is not in main loop")

    def isatty(self) -> bool:
        raise OSError(5, "Input/output error")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, WriteOnly, Broken, closed], ids=["none", "write only", "broken", "closed"])
def test_a_run_survives_any_stream(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    assert not is_terminal(stream)
    assert Output(stream).write("text") == 4
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    for display in (None, True):
        train(steps=64, display=display)


def test_only_one_function_asks_whether_a_stream_is_a_terminal() -> None:
    source = Path(surefoot.__file__).parent
    assert [path.name for path in source.rglob("*.py") if ".isatty()" in path.read_text("utf-8")] == ["terminal.py"]


# ---- agents in other places -------------------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    """A network that is passed as an object."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * observation)


def act(agent: Any, results: Any) -> None:
    observations = np.linspace(-0.1, 0.1, 64).reshape(16, 4)
    results.put([agent.predict(observations)[0].tolist(), agent.value(observations).tolist()])


@pytest.mark.parametrize("network", [{}, {"custom": Doubled}, {"lstm": 4}], ids=["plain", "custom", "lstm"])
def test_an_agent_passes_through_pickle_and_copy_with_its_next_sample(network: dict[str, Any]) -> None:
    agent = train(steps=64, network=network, normalise={"observations": True, "rewards": True})
    agent.predict(np.zeros(4))
    for again in (pickle.loads(pickle.dumps(agent)), copy.deepcopy(agent), copy.copy(agent)):
        ours, theirs = queue.Queue[Any](), queue.Queue[Any]()
        state = agent.generator.get_state()
        act(agent, ours)
        agent.generator.set_state(state)
        act(again, theirs)
        assert ours.get() == theirs.get()
        assert (again.recipe, again.training, again.masked) == (agent.recipe, agent.training, agent.masked)
        parts = zip(agent.state_dict().items(), again.state_dict().items(), strict=True)
        assert all(name == same and torch.equal(one, other) for (name, one), (same, other) in parts)


def test_an_agent_is_an_argument_of_a_process_and_of_threads(warm: Any) -> None:
    """A spawned process takes it as a forkserver's does, the default of Python 3.14: by the pickles of multiprocessing."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    agent = copy.deepcopy(warm)
    child = context.Process(target=act, args=(agent, results))
    child.start()
    there = results.get()
    child.join(60)
    here = queue.Queue[Any]()
    act(agent, here)
    assert there == here.get()
    greedy = partial(warm.predict, np.linspace(-0.1, 0.1, 64).reshape(16, 4), deterministic=True)
    with ThreadPoolExecutor(4) as threads:
        assert len({tuple(future.result()[0]) for future in [threads.submit(greedy) for _ in range(20)]}) == 1


# ---- arguments --------------------------------------------------------------------------------------------------------------


def test_an_argument_of_another_type_is_one_line(warm: Any, tmp_path: Path) -> None:
    """Not another value: the text "False" would count as true, and True as one episode."""
    for message, call in (
        ("episodes=True: must be a whole number of at least 1", lambda: surefoot.evaluate(warm, episodes=True)),
        ("episodes=0: must be a whole number of at least 1", lambda: surefoot.evaluate(warm, episodes=0)),
        ("seed=False: must be a whole number", lambda: surefoot.evaluate(warm, seed=False)),
        ("seed=-1: must be a whole number of at least 0", lambda: surefoot.evaluate(warm, seed=-1)),
        ("rows=3: this is an agent, evaluated over episodes; leave it out", lambda: surefoot.evaluate(warm, rows=3)),  # type: ignore[call-overload]
        ("3: is not an agent, model or run; load one with", lambda: surefoot.evaluate(3)),  # type: ignore[call-overload]
        ("run_dir=3: must be the path of a folder", lambda: train(run_dir=3)),
        ("run_dir=3: must be the path of a folder", lambda: surefoot.resume(3)),  # type: ignore[arg-type]
        ("folder=3: must be the path of a folder", lambda: surefoot.load(3)),  # type: ignore[arg-type]
        ("deterministic='False': must be True or False", lambda: surefoot.evaluate(warm, deterministic="False")),  # type: ignore[call-overload]
        ("deterministic='no': must be True or False", lambda: warm.predict(np.zeros(4), deterministic="no")),
        ("profile='False'", lambda: train(profile="False")),
        ("display='False'", lambda: train(display="False")),
        ("allow_changes='False'", lambda: surefoot.resume(tmp_path, allow_changes="False")),  # type: ignore[arg-type]
        ("trust_remote_code='False'", lambda: surefoot.load(tmp_path, trust_remote_code="False")),  # type: ignore[arg-type]
        ("folder=None: must be the path of a folder", lambda: warm.save(None)),
    ):
        with pytest.raises(SurefootError, match=message):
            call()


def test_a_recipe_is_a_path_and_an_evaluation_has_its_checkpoint(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('task = "CartPole-v1"\nsteps = 64\nrollout = {environments = 2, steps = 32}\n')
    surefoot.train(recipe, run_dir=tmp_path / "run")
    result = surefoot.evaluate(tmp_path / "run", episodes=1)
    assert Path(str(result.checkpoint)).name == "64"


def test_errors_are_in_the_words_of_whoever_called(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    folder = tmp_path / "a run"
    train(steps=64, run_dir=folder)
    for call, here, there in (
        (lambda: train(run_dir=folder), f"continue it with: surefoot.resume('{folder}'); or choose another run_dir", "--name"),
        (lambda: surefoot.resume(folder), "extend it with steps above 64", "--steps"),
    ):
        with pytest.raises(SurefootError) as caught:
            call()
        assert here in str(caught.value)
        assert there not in str(caught.value)
    assert "extend it with --steps above 64" in command("resume", str(folder))[2]
    with pytest.raises(Interrupted, match=r"continue with: surefoot.resume\('"):
        train(run_dir=tmp_path / "stopped", callback=interrupt)


# ---- systems ----------------------------------------------------------------------------------------------------------------


def test_windows_is_rejected_in_one_sentence_at_import() -> None:
    program = "import sys; sys.platform = 'win32'; import surefoot"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: surefoot runs on Linux and macOS, not on Windows; ")


def test_a_first_signal_during_an_evaluation_is_acknowledged_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """With what the run waits for; it ends with the step."""
    seen: list[str] = []

    class Slow(CartPoleEnv):
        def step(self, action: Any) -> Any:
            if "evaluating" in seen:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.6)
                seen.append(capfd.readouterr().err)
            return super().step(action)

    def phase(event: Any) -> None:
        if isinstance(event, Phase) and event.text.startswith("evaluating"):
            seen.append("evaluating")

    with pytest.raises(Interrupted, match="stopped at step 64; a run without run_dir"):
        surefoot.train(Slow, steps=64, rollout={"environments": 2, "steps": 32}, display=phase, evaluation={"episodes": 1})
    assert seen[1].startswith("stopping after this step of the evaluation, within 25 s; Ctrl-C again to quit at once"), seen
