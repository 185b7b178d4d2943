"""Worker processes: the same steps to the last bit, and every failure is reported and cleaned up."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from forked import left_of

import surefoot
from surefoot import Interrupted, SurefootError
from surefoot.control.environments import make_environments
from surefoot.control.environments.looped import Environments, Step, episode_seed
from surefoot.control.environments.slices import concatenate
from surefoot.control.environments.workers import WorkerEnvironments
from surefoot.control.spaces import BARE
from surefoot.core.seeding import fingerprint
from surefoot.diagnostics.metrics import TIMING
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint

from .misbehaving import Misbehaving, Odd, Parts, vector

SEED = 7
TESTS = Path(__file__).parent.parent


def in_workers(task: Any, count: int, workers: int, deadline: float = 60.0, **arguments: Any) -> WorkerEnvironments:
    return WorkerEnvironments(task, arguments, count, SEED, workers, deadline)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test no worker process is left."""
    yield
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        assert not [pid for pid in file.read().split() if b"worker:serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return np.array_equal(a, b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)


def assert_same_steps(a: Environments, b: Environments, steps: int, active: Callable[[int], Any] = lambda t: None) -> Step:
    generator = np.random.default_rng(0)
    for t in range(steps):
        actions = generator.integers(0, 2, a.count)
        first, second = a.step(actions, active(t)), b.step(actions, active(t))
        for field in fields(Step):
            assert same(getattr(first, field.name), getattr(second, field.name)), (t, field.name)
    return first


# ---- the same ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "pipes"])
def test_the_same_seed_gives_the_same_steps_whatever_the_number_of_workers_and_states_move_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Also with only some environments active, after a restart, and from a checkpoint of another number of workers."""
    if not shared:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    task, arguments, some = "CartPole-v1", {"max_episode_steps": 20}, np.array([True, False, True, False, False])
    loop = make_environments(task, arguments, 5, SEED)
    two = in_workers(task, 5, 2, **arguments)
    try:
        assert same(loop.reset(), two.reset())
        last = assert_same_steps(loop, two, 60)
        assert (two._arrays is not None) == (shared and sys.platform == "linux")
        assert last.scores is not None
        assert loop.restart(3)[1] == two.restart(3)[1] == [3]
        assert_same_steps(loop, two, 10, lambda t: some if t % 2 else None)
        assert fingerprint(loop.state_dict()) == fingerprint(two.state_dict())
        save_checkpoint(tmp_path / "state", {"environments": two.state_dict()})
        expected = loop.step(np.ones(5, int)).observations
    finally:
        two.close()
    state = load_checkpoint(tmp_path / "state")["environments"]
    three, alone = in_workers(task, 5, 3, **arguments), make_environments(task, arguments, 5, SEED)
    try:
        for again in (three, alone):
            _, lost = again.load_state_dict(state)
            assert lost == {}
            assert same(again.step(np.ones(5, int)).observations, expected)
        assert_same_steps(three, loop, 30)
        assert loop.first == 0
        with pytest.raises(SurefootError, match=r"rollout.environments=5: the checkpoint has 4 environments"):
            three.load_state_dict({"rows": state["rows"][:4]})
    finally:
        three.close()


def test_parts_and_masks_come_back_through_shared_memory_as_from_one_process_and_stay() -> None:
    loop, two = make_environments(Parts, {}, 3, SEED), in_workers(Parts, 3, 2)
    try:
        assert same(loop.reset(), two.reset())
        expected, kept = ([each.step(np.zeros(3, int)) for _ in range(6)] for each in (loop, two))
        assert (two._arrays is not None) == (sys.platform == "linux")
        assert {"action_mask", "rewards"} < kept[0].observations.keys()
        for theirs, ours in zip(expected, kept, strict=True):  # later steps did not change what earlier ones returned
            for field in fields(Step):
                assert same(getattr(theirs, field.name), getattr(ours, field.name)), field.name
    finally:
        two.close()


def test_a_mask_that_only_some_workers_return_is_one_line() -> None:
    with pytest.raises(SurefootError, match="action_mask: only some environments return it"):
        concatenate([{BARE: np.zeros(1)}, {BARE: np.zeros(1), "action_mask": np.ones((1, 2), bool)}])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")
@pytest.mark.parametrize("failure", ["killed", "interrupted"])
def test_a_failure_while_memory_is_shared_ends_the_workers_and_leaves_no_open_file(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = in_workers("CartPole-v1", 4, 2)
    environments.reset()
    send = multiprocessing.reduction.send_handle
    first, second = environments._workers

    def kill_first(connection: Any, handle: int, pid: int | None) -> None:
        if failure == "interrupted" and pid == second.child.process.pid:
            raise KeyboardInterrupt
        if failure == "killed":
            first.child.process.kill()
            first.child.process.wait()
        send(connection, handle, pid)

    monkeypatch.setattr(multiprocessing.reduction, "send_handle", kill_first)
    error, message = (
        (KeyboardInterrupt, None) if failure == "interrupted" else (SurefootError, r"SIGKILL.* between two calls; ")
    )
    with pytest.raises(error, match=message):
        environments.step(np.zeros(4, int))
    assert environments._arrays is None
    assert not any(worker.child.process.returncode is None for worker in environments._workers)
    names = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not any("memfd:surefoot" in name for name in names)


def test_final_observations_and_lost_environments_are_counted_from_the_first_of_all() -> None:
    environments = in_workers("CartPole-v1", 4, 2, max_episode_steps=2)
    try:
        environments.reset()
        environments.step(np.zeros(4, int))
        step = environments.step(np.zeros(4, int))
        assert step.truncated.all()
        assert sorted(step.final_observations) == [0, 1, 2, 3]
        environments.step(np.zeros(4, int))
        state = environments.state_dict()
        for row in (1, 3):
            state["rows"][row]["hashes"]["observations"] = "0" * 64
        assert environments.load_state_dict(state)[1] == dict.fromkeys((1, 3), "episode 1 had other observations")
    finally:
        environments.close()


def test_a_run_learns_the_same_in_workers_as_in_one_process() -> None:
    def rows(**rollout: Any) -> list[Any]:
        seen: list[Any] = []
        fields = {**RUN, "steps": 192, "evaluation": {"episodes": 1, "every": 128}}
        fields["rollout"] = {"environments": 4, "steps": 16, **rollout}
        surefoot.train("CartPole-v1", callback=lambda row: seen.append(dict(row)), **fields)
        return [{k: v for k, v in row.items() if k not in TIMING} for row in seen]

    assert rows() == rows(backend="workers", workers=2)


def test_environments_are_spread_as_evenly_as_can_be_over_at_most_as_many_processes() -> None:
    environments = in_workers(Misbehaving, 3, 2)
    assert [worker.count for worker in environments._workers] == [2, 1]
    environments.close()
    environments.close()


def test_an_id_that_was_registered_by_hand_is_known_to_the_workers() -> None:
    gymnasium.register("ByHand-v0", entry_point=Misbehaving)
    try:
        environments = in_workers("ByHand-v0", 1, 1)
        observations = environments.reset()
        environments.close()
        assert observations[BARE].shape == (1, *Misbehaving.observation_space.shape)
    finally:
        del gymnasium.registry["ByHand-v0"]


def test_a_worker_needs_no_torch() -> None:
    command = "import sys, surefoot.control.environments.workers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


# ---- what goes wrong --------------------------------------------------------------------------------------------------


def go_on(environments: Environments) -> None:
    environments.reset()
    for _ in range(9):
        environments.step(np.zeros(environments.count, int))


@pytest.mark.parametrize(
    ("how", "at", "message"),
    [
        ("raises", 2, "raised RuntimeError: the wheels came off in step(), episode 1, step 2;"),
        ("unpicklable", 0, "raised Unpicklable: holds a lock in reset(), episode 1, step 0;"),
        ("speechless", 1, "raised Speechless: (its message can't be shown) in step(), episode 1, step 1;"),
        ("exits", 2, "raised SystemExit: 3 in step(), episode 1, step 2;"),
        ("interrupts", 0, "raised KeyboardInterrupt in reset(), episode 1, step 0;"),
        ("leaves", 2, "ended its worker process (exit code 7) in step(), episode 1, step 2;"),
        ("segfaults", 2, "ended its worker process (SIGSEGV) in step(), episode 1, step 2;"),
        ("is killed", 0, "ended its worker process (SIGKILL, perhaps out of memory) in reset(), episode 1, step 0;"),
        ("sleeps", 1, "did not return within 3 s (rollout.deadline) in step(), episode 1, step 1;"),
    ],
)
def test_a_worker_that_fails_is_named_with_environment_episode_step_and_cause(how: str, at: int, message: str) -> None:
    workers = 2 if how in ("raises", "segfaults", "sleeps") else 1
    deadline = 3.0 if how == "sleeps" else 60.0
    environments = in_workers(Misbehaving, 3, workers, deadline, how=how, at=at, doom=episode_seed(SEED, 2, 1))
    pids = [worker.child.process.pid for worker in environments._workers]
    started = time.monotonic()
    with pytest.raises(SurefootError) as caught:
        go_on(environments)
    line = str(caught.value)
    fix = r"fix the environment \(misbehaving\.py:\d+\)" if "raised" in message else "fix the environment"
    expected = rf"Misbehaving: environment 2 {re.escape(message)} {fix}, then resume with --allow-changes"
    assert re.fullmatch(expected, line), line
    assert time.monotonic() - started < 50
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if how in ("raises", "exits"):
        assert "misbehaving.py" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_slow_environment_is_accepted_if_each_call_returns_in_time() -> None:
    environments = in_workers(Misbehaving, 4, 1, 1.0, how="dawdles", doom=None, at=0)
    started = time.monotonic()
    environments.reset()
    assert time.monotonic() - started > 2
    environments.close()


def test_a_worker_that_is_killed_between_two_steps_is_reported_as_killed() -> None:
    environments = in_workers(Misbehaving, 3, 2)
    environments.reset()
    os.kill(environments._workers[0].child.process.pid, signal.SIGKILL)
    message = r"Misbehaving: environments 0 to 1 ended their worker process \(SIGKILL.*\) between two calls"
    with pytest.raises(SurefootError, match=message):
        environments.step(np.zeros(3, int))


def test_what_can_not_be_made_in_a_worker_is_a_one_line_error() -> None:
    with pytest.raises(SurefootError, match=r"task='Misbehaving': could not be made \(SystemExit: 5\); fix it \(misbeh"):
        in_workers(Misbehaving, 2, 1, how="while made")
    with pytest.raises(SurefootError, match=r"task='Misbehaving': could not be made \(TypeError"):
        in_workers(Misbehaving, 1, 1, wheels=3)
    with pytest.raises(SurefootError, match=r"task='vector': makes a vector environment.*rollout.backend = 'loop'"):
        in_workers(vector, 2, 1)
    with pytest.raises(SurefootError, match=r"task='<lambda>': can't be sent to a worker process .*module:function"):
        in_workers(lambda: Misbehaving(), 1, 1)


def test_a_signal_while_workers_start_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_and_signal(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    def stop(number: int, frame: object) -> None:
        raise Interrupted("stopped")

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Interrupted):
            in_workers("CartPole-v1", 2, 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode is not None for process in started] == [True]


def test_a_run_that_is_rejected_leaves_no_process_behind() -> None:
    with pytest.raises(SurefootError, match=r"observation space Text.* not supported"):
        surefoot.train(Odd, steps=64, rollout={"backend": "workers", "workers": 1, "environments": 1})


# ---- runs -------------------------------------------------------------------------------------------------------------

RUN = {
    "steps": 512,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 1, "minibatches": 1}},
    "checkpoint": {"every": 64},
    "evaluation": {"episodes": 0},
}
WORKERS = {"rollout": {**RUN["rollout"], "backend": "workers", "workers": 2}}  # type: ignore[dict-item]


def test_a_crash_in_the_middle_of_a_run_leaves_its_checkpoint_from_which_it_goes_on_exactly(tmp_path: Path) -> None:
    fuse = tmp_path / "fuse"
    fuse.touch()
    trouble = {"how": "segfaults", "doom": episode_seed(1, 3, 20), "at": 1, "fuse": str(fuse)}
    fields = {**RUN, "environment": trouble}
    with pytest.raises(SurefootError, match=r"environment 3 ended .*SIGSEGV.*episode 20, step 1; .*resume with allow_changes"):
        surefoot.train(Misbehaving, "PPO_CLIP", run_dir=tmp_path / "crashed", **{**fields, **WORKERS})
    assert len(list((tmp_path / "crashed" / "checkpoints").iterdir())) == 2
    fuse.unlink()
    resumed = surefoot.resume(tmp_path / "crashed", task=Misbehaving)
    whole = surefoot.train(Misbehaving, "PPO_CLIP", **fields)
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert np.array_equal(mine.detach().numpy(), theirs.detach().numpy())


def interrupted(folder: Path) -> None:
    """Train in a process group of its own, which gets a signal in the second iteration."""
    os.setpgid(0, 0)

    def once(row: dict[str, Any]) -> None:
        if row["iteration"] == 2:
            os.killpg(0, signal.SIGINT)

    with pytest.raises(surefoot.Interrupted, match="stopped at step 128; continue with"):
        surefoot.train("CartPole-v1", run_dir=folder, callback=once, **{**RUN, **WORKERS})
    (folder / "in order").touch()


def test_a_signal_to_the_whole_group_reaches_the_workers_too_and_the_run_stops_in_order(tmp_path: Path) -> None:
    """A terminal sends its Ctrl-C so, and some systems their SIGTERM."""
    child = multiprocessing.get_context("fork").Process(target=interrupted, args=(tmp_path / "run",))
    child.start()
    child.join()
    assert (tmp_path / "run" / "in order").exists()
    assert (tmp_path / "run" / "checkpoints" / "128").exists()


def run_python(text: str, folder: Path, name: str = "script.py") -> "subprocess.CompletedProcess[str]":
    """In a process of its own, with a file as its main module."""
    (folder / name).write_text(textwrap.dedent(text))
    places = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places}
    return subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


def test_workers_end_when_their_parent_is_killed_even_the_one_that_hangs(tmp_path: Path) -> None:
    text = """
        import os, signal, threading, time
        import numpy as np
        from control.misbehaving import Misbehaving
        from surefoot.control.environments.workers import WorkerEnvironments
        how = {"how": "spins", "doom": DOOM, "at": 1}
        environments = WorkerEnvironments(Misbehaving, how, 2, SEED, 2, 60)
        print(*[worker.child.process.pid for worker in environments._workers], flush=True)
        environments.reset()
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        environments.step(np.zeros(2, int))
    """.replace("DOOM", str(episode_seed(SEED, 1, 0))).replace("SEED", str(SEED))
    done = run_python(text, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert left_of(pids) == []


OWN = """
    import gymnasium
    import numpy as np
    from surefoot.control.environments.workers import WorkerEnvironments
    class Own(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}
    def go(task):
        print("began")
        environments = WorkerEnvironments(task, {}, 1, 1, 1, 60)
        print(environments.reset()["observation"].shape)
"""


def test_a_script_may_define_its_environment_where_its_main_part_is_guarded(tmp_path: Path) -> None:
    done = run_python(OWN + "    if __name__ == '__main__':\n        go(Own)\n", tmp_path)
    assert (done.stdout, done.stderr) == ("began\n(1, 2)\n", "")


def test_a_script_without_a_guard_is_an_error_only_if_a_worker_must_import_it(tmp_path: Path) -> None:
    done = run_python(OWN + "    go('CartPole-v1')\n    go(Own)\n", tmp_path)
    assert done.stdout.startswith("began\n(1, 4)\nbegan\n")
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


def test_an_environment_that_no_other_process_can_import_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    text = textwrap.dedent(OWN) + "go(Own)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    line = next(line for line in done.stderr.splitlines() if "can't be imported by a worker process" in line)
    assert "its own module" in line
