"""The table of runs: it matches the folders, tags and trash lose nothing, and requests of others are rejected."""

import json
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import surefoot
from surefoot.errors import SurefootError
from surefoot.inspector import access, catalog
from surefoot.inspector.catalog import Catalog, checked_tags
from surefoot.inspector.curves import FALLING, Results
from surefoot.inspector.folders import RunFolders, recipe_summary
from surefoot.inspector.server import application
from surefoot.store.folder import RunFolder
from surefoot.store.metrics import read_metrics
from surefoot.store.reading import LOCK, acquire, in_use

from .test_server import HERE, PORT, TOKEN

JSON = {"origin": HERE, "content-type": "application/json"}


@pytest.fixture
def runs(cart: Path, tmp_path: Path) -> Path:
    """A folder with two runs, one of them in a folder of a comparison, and other things."""
    root = tmp_path / "runs"
    for name in ("a", "group/b"):
        shutil.copytree(cart, root / name)
    shutil.copytree(cart, root / ".hidden" / "c")
    (root / "notes.txt").write_text("mine")
    return root


def browser(root: Path) -> TestClient:
    made = TestClient(application(RunFolders([]), PORT, TOKEN, catalog=Catalog([root])), base_url=HERE, follow_redirects=False)
    assert made.get(f"/enter?token={TOKEN}").status_code == 303
    return made


def post(page: TestClient, path: str, content: Any, **headers: str) -> Any:
    return page.post(f"/api/{path}", content=json.dumps(content), headers={**JSON, **headers})


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_two_runs_of_the_table_are_compared_by_their_fingerprints(runs: Path) -> None:
    page = browser(runs)
    assert page.get("/api/diff", params={"a": "a", "b": "group/b"}).json()["same"]
    file = runs / "a" / "fingerprints.jsonl"
    file.write_text(file.read_text().replace('"rewards": ["', '"rewards": ["f'))
    found = page.get("/api/diff", params={"a": "a", "b": "group/b"}).json()
    assert found["first"]["stage"] == "rewards"
    assert "fingerprints.jsonl: is not what the run wrote" in found["lines"][-1]
    missing = page.get("/api/diff", params={"a": "a", "b": "../a"})
    assert missing.status_code == 404
    assert "error" in missing.json()


# ---- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_every_run_with_its_recipe_and_results(runs: Path) -> None:
    table = browser(runs).get("/api/table").json()
    assert [row["name"] for row in table["runs"]] == ["a", "group/b"], "hidden folders are not searched"
    rows = read_metrics(runs / "a" / "metrics.jsonl")
    scores = [row["evaluation_return"] for row in rows if row.get("evaluation_return") is not None]
    (shown, _) = table["runs"]
    assert (shown["last"], shown["best"]) == (scores[-1], max(scores))
    assert (shown["kind"], shown["trained"], shown["seed"], shown["steps"]) == ("control", "CartPole-v1", 1, rows[-1]["steps"])
    assert (shown["status"], shown["metric"], shown["damage"]) == ("finished", "return, greedy", None)
    assert abs(shown["started"] - time.time()) < 86_400


def test_a_run_that_can_not_be_read_is_a_row_with_the_reason(runs: Path) -> None:
    (runs / "a" / "config.toml").write_text("kind = [")
    (runs / "group" / "b" / "metrics.jsonl").unlink()
    damaged, empty = browser(runs).get("/api/table").json()["runs"]
    assert "not TOML" in damaged["damage"]
    assert (empty["steps"], empty["last"], empty["status"]) == (0, None, "stopped")


ROWS = st.lists(
    st.fixed_dictionaries({"held_out_loss": st.none() | st.floats(-9, 9), "reward": st.none() | st.floats(-9, 9)}), max_size=20
)


@given(rows=ROWS, cut=st.integers(0, 20))
def test_results_are_those_of_the_whole_file_however_it_grows(
    tmp_path_factory: Any, rows: list[dict[str, Any]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("grows") / "metrics.jsonl"
    lines = [json.dumps({"iteration": i, "steps": 10 * i, **row}) + "\n" for i, row in enumerate(rows, 1)]
    results = Results(path, ("held_out_loss", "reward"))
    for part in (lines[:cut], lines[cut:]):
        with path.open("a") as file:
            file.write("".join(part))
        results.read_on()
    assert (results.iterations, results.steps) == (len(rows), 10 * len(rows))
    for name in ("held_out_loss", "reward"):
        values = [row[name] for row in rows if row[name] is not None]
        assert results.last.get(name) == (values[-1] if values else None)
        assert results.best.get(name) == ((min if name in FALLING else max)(values) if values else None)
    path.unlink()
    path.write_text(json.dumps({"iteration": 1, "steps": 5, "reward": -10.0}) + "\n")
    results.read_on()
    assert (results.iterations, results.best) == (1, {"reward": -10.0}), "a file that was replaced is read from its start"


def test_a_chosen_run_keeps_its_number_and_an_unknown_one_is_an_error(runs: Path) -> None:
    page = browser(runs)
    assert page.get("/api/runs").json() == {"runs": [], "metrics": {}, "catalog": True}
    first = page.get("/api/runs?run=group/b").json()["runs"]
    both = page.get("/api/runs?run=a&run=group/b&run=a").json()["runs"]
    assert [run["number"] for run in first] == [0]
    assert [(run["name"], run["number"]) for run in both] == [("a", 1), ("group/b", 0)]
    for name in ("c", ".hidden/c", "../runs/a", str(runs / "a")):
        assert page.get("/api/runs", params={"run": name}).status_code == 404, name


def test_a_run_is_running_while_a_process_has_its_lock(runs: Path) -> None:
    page = browser(runs)
    folder = RunFolder.open(runs / "a")
    assert [row["status"] for row in page.get("/api/table").json()["runs"]] == ["running", "finished"]
    folder.close()
    assert [row["status"] for row in page.get("/api/table").json()["runs"]] == ["finished", "finished"]


def test_checking_whether_a_run_is_in_use_does_not_block_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.store.folder.acquire", partial(acquire, wait=10.0))  # 0.2 s are too short on a busy machine
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lock = filelock.FileLock(runs / "a" / LOCK)
            with lock:
                time.sleep(0.02)
            time.sleep(0.02)
            in_use(runs / "a")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(10):
            RunFolder.open(runs / "a").close()
    finally:
        stop.set()
        looking.join()


# ---- tags -------------------------------------------------------------------------------------------------------------


def test_tags_are_a_separate_file_and_the_run_resumes_as_before(runs: Path) -> None:
    page, before = browser(runs), contents(runs / "a")
    assert post(page, "tags", {"run": "a", "tags": [" paper ", "seed 1", "paper", ""]}).json() == {"tags": ["paper", "seed 1"]}
    after = contents(runs / "a")
    assert json.loads(after.pop("tags.json")) == {"tags": ["paper", "seed 1"]}
    assert after == before
    assert page.get("/api/table").json()["runs"][0]["tags"] == ["paper", "seed 1"]
    surefoot.resume(runs / "a", steps=2_304)
    assert page.get("/api/table").json()["runs"][0]["tags"] == ["paper", "seed 1"]
    assert page.get("/api/table").json()["runs"][0]["steps"] == 2_304


def test_without_tags_of_its_own_a_run_has_those_of_its_recipe(runs: Path) -> None:
    text = (runs / "a" / "config.toml").read_text()
    (runs / "a" / "config.toml").write_text(text.replace("tags = []", 'tags = ["sweep"]'))
    page = browser(runs)
    assert page.get("/api/table").json()["runs"][0]["tags"] == ["sweep"]
    post(page, "tags", {"run": "a", "tags": []})
    assert page.get("/api/table").json()["runs"][0]["tags"] == []


@pytest.mark.parametrize("tags", ["x", ["a,b"], ["x" * 65], [str(i) for i in range(65)]])
def test_tags_that_can_not_be_kept_are_rejected_in_one_line(runs: Path, tags: Any) -> None:
    page = browser(runs)
    post(page, "tags", {"run": "a", "tags": ["old"]})
    answer = post(page, "tags", {"run": "a", "tags": tags})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("tags")
    assert "\n" not in answer.json()["error"]
    assert json.loads((runs / "a" / "tags.json").read_text()) == {"tags": ["old"]}


@given(st.lists(st.text(max_size=70), max_size=70))
def test_kept_tags_stay_as_they_are(tags: list[str]) -> None:
    try:
        kept = checked_tags(tags)
    except SurefootError:
        return
    assert checked_tags(kept) == kept
    assert set(kept) <= {tag.strip() for tag in tags}


# ---- trash ------------------------------------------------------------------------------------------------------------


def test_a_deleted_run_is_restored_byte_for_byte(runs: Path) -> None:
    page, before, name = browser(runs), contents(runs), "group/b"
    deleted = post(page, "delete", {"run": name}).json()["id"]
    assert name not in [row["name"] for row in page.get("/api/table").json()["runs"]]
    assert not (runs / name).exists()
    assert [run["name"] for run in page.get("/api/table").json()["trash"]] == [name]
    assert {file.rpartition("/")[2] for file in contents(runs)} == {file.rpartition("/")[2] for file in before}, (
        "no file is lost"
    )
    assert post(page, "restore", {"run": deleted}).json() == {"path": str(runs / name)}
    assert contents(runs) == before
    assert page.get("/api/table").json()["trash"] == []
    assert list((runs / ".trash").glob("*")) == [], "no empty folders stay"


def test_a_run_in_use_is_not_deleted(runs: Path) -> None:
    page, folder = browser(runs), RunFolder.open(runs / "a")
    answer = post(page, "delete", {"run": "a"})
    assert (answer.status_code, "in use by another process" in answer.json()["error"]) == (400, True)
    assert (runs / "a" / "config.toml").exists()
    folder.close()
    assert post(page, "delete", {"run": "a"}).status_code == 200


def test_a_name_that_was_taken_since_is_not_overwritten(runs: Path) -> None:
    page = browser(runs)
    deleted = post(page, "delete", {"run": "a"}).json()["id"]
    shutil.copytree(runs / "group" / "b", runs / "a")
    (runs / "a" / "mine.txt").write_text("new")
    answer = post(page, "restore", {"run": deleted})
    assert (answer.status_code, "exists; rename it" in answer.json()["error"]) == (400, True)
    assert (runs / "a" / "mine.txt").read_text() == "new"
    again = post(page, "delete", {"run": "a"}).json()["id"]
    assert len({deleted, again}) == 2, "the same name may be in the trash twice"
    assert post(page, "restore", {"run": again}).status_code == 200
    assert (runs / "a" / "mine.txt").exists()


def test_only_runs_of_the_table_can_be_deleted_and_only_deleted_ones_restored(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(runs / "a", outside)
    os.symlink(outside, runs / "link")
    page, before = browser(runs), contents(tmp_path)
    for name in ("../outside", str(outside), ".hidden/c", "group", "", "notes.txt", "link", None, ["a"]):
        assert post(page, "delete", {"run": name}).status_code == 400, name
    for name in ("0/x/a", "0/../../outside", "../outside", "9/x/y", "", None):
        assert post(page, "restore", {"run": name}).status_code == 400, name
    assert contents(tmp_path) == before


def test_a_failed_move_is_one_line_and_changes_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    page, before = browser(runs), contents(runs)
    monkeypatch.setattr(catalog, "move", full)
    answer = post(page, "delete", {"run": "a"})
    assert (answer.status_code, "No space left on device" in answer.json()["error"]) == (400, True)
    assert contents(runs) == before
    assert not in_use(runs / "a")


# ---- who may write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tags", "invite"])
def test_only_a_page_of_this_server_that_has_the_cookie_can_change_something(runs: Path, path: str) -> None:
    page, content = browser(runs), {"run": "a", "tags": ["x"]}
    before = contents(runs)
    stranger = TestClient(page.app, base_url=HERE, follow_redirects=False)
    assert post(stranger, path, content).status_code == 403
    for origin in ("http://evil.example", "null", f"http://localhost:{PORT}", f"https://127.0.0.1:{PORT}"):
        assert post(page, path, content, origin=origin).status_code == 403, origin
    for site in ("cross-site", "same-site"):
        assert post(page, path, content, **{"sec-fetch-site": site}).status_code == 403, site
    body = json.dumps(content)
    assert page.post(f"/api/{path}", content=body, headers={"content-type": "application/json"}).status_code == 403, "no origin"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # what a form could send
        assert page.post(f"/api/{path}", content=body, headers={"origin": HERE, "content-type": kind}).status_code == 403
    for method in ("get", "put", "patch", "delete"):
        assert getattr(page, method)(f"/api/{path}").status_code in (404, 405)
    assert contents(runs) == before


def test_a_request_that_is_no_object_or_too_large_is_rejected(runs: Path) -> None:
    page = browser(runs)
    for content in ("", "[]", "{", "\xff", "[" * 10_000):
        assert page.post("/api/tags", content=content.encode("latin-1"), headers=JSON).status_code == 400, content[:9]
    assert post(page, "tags", {"run": "a", "tags": ["x" * 70_000]}).status_code == 400


def test_without_a_table_there_is_nothing_to_tag_or_delete(cart: Path) -> None:
    page = TestClient(application(RunFolders([cart]), PORT, TOKEN), base_url=HERE, follow_redirects=False)
    page.get(f"/enter?token={TOKEN}")
    for path in ("tags", "delete", "restore"):
        assert post(page, path, {"run": "cart", "tags": []}).status_code == 405
    assert page.get("/api/table").status_code == 404
    assert page.get("/api/runs").json()["catalog"] is False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: now[0])
    return now


def test_an_invited_browser_enters_once_and_within_ten_minutes(cart: Path, clock: list[float]) -> None:
    tokens = access.LoginTokens("first")
    for wait, valid in ((599.0, True), (601.0, False)):
        token = tokens.issue()
        clock[0] += wait
        assert not tokens.redeem(token + "x")
        assert tokens.redeem(token) is valid
        assert not tokens.redeem(token)
    assert tokens.redeem("first"), "the address that was printed waits for its browser"
    for _ in range(access.MOST_TOKENS):
        tokens.issue()
    with pytest.raises(SurefootError, match="unused addresses"):
        tokens.issue()
    clock[0] += 601
    tokens.issue()


def test_the_address_for_another_browser_gives_it_the_same_access(cart: Path) -> None:
    app = application(RunFolders([cart]), PORT, TOKEN)
    first, second, third = (TestClient(app, base_url=HERE, follow_redirects=False) for _ in range(3))
    first.get(f"/enter?token={TOKEN}")
    address = post(first, "invite", {}).json()["address"]
    assert address.startswith(f"{HERE}/enter?token=")
    assert second.get("/").status_code == 403
    assert second.get(address).status_code == 303
    assert second.get("/").status_code == first.get("/").status_code == 200
    assert third.get(address).status_code == 403, "it works once"


# ---- the command ------------------------------------------------------------------------------------------------------


def test_only_runs_that_choose_actions_have_an_algorithm() -> None:
    tables = [{"kind": kind, "algorithm": "REINFORCE"} for kind in ("sft", "reward", "control", "language")]
    assert [recipe_summary(table)["algorithm"] for table in tables] == ["", "", "REINFORCE", "REINFORCE"]


def test_folders_without_runs_are_an_error_of_one_line(command: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    for words, wrong in (
        ((), "no folder runs/"),
        (("empty",), "has no run yet"),
        (("other",), "has no runs"),
        (("nowhere",), "no such run"),
    ):
        code, _, err = command("inspect", *words, "--no-browser")
        assert (code, len(err.splitlines())) == (2, 1), err
        assert wrong in err
    (tmp_path / "runs").mkdir()
    assert command("inspect")[2].endswith("begin one with: surefoot train TASK\n"), "not in runs/ itself"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "MOST_FOLDERS", 1)
        (tmp_path / "other" / "more").mkdir()
        code, _, err = command("inspect", "other", "--no-browser")
        assert (code, "name the folder that has the runs" in err) == (2, True)
