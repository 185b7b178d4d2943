"""Bad input is reported in one line (field, value, remedy) on stderr with exit code 2, and no work is lost."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from surefoot import SurefootError
from surefoot.errors import to_install
from surefoot.recipes.presets import find_recipe
from surefoot.runs import api
from surefoot.runs.api import launch
from surefoot.store import manifest
from surefoot.store.checkpoint import load_checkpoint, save_checkpoint


def rejected(result, *parts):
    """The command is rejected: exit 2, one line, with these parts in it."""
    code, _, error = result
    assert code == 2, error
    assert error.count("\n") == 1, error
    assert error.startswith("surefoot: ")
    for part in parts:
        assert part in error


CASES = [
    (["train", "CartPol-v1"], ["'CartPol-v1'", "did you mean 'CartPole-v1'?"]),
    (["train", "cartpol"], ["did you mean 'cartpole'?"]),
    (["train", ""], ["'': no recipe, .toml file or environment id of that name (see: surefoot list)"]),
    (["train", "grpo"], ["'grpo': is an algorithm; run: surefoot train TASK --algorithm GRPO"]),
    (
        ["train", "sorting", "--model", "pocket", "--data.train", "rows.jsonl", "--turns.tools", "a.py:f"],
        ["turns.tools='a.py:f': must be a list; write [\"a.py:f\"]"],
    ),
    (["train", "CartPole-v1", "--network.hidden", "64,64"], ["network.hidden='64,64': must be a list; write [64,64]"]),
    (
        ["train", "CartPole-v1", "--objective.clip", "0.1"],
        ["Did you mean '--objective.trust-region.clip', '--normalise.clip'?"],
    ),
    (["train", "CartPole-v1", "--epochs", "4"], ["Did you mean '--objective.reuse.epochs'?"]),
    (["train", "CartPole-v1", "--algorithm", "PPO_CLOP"], ["algorithm='PPO_CLOP'", "did you mean 'PPO_CLIP'?"]),
    (["train", "CartPole-v1", "--objective.gae-lamda", "0.9"], ["--objective.gae-lamda", "--objective.gae-lambda"]),
    (["train", "CartPole-v1", "--steps", "many"], ["steps='many': must be a whole number, such as 20_000"]),
    (["train", "CartPole-v1", "--seeds", "0"], ["--seeds", "1<=x"]),
    (["train", "CartPole-v1", "--seeds", "x"], ["'x' is not a valid integer. (see"]),
    (["train", "CartPole-v1", "--objective.reuse.minibatches", "7"], ["minibatches=7", "256 steps", "such as 8"]),
    (
        ["train", "CartPole-v1", "--objective.trust-region.beta", "1", "--objective.trust-region.clip", "0.2"],
        ["objective.trust_region: has keys of a clip and a penalty (beta, clip)"],
    ),
    (["train", "CartPole-v1", "--rung", "9"], ["--rung"]),
    (["train", "CartPole-v1", "--steps", "9" * 400], ["steps=0x", "more than 64 bits"]),
    (["train", "CartPole-v1", "--steps", "1" + "0" * 5000], ["steps="]),
    (["compare-algorithms", "CartPole-v1", "--algorithms", "A2C", "--jobs", "1000000000000"], ["is not in the range"]),
    (["train", "CartPole-v1", "--environment", f"{{ a = {'9' * 400} }}"], ["environment.a=0x", "more than 64 bits"]),
    (["train", "CartPole-v1", "--environment", "{wheels = 3}", "--steps", "256"], ["could not be made", "wheels"]),
    (["train", "CartPole-v1", "--device", "cuda:7", "--dry-run"], ["device='cuda:7'", "can't be used here"]),
    (["train", "CartPole-v1", "--start", "missing", "--dry-run"], ["start: missing", "no such run folder"]),
    (["train", "missing.toml"], ["missing.toml", "can't be read"]),
    (["train", "robot.py", "--steps", "10"], ["task='robot.py'", "there is no file "]),
    (["train", "nowhere:make", "--steps", "10"], ["nowhere:make", "can't be imported"]),
    (["trian", "CartPole-v1"], ["trian", "train"]),
    (["ladder", "CartPole-v1", "--rung", "9"], ["--rung", "9", "0<=x<=5"]),
    (["ladder", "CartPol-v1"], ["did you mean 'CartPole-v1'?"]),
    (["ladder", "CartPole-v1", "--batches", "1"], ["--batches", "2<=x"]),
    (["ladder", "CartPole-v1", "--algorithm", "PPO_CLIP"], ["--algorithm"]),
    (["ladder", "CartPole-v1", "--objective.baseline", "critic"], ["objective.baseline='critic'", "leave the flag out"]),
    (["compare-algorithms", "CartPole-v1"], ["--algorithms"]),
    (["compare-algorithms", "CartPole-v1", "--algorithms", "PPO_CLIP,A2"], ["algorithms='A2'", "did you mean 'A2C'?"]),
    (["compare-algorithms", "CartPole-v1", "--algorithms", "A2C,A2C"], ["'A2C' is listed twice"]),
    (
        ["compare-algorithms", "CartPole-v1", "--algorithms", "A2C", "--objective.reuse.epochs", "2"],
        ["epochs", "is off in A2C"],
    ),
    (["train", "CartPole-v1", "--total_timesteps", "5"], ["'--total_timesteps'", "Did you mean '--steps'?"]),
    (["train", "CartPole-v1", "--batch-size=5"], ["'--batch-size'", "'--data.batch', '--objective.reuse.minibatches'"]),
    (["evaluate", "--ranks", "2"], ["--ranks: only train, resume, rounds, demo and verify run on several ranks; leave it out"]),
    (["tune", "--rank-timeout", "2"], ["--rank-timeout: only train, resume, rounds, demo and verify run on several ranks"]),
    (["resume", "runs/none"], ["runs/none", "no such run folder"]),
    (["evaluate", "runs/none"], ["runs/none", "no such run folder"]),
    (["evaluate", "runs/none", "--episodes", "0"], ["--episodes"]),
    (["evaluate", "runs/none", "--threshold", "inf"], ["--threshold", "inf is not a finite number"]),
    (["chat", "pocket", "--temperature", "nan"], ["--temperature", "nan is not a finite number"]),
    (["resume", "runs/none", "--max-restarts", "-1"], ["--max-restarts"]),
    (
        ["watch", "runs/none", "--traced", "last", "--episodes", "2"],
        ["--episodes: --traced films episodes from training; leave it out"],
    ),
    (["inspect", "--out", "x.html"], ["--out: is for the page that --clip-table writes"]),
]


def test_bad_options_are_rejected_in_one_line(command, tmp_path):
    for words, parts in CASES:
        rejected(command(*words), *parts)
    assert list(tmp_path.iterdir()) == [], "a rejected command left something behind"


TOML = [
    ("task = ", ["not TOML"]),
    ("steps = 100\n", ["task: is missing"]),
    ('task = "CartPole-v1"\nsteps = 1' + "0" * 5000 + "\n", ["mine.toml: not TOML", "4300 digits"]),
    ('task = "CartPole-v1"\nlearning_rate = 1e-3\n', ["learning_rate=0.001", "did you mean 'optimizer.learning_rate'?"]),
    ('task = "CartPole-v1"\nstep = 3\n', ["step=3", "unknown key", "did you mean 'steps'?"]),
    ('task = "CartPole-v1"\n[objectiv]\ngamma = 1\n', ["objectiv", "did you mean 'objective'?"]),
    ('task = "CartPole-v1"\n[objective]\ngama = 1\n', ["objective.gama=1", "did you mean 'gamma'?"]),
    ('task = "CartPole-v1"\n[objective.trust_region]\nclop = 1\n', ["clop=1", "did you mean 'clip'?"]),
]


def test_a_bad_recipe_file_is_rejected_in_one_line(command, tmp_path):
    for text, parts in TOML:
        (tmp_path / "mine.toml").write_text(text)
        rejected(command("train", "mine.toml", "--dry-run"), *parts)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    changes = {"steps": 512, "evaluation": {"episodes": 1}, "checkpoint": {"every": 256}}
    api.start(find_recipe("CartPole-v1", changes), path)
    return path


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


def newest(run):
    return run / "checkpoints" / "512"


def test_a_finished_run_is_rejected(command, run):
    rejected(command("resume", str(run)), "finished", "--steps above 512")


def test_an_empty_folder_is_rejected(command, tmp_path):
    (tmp_path / "empty").mkdir()
    for verb in ("resume", "evaluate"):
        rejected(command(verb, "empty"), "has no run yet")


def test_a_folder_with_other_files_is_rejected_and_kept(command, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    rejected(command("train", "CartPole-v1", "--steps", "256", "--run-dir", "other"), "other", "other files")
    rejected(command("resume", "other"), "not a run folder")
    assert (tmp_path / "other" / "letter.txt").read_text() == "dear"


def test_training_into_an_existing_run_is_rejected(command, run):
    before = sorted(p.name for p in run.rglob("*"))
    rejected(command("train", "CartPole-v1", "--steps", "256", "--run-dir", str(run)), f"surefoot resume {run}")
    assert sorted(p.name for p in run.rglob("*")) == before


def test_a_truncated_checkpoint_is_rejected_with_a_remedy(command, run):
    file = newest(run) / "agent.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    rejected(command("resume", str(run), "--steps", "1024"), "agent.safetensors has", "to go back to", "256")
    shutil.rmtree(newest(run))
    code, out, _ = command("resume", str(run), "--steps", "1024", "--quiet")
    assert code == 0
    assert "1,024 steps" in out


@pytest.mark.parametrize("name", ["agent.safetensors", "state.json"])
def test_a_flipped_bit_is_detected(command, run, name):
    file = newest(run) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    rejected(command("resume", str(run), "--steps", "1024"), name, "SHA-256")
    rejected(command("evaluate", str(newest(run))), name, "SHA-256")


def test_a_pickle_is_never_read(command, run, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    for name in ("agent.safetensors", "policy.pt"):
        folder = shutil.copytree(run, tmp_path / f"with-{name}")
        (folder / "checkpoints" / "512" / name).write_bytes(pickle.dumps(Bomb()))
        rejected(command("resume", str(folder), "--steps", "1024"), "pickle", name)
        rejected(command("evaluate", str(folder / "checkpoints" / "512")), "pickle", name)
    assert not (tmp_path / "exploded").exists()


def test_the_install_command_fits_the_installation(tmp_path):
    installed = tmp_path / "lib" / "python3.11" / "site-packages" / "surefoot" / "errors.py"
    assert to_install("plots", installed) == "pip install 'surefoot[plots]'"
    checkout = tmp_path / "my checkout"
    code = checkout / "src" / "surefoot" / "errors.py"
    code.parent.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).touch()
    assert to_install("plots", code, here=checkout) == "pip install -e '.[plots]'"
    words = shlex.split(to_install("plots,atari", code, here=tmp_path))
    assert words == ["pip", "install", "-e", f"{checkout}[plots,atari]"]


def test_a_missing_extra_names_what_to_install(monkeypatch):
    def make():
        raise gymnasium.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')

    with pytest.raises(SurefootError, match=r"pip install .*\[mujoco\]'"):
        api.train(make, steps=10)


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from surefoot.runs import api
from surefoot.cli.main import main
limited = []
def shrink_the_disk(metrics):
    if metrics["steps"] > 512 and not limited:
        limited.append(resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)))
api_start = api.start
api.start = lambda recipe, folder, **kw: api_start(recipe, folder, callback=shrink_the_disk, **kw)
sys.argv = ["surefoot", "train", "CartPole-v1", "--steps", "2048", "--run-dir", "run", "--checkpoint-every", "256", "--quiet",
            "--evaluation.episodes", "0"]
main()
"""


def test_a_disk_that_fills_during_a_checkpoint_leaves_the_previous_one(command, tmp_path):
    """A real refusal by the kernel: files may not grow beyond 30 kB after the second checkpoint."""
    result = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert "a checkpoint is not saved" in result.stderr
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["256", "512"]
    load_checkpoint(tmp_path / "run" / "checkpoints" / "512")
    code, _, _ = command("resume", "run", "--quiet")
    assert code == 0


class Broken(gymnasium.Env):
    """An environment that goes wrong at its 20th step, in a way that its maker chooses."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, result):
        self.result, self.steps = result, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            return self.result()
        return np.zeros(2, np.float32), 1.0, False, False, {}


def explode():
    raise RuntimeError("the wheel\ncame off")


BREAKAGES = [
    (explode, "raised RuntimeError: the wheel"),
    (lambda: (np.zeros(3, np.float32), 1.0, False, False, {}), "shape (3,) where its space has shape (2,)"),
    (lambda: (np.zeros(2, np.float32), None, False, False, {}), "gave a reward of type NoneType"),
    (lambda: (np.zeros(2, np.float32), 1.0, False), "gave 3 values where Gymnasium's interface has 5"),
    (lambda: sys.exit(3), "raised SystemExit: 3"),
]


@pytest.mark.parametrize(("result", "part"), BREAKAGES, ids=["raises", "shape", "reward", "length", "exits"])
def test_errors_of_environments_name_the_step(tmp_path, result, part):
    fields = {"steps": 1024, "rollout": {"environments": 1, "steps": 8}, "objective": {"reuse": {"minibatches": 4}}}
    with pytest.raises(SurefootError) as raised:
        api.train(lambda: Broken(result), run_dir=tmp_path / "run", checkpoint={"every": 8}, **fields)
    message = str(raised.value)
    assert part in message
    assert "environment 0" in message
    assert "step 20" in message
    load_checkpoint(tmp_path / "run" / "checkpoints" / "16")


def test_three_updates_in_a_row_that_are_not_finite_end_the_run_with_its_last_good_checkpoint(tmp_path):
    class Rotting(Broken):
        def step(self, action):
            self.steps += 1
            reward = float("nan") if self.steps > 20 else 1.0
            return np.zeros(2, np.float32), reward, False, False, {}

    fields = {"steps": 1024, "rollout": {"environments": 1, "steps": 8}, "objective": {"reuse": {"minibatches": 4}}}
    with pytest.raises(
        SurefootError,
        match=r"the reward of environment 0 at step \d+ of its episode is not finite.*3 consecutive updates.*then resume",
    ):
        api.train(lambda: Rotting(None), run_dir=tmp_path / "run", checkpoint={"every": 8}, **fields)
    parts = load_checkpoint(tmp_path / "run" / "checkpoints" / "16")
    assert all(np.isfinite(tensor.numpy()).all() for tensor in parts["agent"].values())


def test_a_save_over_something_else_is_rejected(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("words")
    with pytest.raises(SurefootError, match="not a checkpoint"):
        save_checkpoint(tmp_path / "thesis", {"state": {"steps": 1}})
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "words"


def test_checkpoints_return_what_was_saved(tmp_path):
    import torch

    tree = {"a": {"b": torch.arange(3), "c": [1, 2.5, None, "x", True]}, "d": np.eye(2), "e": float("inf")}
    save_checkpoint(tmp_path / "one", {"tree": tree, "plain": {"n": 1}})
    back = load_checkpoint(tmp_path / "one")
    assert back["plain"] == {"n": 1}
    assert back["tree"]["a"]["b"].tolist() == [0, 1, 2]
    assert back["tree"]["a"]["c"] == [1, 2.5, None, "x", True]
    assert back["tree"]["d"].tolist() == [[1, 0], [0, 1]]
    assert json.dumps(back["tree"]["e"]) == "Infinity"


def test_a_checkpoint_whose_first_bytes_look_like_a_pickle_is_read(tmp_path):
    """A safetensors header of 640 bytes begins with those of a pickle; 19280 with those of a zip."""
    import torch

    lengths = set()
    for extra in [*range(540, 660, 4), *range(19180, 19300, 4)]:
        save_checkpoint(tmp_path / "one", {"tree": {"x" * extra: torch.zeros(1)}})
        head = (tmp_path / "one" / "tree.safetensors").read_bytes()[:8]
        if head[:2] in (b"\x80\x02", b"PK") and head[:2] not in lengths:
            lengths.add(head[:2])
            assert load_checkpoint(tmp_path / "one")["tree"]["x" * extra].tolist() == [0.0]
    assert lengths == {b"\x80\x02", b"PK"}


def test_a_failed_replacement_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "one", {"tree": {"n": 1}})
    real, calls = os.rename, []

    def rejects_the_second(*names):
        calls.append(names)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*names)

    monkeypatch.setattr(manifest, "_exchanged", lambda *names: False)  # as on a disk that can't
    monkeypatch.setattr(os, "rename", rejects_the_second)
    with pytest.raises(SurefootError, match="No space left on device"):
        save_checkpoint(tmp_path / "one", {"tree": {"n": 2}})
    assert load_checkpoint(tmp_path / "one")["tree"] == {"n": 1}


def test_the_same_environment_twice_and_an_environment_for_a_task_are_rejected():
    one = gymnasium.make("CartPole-v1")
    with pytest.raises(SurefootError, match="environments 0 and 1 are the same"):
        api.train(lambda: one, steps=10)
    with pytest.raises(SurefootError, match="is not a task"):
        api.train(one, steps=10)


def test_a_changed_number_of_environments_or_optimizers_is_rejected_on_resume(tmp_path):
    changes = {"steps": 1024, "evaluation": {"episodes": 0}}
    api.start(find_recipe("CartPole-v1", changes), tmp_path / "run", callback=lambda metrics: metrics["steps"] >= 256)
    config = tmp_path / "run" / "config.toml"
    whole = config.read_text()
    config.write_text(whole.replace("environments = 8", "environments = 4"))
    with pytest.raises(SurefootError, match=r"rollout.environments=4: the checkpoint has 8"):
        api.resume(tmp_path / "run", allow_changes=True)
    config.write_text(whole.replace('critic_learning_rate = "none"', "critic_learning_rate = 0.001"))
    with pytest.raises(SurefootError, match=r"undo the change of optimizer.critic_learning_rate"):
        api.resume(tmp_path / "run", allow_changes=True)


ODDITIES = """
import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn


class Odd(gymnasium.Env):
    def __init__(self, mask=(1, 1), observation_space=spaces.Box(-1, 1, (2,), np.float32)):
        self.observation_space, self.action_space = observation_space, spaces.Discrete(2)
        self.mask = np.array(mask)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {"action_mask": self.mask}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


def graph():
    nodes = spaces.Graph(spaces.Box(0, 1, (2,)), None)
    return Odd(observation_space=spaces.Dict({"camera": spaces.Dict({"depth": nodes}), "x": spaces.Discrete(2)}))


def no_module(space):
    return print


def flat(space):
    return nn.Flatten(0)


def narrow(space):
    return nn.Linear(3, 4)
"""

ODD = [
    (["oddities:graph"], ['observation space part "camera.depth": Graph', "not supported"]),
    (
        ["oddities:Odd", "--environment", "{mask = [0, 0]}"],
        ["environment 0", "allows no action (all false)", "episode 0, step 0"],
    ),
    (["oddities:Odd", "--environment", "{mask = [1, 1, 1]}"], ["environment 0", "length 3", "needs length 2"]),
    (["CartPole-v1", "--network.custom", "oddities"], ["network.custom='oddities'", "must name module:function"]),
    (["CartPole-v1", "--network.custom", "oddities:nothing"], ["network.custom='oddities:nothing'", "can't be imported"]),
    (["CartPole-v1", "--network.custom", "oddities:no_module"], ["it must return a torch.nn.Module"]),
    (["CartPole-v1", "--network.custom", "oddities:flat"], ["features of shape [8] for 2 observations, not [2, k]"]),
    (["CartPole-v1", "--network.custom", "oddities:narrow"], ["forward raised RuntimeError", "observation [2, 4]"]),
]


def test_odd_spaces_masks_and_networks_are_rejected_in_one_line(command, tmp_path):
    (tmp_path / "oddities.py").write_text(ODDITIES)
    sys.modules.pop("oddities", None)
    for words, parts in ODD:
        rejected(command("train", *words, "--steps", "100", "--run-dir", "run"), *parts)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_makes_only_one_environment(command):
    code, out, _ = command("train", f"{__name__}:Few", "--rollout.environments", "1000", "--dry-run")
    assert code == 0
    assert "# batch: 1000 environments x 128 steps = 128,000 steps" in out
    rejected(command("train", f"{__name__}:Few", "--rollout.environments", "1000000000000", "--dry-run"), "environments=1000")


class Few(gymnasium.Env):
    """An environment of which there can be one."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        Few.made += 1
        if Few.made > 1:
            raise RuntimeError("a second one")

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}


@pytest.mark.parametrize(
    ("command", "remedy"), [("compare", "repeat the command"), ("train", "repeat the command, or resume the run")]
)
def test_a_write_error_mentions_the_run_only_if_there_may_be_one(
    command: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.cli import main

    def write(*_: object, **__: object) -> None:
        raise OSError(2, "No such file or directory", "/none/p.png")

    monkeypatch.setattr("sys.argv", ["surefoot", command, "a", "b"])
    monkeypatch.setattr(main, "join_if_ranked", write)
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == f"surefoot: /none/p.png: No such file or directory; fix that, then {remedy}\n"


def test_an_existing_name_is_rejected_before_models_are_loaded(command, tmp_path, monkeypatch):
    """A model may take minutes to read."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "notes.txt").write_text("mine")
    monkeypatch.setattr(launch, "make_world", None)
    rejected(command("train", "CartPole-v1", "--steps", "64", "--name", "mine"), "runs/mine: contains other files (notes.txt)")
