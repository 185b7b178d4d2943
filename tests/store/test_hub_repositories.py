"""Agents and models on the hub: uploaded files, downloads, and errors.

The hub is a server on this machine with the paths of the real one, LFS included.
"""

import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fake_hub import HEADER, Hub, closed_port, use_hub

import surefoot
from surefoot.compare.card import check_no_places, public_recipe
from surefoot.errors import SurefootError
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe, to_table
from surefoot.store.manifest import write_listed
from surefoot.store.public import without_place

pytest.importorskip("huggingface_hub")
Command = Callable[..., tuple[int, str, str]]
LINE = re.compile(r"surefoot: .*\n")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an agent."""
    run = tmp_path_factory.mktemp("runs") / "cart"
    surefoot.train("CartPole-v1", steps=512, seed=3, run_dir=run, evaluation={"episodes": 2}, display=False)
    return run


@pytest.fixture(autouse=True)
def few_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn only for the test that looks at them: they take longer than all else that is uploaded."""
    if "curves" not in request.fixturenames:
        monkeypatch.setattr("surefoot.compare.card.matplotlib_installed", lambda: False)


@pytest.fixture
def curves() -> None:
    """A test that takes it draws curves."""


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, in ``runs/`` of the current folder."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "cart"))


def header(card: bytes | str) -> dict[str, Any]:
    match = HEADER.match(card if isinstance(card, str) else card.decode())
    assert match is not None
    table: dict[str, Any] = yaml.safe_load(match[1])
    return table


# ---- agents -----------------------------------------------------------------------------------------------------------


def test_a_pushed_agent_is_downloaded_with_the_same_actions(hub: Hub, run: Path, command: Command) -> None:
    code, out, err = command("push", "cart", "org/cart", "--episodes", "3")
    assert code == 0, err
    commit = hub.model("org/cart").head
    assert out.endswith(f"uploaded to hf://org/cart@{commit} (private)\n")
    assert hub.model("org/cart").private
    for name in hub.model("org/cart").files:
        assert name == ".gitattributes" or f"  {name}\n" in out

    ours, theirs = surefoot.load(run), surefoot.load("hf://org/cart")
    observations = torch.randn(20, 4).numpy()
    for kind in ({"deterministic": True}, {}):
        assert (ours.predict(observations, **kind)[0] == theirs.predict(observations, **kind)[0]).all()
    assert (ours.value(observations) == theirs.value(observations)).all()

    code, out, err = command("pull", "org/cart", "here")
    assert (code, out) == (0, f"hf://org/cart@{commit} -> here\n"), err
    assert (
        surefoot.load("here").predict(observations, deterministic=True)[0] == ours.predict(observations, deterministic=True)[0]
    ).all()
    here, hubs = (command("evaluate", where, "--episodes", "3", "--json")[1] for where in ("here", "hf://org/cart"))
    assert json.loads(here)["returns"] == json.loads(hubs)["returns"]
    for where in ("here", "hf://org/cart"):
        code, out, err = command("verify", where)
        assert (code, out.splitlines()[1:]) == (0, ["iterations 1–2 repeat to the last bit"]), err


def test_the_card_has_the_metadata_of_the_hub_and_the_evaluation_with_its_seed(
    hub: Hub, run: Path, command: Command, curves: None
) -> None:
    command("push", "cart", "org/cart", "--episodes", "3", "--seed", "7", "--license", "mit")
    card = hub.model("org/cart").files["README.md"].decode()
    table = header(card)
    result = surefoot.evaluate(run, episodes=3, seed=7)
    assert table["library_name"] == "surefoot"
    assert table["pipeline_tag"] == "reinforcement-learning"
    assert {"surefoot", "CartPole-v1", "PPO_CLIP"} <= set(table["tags"])
    assert table["license"] == "mit"
    (measured,) = table["model-index"][0]["results"]
    assert measured["dataset"]["type"] == "CartPole-v1"
    (metric,) = measured["metrics"]
    assert metric["value"] == f"{result.mean_return:.2f} +/- {result.std_return:.2f}"
    assert metric["args"] == {"episodes": 3, "seed": 7}
    assert 'surefoot.load("hf://org/cart")' in card
    assert "3 greedy episodes, seed 7" in card
    assert "curves/return.png" in card
    assert hub.model("org/cart").files["curves/return.png"].startswith(b"\x89PNG")


def test_a_second_push_is_one_commit_and_replaces_the_first(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "cart", "--episodes", "0")
    first = hub.model("org/cart")
    assert "best/256/agent.safetensors" in first.files or "best/512/agent.safetensors" in first.files
    (old,) = {name.split("/")[1] for name in first.files if name.startswith("best/")}
    first.add({**first.files, "notes.txt": b"mine"})
    new = next(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit() and path.name != old)
    code, _, err = command("push", "cart", "org/cart", "--episodes", "0", "--checkpoint", new)
    assert code == 0, err
    files, commits = hub.model("org/cart").files, hub.model("org/cart").commits
    assert {name.split("/")[1] for name in files if name.startswith("best/")} == {new}
    assert files["notes.txt"] == b"mine", "what someone else put there stays"
    assert len(commits) == 4, "creation, first push, notes, second push"

    codes = [command("pull", name, folder)[0] for name, folder in (("org/cart", "b"), (f"org/cart@{list(commits)[1]}", "a"))]
    assert codes == [0, 0]
    assert [next(Path(folder, "best").iterdir()).name for folder in "ba"] == [new, old]
    assert command("pull", "org/cart", "c", "--revision", list(commits)[1])[0] == 0


def test_without_the_hub_the_cache_is_read(
    hub: Hub, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    before = surefoot.load("hf://org/cart")
    use_hub(monkeypatch, f"http://127.0.0.1:{closed_port()}", tmp_path / "cache")
    assert torch.equal(surefoot.load("hf://org/cart").policy.actor_head.weight, before.policy.actor_head.weight)
    use_hub(monkeypatch, f"http://127.0.0.1:{closed_port()}", tmp_path / "other")
    with pytest.raises(
        SurefootError, match=r"^hf://org/cart: the hub can't be reached, and the cache lacks it \(.*HF_ENDPOINT"
    ):
        surefoot.load("hf://org/cart")


def test_a_training_starts_from_an_agent_on_the_hub_and_records_the_commit(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    words = ("train", "CartPole-v1", "--steps", "256", "--start", "hf://org/cart", "--name", "next", "--quiet")
    code, _, err = command(*words, "--evaluation.episodes", "0")
    assert code == 0, err
    assert f'start = "hf://org/cart@{hub.model("org/cart").head}"' in Path("runs/next/config.toml").read_text()


def test_a_pulled_run_is_shown_and_evaluated_but_not_resumed(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    assert command("pull", "org/cart", "runs/pulled")[0] == 0
    assert command("report", "pulled")[0] == 0
    code, _, err = command("resume", "pulled")
    assert code == 2
    assert "comes from the hub, without what resuming needs; begin a new run" in err


def test_an_existing_video_is_uploaded_and_film_records_one(hub: Hub, run: Path, command: Command) -> None:
    pytest.importorskip("imageio_ffmpeg")
    _, out, _ = command("push", "cart", "org/cart", "--dry-run", "--episodes", "0")
    assert "no video: add --film to record one\n" in out
    _, out, _ = command("push", "cart", "org/cart", "--dry-run", "--episodes", "0", "--film")
    assert (run / "hub" / "replay.mp4").stat().st_size > 1000
    assert command("watch", "cart", "--seed", "5")[0] == 0
    command("push", "cart", "org/cart", "--dry-run", "--episodes", "0")
    (recorded,) = (run / "videos").glob("*.mp4")
    assert (run / "hub" / "replay.mp4").read_bytes() == recorded.read_bytes()


# ---- what is not uploaded ---------------------------------------------------------------------------------------------


def test_folders_passwords_and_trackers_of_a_recipe_are_not_uploaded(
    hub: Hub, run: Path, command: Command, tmp_path: Path
) -> None:
    config = run / "config.toml"
    secret = "hf_" + "a" * 30
    text = (
        config.read_text()
        .replace('start = "none"', f'start = "{tmp_path}/runs/older"')
        .replace("trackers = []", 'trackers = ["wandb"]')
    )
    text = text.replace('project = "surefoot"', 'project = "secret-project"')
    config.write_text(text.replace("[environment]", f'[environment]\nassets = "{tmp_path}/a.xml"\napi_key = "{secret}"\n'))
    (run / "events.out.tfevents.1").write_bytes(b"x")
    (run / "trackers.json").write_text("{}")
    code, out, err = command("push", "cart", "org/cart", "--dry-run", "--episodes", "0")
    assert code == 0, err
    for field, left in (("start", "older"), ("environment.assets", "a.xml")):
        assert f"config.toml: {field} is {left!r}, without what belongs to this machine\n" in out
    assert "config.toml: environment.api_key is 'removed', to publish it, add --publish api_key\n" in out
    assert "config.toml: has no trackers\n" in out
    everything = b"".join(path.read_bytes() for path in (run / "hub").rglob("*") if path.is_file())
    for private in (str(tmp_path), secret, "secret-project", "wandb", "working_folder", "events.out", "trackers.json"):
        assert private.encode() not in everything
    assert not {path.name for path in (run / "hub").rglob("*")} & {"traces", "learner.json", "trackers.json", "state.json"}
    assert surefoot.load(run / "hub").recipe.start == "older"


def test_values_without_paths_are_kept() -> None:
    for text, left in (
        ("/home/me/tasks/env.py:make", "env.py:make"),
        ("~/models/small", "small"),
        ("../data/train.jsonl", "train.jsonl"),
        (r"C:\data\train.jsonl", "train.jsonl"),
        ("https://me:word@host/score?key=1", "https://host/score"),
        *((text, text) for text in ("data/train.jsonl", "CartPole-v1", "https://host/score", "hf://org/name@abc:train")),
        ("s3://key:word@bucket/x", "s3://bucket/x"),
        ("HTTP://me:word@host/x", "http://host/x"),
        ("postgresql+psycopg://me:word@host/db", "postgresql+psycopg://host/db"),
        ("file:///data/private/x.jsonl", "x.jsonl"),
    ):
        assert without_place(text) == left


def test_only_arguments_that_are_known_to_be_harmless_are_published() -> None:
    harmless = {"max_tokens": 8, "eos_token_id": 2, "end_token": "</think>", "maxLength": [4, "a"], "weights": {"length": 0.5}}
    others = {"jwt": "a", "cookie": "b", "pin": 1234, "key": ["c"], "auth": {"length": "d"}, "tokeniser": 0.5, "sid": b"".hex()}
    arguments = {**harmless, "strict": True, "nothing": "none", "weights": {"length": 0.5, "session": "e"}, **others}
    language = {
        "kind": "language",
        "model": "m",
        "data": {"train": "p.jsonl"},
        "reward": {"terms": [{"function": "rewards.py:score", "arguments": arguments}]},
        "turns": {"environment": "env.py:Env", "arguments": arguments},
    }
    recipe, notes = public_recipe(make_recipe(language))
    table = to_table(recipe)
    shown = {**arguments, **dict.fromkeys(others, "removed"), "weights": {"length": 0.5, "session": "removed"}}
    del shown["nothing"]
    for field in (table["reward"]["terms"][0]["arguments"], table["turns"]["arguments"]):
        assert {name: value for name, value in field.items() if name != "nothing"} == shown
    assert len(notes) == 16
    assert any(note.endswith("to publish it, add --publish jwt") for note in notes)
    again, _ = public_recipe(make_recipe(language), ("jwt", "session"))
    assert to_table(again)["turns"]["arguments"]["jwt"] == "a"
    control, notes = public_recipe(find_recipe("CartPole-v1", {"environment": {"password": 123456, "gravity": 9.8}}))
    assert to_table(control)["environment"] == {"password": "removed", "gravity": 9.8}
    assert len(notes) == 1


def test_a_file_that_names_the_home_folder_is_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/root", "/home/me", "/home/jürgen"):
        monkeypatch.setenv("HOME", home)
        file = tmp_path / "sample.txt"
        for text in (
            f"see {home}/.ssh",
            json.dumps(f"see\n{home}/.ssh"),
            json.dumps(f"é{home}/x"),
            json.dumps(f"{home}/x"),
            *([f"cd {home}", f"cd {home}, then"] if home != "/root" else []),
        ):
            file.write_text(text)
            with pytest.raises(SurefootError, match=rf"^sample\.txt: names the folder {home} of this machine"):
                check_no_places(tmp_path, Path("runs/cart"))
        for text in (f"{home}nu", "the /root of it", *([f"a{home}/b"] if home == "/root" else [])):
            file.write_text(text)
            check_no_places(tmp_path, Path("runs/cart"))


def test_a_file_with_a_local_path_stops_the_upload(hub: Hub, run: Path, command: Command, tmp_path: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    write_listed(run / "environment.json", json.dumps({**environment, "platform": f"{tmp_path}/cuda"}))
    code, _, err = command("push", "cart", "org/cart", "--episodes", "0")
    assert code == 2
    assert err.startswith(f"surefoot: environment.json: names the folder {tmp_path} of this machine; leave the samples out")
    assert "models/org/cart" not in hub.repositories


def test_without_a_token_only_a_dry_run_works(hub: Hub, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    code, out, err = command("push", "cart", "org/cart", "--episodes", "0")
    assert (code, out, err) == (
        2,
        "",
        "surefoot: org/cart: there is no token to upload with; run: hf auth login, or set HF_TOKEN\n",
    )
    code, out, err = command("push", "cart", "org/cart", "--dry-run", "--out", "shown", "--episodes", "0")
    assert code == 0, err
    assert out.endswith("nothing is uploaded; the folder is shown\n")
    assert hub.requests == []
    assert surefoot.load("shown").predict([0.0] * 4, deterministic=True)[0] in (0, 1)


# ---- bad input --------------------------------------------------------------------------------------------------------


def rejected(command: Command, *words: str) -> str:
    code, out, err = command(*words)
    assert (code, out) == (2, ""), err
    assert LINE.fullmatch(err), err
    return err


def test_wrong_names_and_revisions_get_one_line(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    for words, message in {
        ("pull", "org/none"): "hf://org/none: no such repository on the hub, or your token can't read it; check the name",
        ("pull", "org/cart", "a", "--revision", "v9"): "hf://org/cart@v9: has no such revision; give a branch, a tag or a com",
        ("pull", "org/cart@v9", "a"): "hf://org/cart@v9: has no such revision",
        ("pull", "org/cart@v9", "--revision", "v8"): "--revision v8: org/cart@v9 has a revision already",
        ("pull", "a b"): "a b: is not the name of an agent or model on the hub; write hf://org/name, or hf://org/name@revision",
        ("pull", "hf://org/name:train"): "hf://org/name:train: is not the name of an agent or model on the hub",
        ("evaluate", "hf://org/none"): "hf://org/none: no such repository",
        ("push", "cart", "org/cart@v1"): "org/cart@v1: has a revision; uploads go to the main branch",
        ("push", "cart", "others/cart", "--episodes", "0"): "others/cart: the hub answers with status 403",
        ("push", "cart", "org/x", "--out", "there"): "--out there: is for --dry-run",
        ("push", "none", "org/x"): "none: no such run folder",
        ("push", "cart", "org/x", "--dry-run", "--out", "runs"): "--out runs: contains other files; choose a new folder",
        ("watch", "hf://org/cart"): "hf:/org/cart: belongs to no run; set --out FILE",
    }.items():
        code, _, err = command(*words)
        assert code == 2, words
        assert LINE.fullmatch(err), err
        assert err.startswith(f"surefoot: {message}"), err


def test_a_run_without_a_checkpoint_is_not_pushed(hub: Hub, run: Path, command: Command) -> None:
    for part in ("best", "checkpoints"):
        shutil.rmtree(run / part)
    assert "has no checkpoint yet" in rejected(command, "push", "cart", "org/cart")
    assert "models/org/cart" not in hub.repositories


def test_a_rejected_token_gets_one_line(hub: Hub, run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "old")
    assert "the token is not valid; run: hf auth login" in rejected(command, "push", "cart", "cart")


def test_a_public_repository_needs_a_flag(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--public", "--episodes", "0")
    assert not hub.model("org/cart").private
    assert "org/cart: is a public repository; add --public" in rejected(command, "push", "cart", "org/cart")


def test_a_repository_of_something_else_is_neither_read_nor_overwritten(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    hub.model("org/cart").add({"config.json": b"{}", "README.md": b""})
    line = rejected(command, "pull", "org/cart", "x")
    assert (
        "hf://org/cart: has no surefoot.json, so surefoot push did not write it; name a model of transformers without hf://"
        in line
    )
    assert "org/cart: contains config.json, which surefoot push did not write" in rejected(command, "push", "cart", "org/cart")
    assert not Path("x").exists()


def test_a_dry_run_replaces_its_folder_only_if_nothing_was_edited_or_added(hub: Hub, run: Path, command: Command) -> None:
    dry_run = ("push", "cart", "org/cart", "--dry-run", "--episodes", "0")
    assert command(*dry_run)[0] == command(*dry_run)[0] == 0
    for name in ("README.md", "config.toml", "mine.txt"):
        path = run / "hub" / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((before or b"") + b"# mine\n")
        assert f"hub: {name} was edited or added; move the folder away, or choose a new one" in rejected(command, *dry_run)
        assert path.read_bytes().endswith(b"# mine\n")
        path.unlink() if before is None else path.write_bytes(before)
    assert command(*dry_run)[0] == 0


def test_an_existing_folder_is_not_overwritten(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    assert "runs/cart: exists already; choose another folder" in rejected(command, "pull", "org/cart")
    Path("file").write_text("x")
    assert "file: exists already" in rejected(command, "pull", "org/cart", "file")
    Path("empty").mkdir()
    assert command("pull", "org/cart", "empty")[0] == 0


def changed(hub: Hub, files: dict[str, bytes], name: str, content: bytes | None, listed: bool) -> None:
    """Change one of the files of the repository, and its hash in the list if ``listed``."""
    place = next((path for path in files if path.endswith(name)), name)
    files.pop(place, None)
    if content is not None:
        files[place] = content
    if listed:
        listing = json.loads(files["surefoot.json"])
        listing["files"][place] = {"size": len(content or b""), "sha256": sha256(content or b"").hexdigest()}
        files["surefoot.json"] = json.dumps(listing).encode()
    hub.model("org/cart").add(files)


PICKLE = b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00."


def test_a_changed_repository_is_rejected_and_nothing_is_written(hub: Hub, run: Path, command: Command) -> None:
    command("push", "cart", "org/cart", "--episodes", "0")
    sound = hub.model("org/cart").files
    for name, content, listed, message in (
        ("agent.safetensors", PICKLE, True, "agent.safetensors is a pickle, which is never read"),
        ("agent.pkl", PICKLE, True, "contains a pickle (agent.pkl), which is never read"),
        ("optimizer.pt", PICKLE, False, "contains a pickle (optimizer.pt), which is never read"),
        ("env.py", b"print(1)", True, "lists 'env.py', which is not a file of an agent or model"),
        ("../../x.json", b"{}", True, "lists '../../x.json', which is not the name of a file beside it"),
        ("/etc/x.json", b"{}", True, "lists '/etc/x.json', which is not the name of a file beside it"),
        ("a*.json", b"{}", True, "lists 'a*.json', which is not a file of an agent or model"),
        ("agent.safetensors", b"xyz", False, "bytes instead of"),
        ("metrics.jsonl", None, False, "metrics.jsonl is missing"),
        ("surefoot.json", b"[]", False, "has a list instead of a table"),
        ("surefoot.json", b'{"format": 9}', False, "surefoot.json: format 9 is not 1"),
        ("surefoot.json", b'{"format": 1, "files": 3}', False, "its files are not a table of tables"),
    ):
        changed(hub, dict(sound), name, content, listed)
        for words in (("pull", "org/cart", "x"), ("evaluate", "hf://org/cart")):
            assert message in rejected(command, *words)
        assert not Path("x").exists()
        assert [path.name for path in Path.cwd().iterdir() if path.name.endswith(".tmp")] == []


def test_a_missing_extra_is_named(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (("pull", "org/cart", "x"), ("push", "cart", "org/cart"), ("evaluate", "hf://org/cart")):
        line = rejected(command, *words)
        assert "the hub needs huggingface_hub, which is not installed; run: pip install" in line
        assert "[hub]" in line


def test_a_wrong_name_of_the_hub_is_shown_with_both_slashes() -> None:
    with pytest.raises(
        SurefootError, match=r"^hf://org/none@x:y: is not the name of an agent or model on the hub; write hf://org"
    ):
        surefoot.evaluate(Path("hf://org/none@x:y"))


def test_offline_without_a_copy_the_line_names_the_variable_alone() -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    from surefoot.store.hub import why_unreachable

    line = why_unreachable(OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled."))
    assert line == "is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
