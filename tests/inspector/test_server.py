"""The server accepts one browser on this machine, changes nothing, and serves only its own files."""

import http.client
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from chain import check_chain
from starlette.testclient import TestClient

from surefoot import read_trace
from surefoot.core.traces import BRANCHES
from surefoot.errors import SurefootError
from surefoot.inspector.access import Connection
from surefoot.inspector.folders import RunFolders, run_names
from surefoot.inspector.server import application, front_end
from surefoot.inspector.traces import CRITERIA
from surefoot.store.manifest import write_listed
from surefoot.store.reading import traces_in
from surefoot.store.traces import to_bytes

PORT, TOKEN = 8123, "the-token"
HERE = f"http://127.0.0.1:{PORT}"
PATHS = ("/", "/app.js", "/api/runs", "/api/runs/0/find/best")


@pytest.fixture(scope="module")
def store(cart: Path) -> RunFolders:
    return RunFolders([cart])


def client(store: RunFolders, **headers: str) -> TestClient:
    made = TestClient(application(store, PORT, TOKEN), base_url=HERE, follow_redirects=False)
    made.headers.update(headers)
    return made


@pytest.fixture
def inside(store: RunFolders) -> TestClient:
    """A browser that has used the address."""
    made = client(store)
    assert made.get(f"/enter?token={TOKEN}").status_code == 303
    return made


def test_every_page_has_an_icon_so_that_browsers_request_no_other(store: RunFolders) -> None:
    browser = client(store, **{"sec-fetch-site": "cross-site"})
    forwarding = browser.get(f"/enter?token={TOKEN}")
    browser.headers.pop("sec-fetch-site")
    for page in (forwarding, browser.get("/")):
        (icon,) = re.findall(r'<link rel="icon" href="/?([^"]+)"', page.text)
        assert browser.get(f"/{icon}").status_code == 200


def test_the_token_works_once_and_leaves_a_cookie_that_scripts_cannot_read(store: RunFolders) -> None:
    app = application(store, PORT, TOKEN)
    first, second = (TestClient(app, base_url=HERE, follow_redirects=False) for _ in range(2))
    assert second.get("/enter?token=wrong").status_code == 403
    assert second.get("/enter").status_code == 403
    entered = first.get(f"/enter?token={TOKEN}")
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    assert second.get(f"/enter?token={TOKEN}").status_code == 403
    assert first.get(f"/enter?token={TOKEN}").status_code == 303, "who is inside may use the address again"
    assert first.get("/").status_code == 200
    assert second.get("/").status_code == 403


@pytest.mark.parametrize("path", PATHS)
def test_every_route_requires_the_cookie_the_host_and_the_origin(store: RunFolders, inside: TestClient, path: str) -> None:
    assert inside.get(path).status_code == 200
    assert client(store).get(path).status_code == 403
    assert client(store, cookie=f"surefoot_{PORT}=guess").get(path).status_code == 403
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", ""):
        assert inside.get(path, headers={"host": host}).status_code == 403, host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1", f"{HERE}.evil.example"):
        assert inside.get(path, headers={"origin": origin}).status_code == 403, origin
    assert inside.get(path, headers={"origin": HERE}).status_code == 200
    for site in ("cross-site", "same-site"):
        assert inside.get(path, headers={"sec-fetch-site": site}).status_code == 403, site
    for site in ("same-origin", "none"):
        assert inside.get(path, headers={"sec-fetch-site": site}).status_code == 200, site
    assert inside.get(path, headers={"host": f"localhost:{PORT}"}).status_code == 200


def test_the_token_is_no_use_from_another_host_or_page(store: RunFolders) -> None:
    app = application(store, PORT, TOKEN)
    rebound = TestClient(app, base_url=f"http://evil.example:{PORT}", follow_redirects=False)
    assert rebound.get(f"/enter?token={TOKEN}").status_code == 403
    honest = TestClient(app, base_url=HERE, follow_redirects=False)
    assert honest.get(f"/enter?token={TOKEN}", headers={"origin": "http://evil.example"}).status_code == 403
    assert honest.get(f"/enter?token={TOKEN}").status_code == 303, "and it was not used up by them"


def test_nothing_can_be_changed(inside: TestClient) -> None:
    for method in ("post", "put", "patch", "delete", "options"):
        assert getattr(inside, method)("/api/runs").status_code == 405


def test_every_answer_forbids_requests_to_elsewhere(inside: TestClient, store: RunFolders) -> None:
    for answer in (inside.get("/"), inside.get("/api/runs"), inside.get("/nothing"), client(store).get("/")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_only_known_files_are_sent(inside: TestClient, cart: Path) -> None:
    for path in (
        "/../folders.py",
        "/..%2ffolders.py",
        "/static/../../folders.py",
        "/vendor/../../clip_table.py",
        "/vendor/uPlot.LICENSE",
    ):
        assert inside.get(path).status_code == 404, path
    for path in (
        "traces/../../config.toml",
        "traces/..%2f..%2fconfig",
        "samples/..%2f0",
        "videos/..%2f0",
        "find/..%2f..%2fetc",
    ):
        assert inside.get(f"/api/runs/0/{path}").status_code == 404, path
    assert inside.get(f"/{quote(str(cart / 'config.toml'), safe='')}").status_code == 404
    assert all(name.rpartition(".")[2] in ("html", "js", "css", "svg") for name in front_end())


def test_unknown_paths_are_a_one_line_error(inside: TestClient) -> None:
    for path in (
        "9",
        "0/traces/1",
        "0/traces/256/rows/99",
        "0/traces/256/passes/99",
        "0/samples/3",
        "0/videos/0",
        "0/find/gold",
    ):
        answer = inside.get(f"/api/runs/{path}" if "/" in path else "/api/runs/9/find/best")
        assert answer.status_code == 404
        assert "\n" not in answer.json()["error"]
    for query in ("", "runs=0", "runs=x&metrics=kl", "runs=7&metrics=kl", "runs=0&metrics=kl&points=many"):
        assert inside.get(f"/api/curves?{query}").status_code == 404, query
    for query in ("runs=0&metrics=kl&from=nan&to=nan", "runs=0&metrics=nothing", "runs=0&metrics=kl&points=-5&smoothing=9"):
        assert inside.get(f"/api/curves?{query}").status_code == 200, query


def test_a_row_equals_its_trace(inside: TestClient, cart: Path) -> None:
    for file in traces_in(cart / "traces"):
        trace = read_trace(file)
        check_chain(trace, "minibatch")
        table = inside.get(f"/api/runs/0/traces/{trace.steps}").json()
        assert (table["iteration"], table["passes"], len(table["rows"])) == (trace.iteration, 20, 3)
        for index, row in enumerate(trace.rows):
            answer = inside.get(f"/api/runs/0/traces/{trace.steps}/rows/{index}").json()
            for name in ("rewards", "td_residuals", "advantages", "old_log_probs"):
                assert answer[name] == pytest.approx(getattr(row, name).tolist(), rel=1e-8)
            assert answer["visits"]["ratio"][3] == pytest.approx(row.visits.ratio[3].tolist(), rel=1e-8)
            assert answer["branches"] == list(BRANCHES)
            part = inside.get(f"/api/runs/0/traces/{trace.steps}/rows/{index}?from=5").json()
            assert part["rewards"] == answer["rewards"][5:]


def test_find_returns_the_largest_of_its_kind(inside: TestClient, cart: Path) -> None:
    traces = {int(file.stem): read_trace(file) for file in traces_in(cart / "traces")}
    rows = [row for trace in traces.values() for row in trace.rows]
    ratios = max(float(row.visits.ratio.max()) for row in rows)
    assert inside.get("/api/runs/0/find/ratio").json()[0]["ratio"] == pytest.approx(ratios)
    assert inside.get("/api/runs/0/find/best").json()[0]["advantage"] == pytest.approx(
        max(float(row.advantages.max()) for row in rows)
    )
    worst = inside.get("/api/runs/0/find/worst").json()
    assert worst[0]["advantage"] == pytest.approx(min(float(row.advantages.min()) for row in rows))
    assert [hit["advantage"] for hit in worst] == sorted(hit["advantage"] for hit in worst)
    clipped = inside.get("/api/runs/0/find/clipped").json()
    assert clipped
    for hit in clipped:
        row = traces[hit["steps"]].rows[hit["index"]]
        assert hit["branch"] == "clipped" == BRANCHES[int(row.visits.branch[hit["visit"], hit["t"]])]
        assert hit["ratio"] == pytest.approx(float(row.visits.ratio[hit["visit"], hit["t"]]))


def test_nothing_in_the_folder_changes(inside: TestClient, cart: Path) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(cart.rglob("*"))}

    before = state()
    for path in (*PATHS, "/api/runs/0/traces/256", "/api/runs/0/traces/256/rows/0", "/api/runs/0/traces/256/passes/0"):
        assert inside.get(path).status_code == 200
    assert state() == before


def test_runs_of_the_same_name_have_different_labels(tmp_path: Path) -> None:
    assert run_names([tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"]) == ["a/ppo", "b/ppo"]
    assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert run_names([tmp_path / "a", tmp_path / "a"]) == ["1: a", "2: a"]
    with pytest.raises(SurefootError, match="no such run folder"):
        RunFolders([tmp_path / "nowhere"])


@pytest.fixture
def served(cart: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address that the command would print, of a server that really listens."""
    import uvicorn

    from surefoot.inspector import server

    servers: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "__init__", remembering(uvicorn.Server.__init__, servers))
    addresses: list[str] = []
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=([cart], 0, lambda address: (addresses.append(address), ready.set())))
    thread.start()
    assert ready.wait(100)
    yield addresses[0]
    servers[0].should_exit = True
    thread.join(100)
    assert not thread.is_alive()


def remembering(make: Any, made: list[Any]) -> Any:
    def init(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        made.append(self)

    return init


def test_the_server_listens_on_localhost_only(served: str) -> None:
    port = port_of(served)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/" + served.split("/", 3)[3])
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 303
    cookie = (answer.getheader("set-cookie") or "").split(";")[0]
    connection.request("GET", "/api/runs", headers={"cookie": cookie})
    answer = connection.getresponse()
    assert json.loads(answer.read())["runs"][0]["name"] == "cart"
    assert answer.getheader("server") is None
    connection.close()
    others = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None)} | {"127.0.0.2"}
    for other in others - {"127.0.0.1", "::1"}:
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((other, port), timeout=2).close()


def test_values_that_are_not_finite_are_sent_as_strings(cart: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(cart, run)
    steps = spoiled(run, 5000)
    inside = client(RunFolders([run]))
    inside.get(f"/enter?token={TOKEN}")
    row = inside.get(f"/api/runs/0/traces/{steps}/rows/0").json()
    assert row["advantages"][:3] == ["NaN", "Infinity", "-Infinity"]
    assert row["beyond"] == "NaN", "the first of the next part"
    assert row["visits"]["ratio"][0][2] == "Infinity"
    assert inside.get(f"/api/runs/0/traces/{steps}").json()["rows"][0]["reward"] == "NaN"
    for what in CRITERIA:
        assert inside.get(f"/api/runs/0/find/{what}").status_code == 200
    best = [hit["advantage"] for hit in inside.get("/api/runs/0/find/best").json()]
    assert set(best[:3]) == {"NaN", "Infinity"}, "what is no number stands out most"
    assert inside.get(f"/api/runs/0/traces/{steps}/passes/0").status_code == 200


def test_curves_are_served_before_torch_is_imported(cart: Path) -> None:
    """It takes longer than drawing them."""
    program = f"""
import sys
from pathlib import Path
from surefoot.inspector.access import Connection
from surefoot.inspector.folders import RunFolders, metric_descriptions
from surefoot.inspector.server import application
store = RunFolders([Path({str(cart)!r})])
application(store, 1, "x")
found = store.runs()[0]
assert found["iterations"] == 8 and metric_descriptions(found["metrics"])["kl"]["title"]
assert store.curves([0], ["kl"], 0, 1e9, 400, 0)["curves"]["kl"]
print("torch" in sys.modules, "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def spoiled(run: Path, length: int) -> int:
    """Give a run a row of this length or more in its last trace in which some numbers are not finite; the steps of it."""
    file = traces_in(run / "traces")[-1]
    trace = read_trace(file)

    def grown(x: Any) -> Any:
        return x if not isinstance(x, torch.Tensor) else x.repeat(*([1] * (x.ndim - 1)), length // x.shape[-1] + 1)

    first = trace.rows[0]
    visits = replace(first.visits, **{name: grown(x) for name, x in vars(first.visits).items()})
    parts = {name: grown(x) for name, x in first.reward_parts.items()}
    long = {name: grown(x) for name, x in vars(first).items() if isinstance(x, torch.Tensor)}
    row = replace(first, **long, visits=visits, reward_parts=parts)
    row.advantages[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    row.advantages[4096:4097] = math.nan
    row.rewards[0] = math.nan
    row.visits.ratio[:, 2] = math.inf
    row.visits.advantages[:, :2] = torch.tensor([math.nan, math.inf])
    write_listed(file, to_bytes(replace(trace, rows=[row, *trace.rows[1:]])))
    return trace.steps


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "patience", 0.5)


def everything(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection; TimeoutError if it stays open."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: 127", b"GET / HTTP/1.1\r\ncontent-length: 5\r\n\r\n12"])
def test_a_connection_with_an_incomplete_request_is_closed(hasty: None, served: str, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=60) as half_open:
        half_open.sendall(sent)
        assert b"HTTP/1.1 200" not in everything(half_open), "no page for half a request"


def test_half_of_a_second_request_is_closed_too(hasty: None, served: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(served)), timeout=60) as half_open:
        half_open.sendall(b"GET / HTTP/1.1\r\nhost: elsewhere\r\n\r\n")
        assert half_open.recv(4096).startswith(b"HTTP/1.1 403")
        half_open.sendall(b"GET / HTTP/1.1\r\n")
        assert b"HTTP/1.1" not in everything(half_open), "no second answer"


def port_of(address: str) -> int:
    return int(address.split(":")[2].split("/")[0])
