"""Callbacks get every event of a run with the agent and the state; their changes are kept, and their errors are raised."""

import math
import os
import signal

import pytest
from killing import rows_of

import surefoot
from surefoot import Callback, Interrupted, SurefootError
from surefoot.control.world import ControlWorld
from surefoot.runs.session.saving import Saver

FIELDS = {
    "steps": 512,
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 2, "minibatches": 1}},
    "optimizer": {"schedule": "constant", "learning_rate": 1e-3},
    "evaluation": {"episodes": 1, "every": 256},
    "checkpoint": {"every": 256},
    "traces": {"rows": 0},
}


class Diary(Callback):
    def __init__(self):
        self.lines = []

    def on_start(self, run):
        self.lines.append(("start", run.steps))

    def on_evaluation(self, run, report):
        self.lines.append(("evaluation", run.steps, report.score))

    def on_iteration(self, run, metrics):
        assert run.metrics is metrics
        self.lines.append(("iteration", run.steps))

    def on_checkpoint(self, run, path):
        self.lines.append(("checkpoint", run.steps, int(path.name)))

    def on_end(self, run):
        self.lines.append(("end", run.steps, run.failed))


def train(tmp_path, *callbacks, **fields):
    return surefoot.train("CartPole-v1", run_dir=tmp_path / "run", callbacks=list(callbacks), **{**FIELDS, **fields})


def test_several_callbacks_get_all_events_in_order(tmp_path):
    first, second = Diary(), Diary()
    train(tmp_path, first, second)
    assert first.lines == second.lines
    assert first.lines[:2] == [("start", 0), ("iteration", 64)]
    assert [line[0] for line in first.lines[4:6]] == ["evaluation", "iteration"]
    assert [line[2] for line in first.lines if line[0] == "checkpoint"] == [256, 512]
    assert first.lines[-2:] == [("checkpoint", 512, 512), ("end", 512, False)]
    assert sum(line[0] == "iteration" for line in first.lines) == 8


class Named(Callback):
    """Notes its name at each event."""

    def __init__(self, name, calls):
        self.on_start = self.on_evaluation = self.on_iteration = self.on_checkpoint = self.on_end = lambda *_: calls.append(
            name
        )


def test_callbacks_are_called_in_their_order_at_every_event_and_all_at_the_end(tmp_path):
    calls = []
    train(tmp_path, Named("a", calls), Named("b", calls), steps=64)
    assert calls == ["a", "b"] * 5, "start, evaluation, iteration, checkpoint, end"


def test_a_run_whose_export_fails_has_failed(tmp_path, monkeypatch):
    def finish(world, folder):
        raise SurefootError("the disk is full")

    monkeypatch.setattr(ControlWorld, "finish", finish)
    diary = Diary()
    with pytest.raises(SurefootError, match="the disk is full"):
        train(tmp_path, diary)
    assert diary.lines[-1] == ("end", 512, True)


def test_a_run_that_is_interrupted_while_it_waits_for_its_last_checkpoint_ends_for_every_listener(tmp_path, monkeypatch):
    """Otherwise their threads, processes and files would stay."""
    close = Saver.close

    def interrupted(saver):
        close(saver)
        raise KeyboardInterrupt

    monkeypatch.setattr(Saver, "close", interrupted)
    diary = Diary()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, diary)
    assert diary.lines[-1][:2] == ("end", 512)


@pytest.mark.parametrize("signals", [1, 2], ids=["after the iteration", "at once"])
def test_a_run_that_a_signal_stopped_has_not_failed(tmp_path, signals):
    class Stopping(Diary):
        def on_iteration(self, run, metrics):
            super().on_iteration(run, metrics)
            if run.steps == 128:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGTERM)

    diary = Stopping()
    with pytest.raises(Interrupted):
        train(tmp_path, diary)
    assert diary.lines[-1] == ("end", 128, False)


def test_a_callback_evaluates_saves_and_logs_with_the_agent_at_hand(tmp_path):
    class Own(Callback):
        def on_iteration(self, run, metrics):
            if run.steps % 256 == 0:
                result = surefoot.evaluate(run.agent, episodes=2, seed=5)
                run.log({"my_return": result.mean_return, "my_nan": math.nan})
                run.agent.save(run.folder / f"mine-{run.steps}")

    train(tmp_path, Own())
    rows = rows_of(tmp_path / "run")
    assert [row["steps"] for row in rows if "my_return" in row] == [256, 512]
    assert rows[-1]["my_nan"] is None
    saved = surefoot.load(tmp_path / "run" / "mine-512")
    assert surefoot.evaluate(saved, episodes=2, seed=5).mean_return == rows[-1]["my_return"]


def test_callbacks_that_only_read_change_no_number_of_a_run(tmp_path):
    class Looking(Diary):
        def on_iteration(self, run, metrics):
            surefoot.evaluate(run.agent, episodes=1)

    train(tmp_path, Looking())
    surefoot.train("CartPole-v1", run_dir=tmp_path / "plain", **FIELDS)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "plain")


class Slower(Callback):
    """Halves the learning rate at one step, then stops where it should."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at

    def on_iteration(self, run, metrics):
        if run.steps == 128:
            run.learning_rate = run.learning_rate / 2
        return run.steps == self.stop_at


def test_a_changed_learning_rate_holds_from_the_next_update_on_and_in_a_resumed_run(tmp_path):
    surefoot.train("CartPole-v1", run_dir=tmp_path / "whole", callbacks=Slower(), **FIELDS)
    train(tmp_path, Slower(stop_at=256))
    surefoot.resume(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["learning_rate"] for row in rows] == [1e-3] * 2 + [5e-4] * 6
    assert rows == rows_of(tmp_path / "whole")


@pytest.mark.parametrize("value", [0, math.inf, math.nan])
def test_an_invalid_learning_rate_is_an_error(tmp_path, value):
    class Wrong(Callback):
        def on_start(self, run):
            run.learning_rate = value

    with pytest.raises(SurefootError, match=r"learning_rate=.*: must be a finite number above 0"):
        train(tmp_path, Wrong())


@pytest.mark.parametrize(("event", "how"), [("on_evaluation", "return"), ("on_evaluation", "stop"), ("on_iteration", "return")])
def test_true_or_stop_ends_the_run_after_its_iteration_with_a_checkpoint(tmp_path, event, how):
    class Stopping(Callback):
        pass

    def act(self, run, what):
        if run.steps < 256:
            return None
        return True if how == "return" else run.stop()

    setattr(Stopping, event, act)
    train(tmp_path, Stopping())
    assert rows_of(tmp_path / "run")[-1]["steps"] == 256
    assert (tmp_path / "run" / "checkpoints" / "256").is_dir()
    surefoot.resume(tmp_path / "run")
    assert rows_of(tmp_path / "run")[-1]["steps"] == 512


@pytest.mark.parametrize("event", ["on_start", "on_iteration", "on_checkpoint", "on_end"])
def test_an_exception_is_raised_unchanged_and_the_run_resumes_exactly(tmp_path, event):
    class Broken(Callback):
        pass

    def fail(self, run, *rest):
        if event in ("on_start", "on_end") or run.steps >= 256:
            raise LookupError("mine")  # not an error of Surefoot

    setattr(Broken, event, fail)
    other = Diary()
    with pytest.raises(LookupError, match=r"^mine$"):
        train(tmp_path, Broken(), other)
    assert other.lines[-1][0] == "end"
    assert other.lines[-1][2] is (event != "on_end")
    if event == "on_end":
        return
    surefoot.resume(tmp_path / "run")
    surefoot.train("CartPole-v1", run_dir=tmp_path / "plain", **FIELDS)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "plain")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"policy_loss": 1.0}, "log: 'policy_loss' is a metric of the run itself; choose another name"),
        ({"mood": "good"}, "log: mood='good' is not a number; log numbers, or None"),
    ],
)
def test_a_value_that_can_not_be_logged_is_an_error(value, message, tmp_path):
    class Logging(Callback):
        def on_iteration(self, run, metrics):
            run.log(value)

    with pytest.raises(SurefootError, match=message):
        train(tmp_path, Logging())


def test_an_invalid_callback_is_rejected_before_the_folder_is_made(tmp_path):
    for value in (Diary, [print], 3):
        with pytest.raises(SurefootError, match=r"callbacks=.*: is not a callback; give objects of classes that inherit"):
            surefoot.train("CartPole-v1", run_dir=tmp_path / "run", callbacks=value, **FIELDS)
        assert not (tmp_path / "run").exists()


def test_a_method_that_nothing_calls_is_an_error():
    early = type("Early", (Callback,), {"on_evaluate": lambda self, run, report: True})()
    with pytest.raises(SurefootError, match=r"callbacks=Early: nothing calls its on_evaluate; did you mean 'on_evaluation'\?"):
        surefoot.train("CartPole-v1", callbacks=early, **FIELDS)


def test_callbacks_work_without_a_folder():
    diary = Diary()
    diary.on_gpu = False  # an attribute, which need not be called
    surefoot.train("CartPole-v1", callbacks=diary, **FIELDS)
    assert diary.lines[-1] == ("end", 512, False)
