"""Rewards over HTTP from a local server: requests, tokens, and servers that are down, slow or wrong."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.language import http_client
from surefoot.language.rewards.terms import FunctionReward, load_reward
from surefoot.recipes.rewards import RewardTerm

PROMPTS, RESPONSES = ["one: ", "two: ", "three: "], ["a", "bb", "ccc"]
COLUMNS = {"answer": ["a", "b", "ccc"], "weight": [1, 2, 3]}
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class Server:
    """A local HTTP server that returns configured answers and records its requests."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: (200, {"scores": [len(r) for r in body["responses"]]})
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                status, content, *more = outer.answer(body)
                if status == 0:  # hang up
                    self.close_connection = True
                    return
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/score"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def in_turn(self, *answers: Answer) -> None:
        """Return these answers in order, then repeat the last one."""
        self.answer = lambda body: answers[min(len(self.bodies), len(answers)) - 1]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)


def reward(url: str, *, deadline: float = 20.0, tolerated: float = 0.1, **fields: Any) -> FunctionReward:
    return load_reward([RewardTerm(url=url, **fields)], deadline=deadline, tolerated=tolerated)


def score(url: str, **fields: Any) -> Any:
    return reward(url, **fields)(PROMPTS, RESPONSES, COLUMNS)


def rejection(url: str, **fields: Any) -> str:
    with pytest.raises(SurefootError) as raised:
        score(url, **fields)
    text = str(raised.value)
    assert text.startswith(f"reward.terms[0].url={url.partition('?')[0]!r}: ")
    return text.partition(": ")[2]


# ---- requests -----------------------------------------------------------------------------------------------------------


def test_request_has_the_inputs_of_a_function_and_returns_the_scores(server: Server) -> None:
    scores = score(server.url, weight=2.0, arguments={"strict": True})
    assert scores.total.tolist() == [2, 4, 6]
    assert scores.parts["score"].tolist() == [1, 2, 3], "named after the last part of the url"
    assert server.bodies == [{"prompts": PROMPTS, "responses": RESPONSES, **COLUMNS, "strict": True}]
    assert "Authorization" not in server.headers[0]


def test_responses_are_sent_in_batches_of_the_configured_size(server: Server) -> None:
    assert score(server.url, batch=2).total.tolist() == [1, 2, 3]
    bodies = sorted(server.bodies, key=lambda body: str(body["responses"]))  # they arrive in any order
    assert [(body["responses"], body["weight"]) for body in bodies] == [(["a", "bb"], [1, 2]), (["ccc"], [3])]
    assert reward(server.url)([], [], {}).total.shape == (0,)
    assert len(server.bodies) == 2, "no request without responses"


def test_step_rewards_send_steps_and_token_rewards_send_tokens(server: Server) -> None:
    server.answer = lambda body: (200, [[len(step) for step in row] for row in body.get("steps") or body["tokens"]])
    texts, tokens = ["a;bb", ""], [["a", ";", "bb", ""], [""]]
    steps = reward(server.url, per="step", separator=";")(["", ""], texts, {}, tokens)
    assert steps.dense.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert reward(server.url, per="token")(["", ""], texts, {}, tokens).total.tolist() == [4, 0]
    assert [sorted(body) for body in server.bodies] == [["prompts", "responses", "steps"], ["prompts", "responses", "tokens"]]


def test_columns_unfit_for_json_and_duplicate_arguments_are_rejected(server: Server) -> None:
    with pytest.raises(SurefootError, match="'when' can't be sent as JSON"):
        reward(server.url)([""], [""], {"when": [datetime.now(UTC)]})
    with pytest.raises(SurefootError, match="argument 'answer' is also a column of the rows"):
        score(server.url, arguments={"answer": 1})
    assert server.bodies == []


# ---- tokens and addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "sent"), [("s3cret", "Bearer s3cret"), ("Basic czNjcmV0", "Basic czNjcmV0")])
def test_token_from_the_environment_is_sent_and_not_stored(
    value: str, sent: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", value)
    term = RewardTerm(url=server.url, token_from="REWARD_TOKEN")
    made = load_reward([term])
    made(PROMPTS, RESPONSES, COLUMNS)
    assert server.headers[0]["Authorization"] == sent
    assert "REWARD_TOKEN" in str(term.model_dump())
    assert value not in str(term.model_dump())


def test_token_repeated_by_the_server_is_hidden(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "Basic czNjcmV0")
    server.answer = lambda body: (401, b"no such user: Basic czNjcmV0, or czNjcmV0")
    text = rejection(server.url, token_from="REWARD_TOKEN")
    assert "czNjcmV0" not in text
    assert text.startswith("returned 401 Unauthorized ('no such user: ***, or ***'); renew its token")


def test_missing_or_unusable_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    assert "token_from='REWARD_TOKEN': this environment variable is not set" in rejection("http://x", token_from="REWARD_TOKEN")
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    text = rejection("http://rewards.example/score", token_from="REWARD_TOKEN")
    assert "token_from='REWARD_TOKEN': would send the token unencrypted to another machine; use an https:// url" in text
    assert "s3cret" not in text
    monkeypatch.setenv("REWARD_TOKEN", "two\nlines")
    text = rejection("http://x", token_from="REWARD_TOKEN")
    assert "use printable ASCII characters only" in text
    assert "lines" not in text


@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "localhost:80", "http://host:x/", "http://[::1/"])
def test_invalid_urls_are_rejected(url: str) -> None:
    assert "address" in rejection(url)


QUERY = "its query contains "
SECRETS = {
    "http://me:s3cret@host/score": "contains a user or a password",
    "https://host/score#s3cret": "has a fragment after '#', which is never sent",
    "https://host/score?model=judge&api_key=s3cret": QUERY,
    "https://host/score?apiKey=s3cret": QUERY,
    "https://host/score?access-token=s3cret": QUERY,
    "https://host/score?X-Amz-Signature=s3cret": QUERY,
    "https://host/score?x-functions_key=s3cret": QUERY,
    "https://host/score?code=s3cret0123456789abcdefgh": QUERY,
    "https://host/score?s3cret0123456789abcdefgh": QUERY,
    "https://host/score?session=s3cret": QUERY,
}


@pytest.mark.parametrize("url", SECRETS)
def test_secret_in_a_url_is_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(SurefootError) as raised:
        reward(url)
    assert SECRETS[url] in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_harmless_query_parameters_are_allowed() -> None:
    for query in ("model=judge-70b-instruct", "maxTokens=8", "api-version=2024-06-01", "v=1.2.3", "sort_key=date"):
        assert http_client.url_complaint(f"https://host/score?{query}") == ""


# ---- servers that are down, flaky or slow ---------------------------------------------------------------------------------


def test_unreachable_server_is_retried_and_named(server: Server) -> None:
    server.close()
    text = rejection(server.url, retries=2)
    assert "can't be reached (ConnectError: " in text
    assert ", 3 times; check that the server runs, then resume from the last checkpoint" in text


@pytest.mark.parametrize("trouble", [(503, b"busy"), (500, b""), (429, b""), (0, b"")], ids=str)
def test_flaky_server_is_retried_until_it_answers(trouble: Answer, server: Server) -> None:
    server.in_turn(trouble, trouble, (200, [1, 2, 3]))
    assert score(server.url).total.tolist() == [1, 2, 3]
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


def test_retries_back_off_exponentially_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.5)
    drawn = {tried: [http_client.backoff(tried) for _ in range(50)] for tried in (1, 2, 4, 2000)}
    for tried, longest in ((1, 0.5), (2, 1.0), (4, 4.0), (2000, http_client.LONGEST_WAIT)):
        assert longest / 2 <= min(drawn[tried]) < max(drawn[tried]) <= longest


def test_retry_after_header_is_respected(server: Server) -> None:
    server.in_turn((429, b"", {"Retry-After": "1"}), (200, [1, 2, 3]))
    started = time.monotonic()
    assert score(server.url).total.tolist() == [1, 2, 3]
    assert time.monotonic() - started >= 1
    assert http_client.retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=100))) == pytest.approx(100, abs=3)
    assert [http_client.retry_after(text) for text in (None, "", "soon", "-5", "Thu, 01 Jan 1970 00:00:00 GMT")] == [0] * 5


def test_no_retry_waits_beyond_the_deadline(server: Server) -> None:
    server.in_turn((503, b"", {"Retry-After": "3600"}))
    started = time.monotonic()
    text = rejection(server.url)
    assert text.startswith("returned 503 Service Unavailable, and waiting 3.6e+03 s for a retry would exceed reward.deadline")
    assert time.monotonic() - started < 60


def test_slow_server_is_abandoned_at_the_deadline(server: Server) -> None:
    done = threading.Event()
    server.answer = lambda body: (200 if done.wait(60) else 500, [1, 2, 3])
    started = time.monotonic()
    assert rejection(server.url, deadline=0.3).startswith("took longer than reward.deadline=0.3 s for 3 responses")
    assert time.monotonic() - started < 50, "stopped waiting before the answer"
    done.set()


# ---- wrong responses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ((200, [1, 2]), "returned 2 scores for 3 responses; return a list of 3 scores"),
        ((200, b"<html>\n hello"), "returned no JSON ('<html> hello'); return a list of 3 scores"),
        ((200, b"[" * 100_000), "returned no JSON"),
        ((200, {"rewards": [1, 2, 3]}), "returned no scores ("),
        ((404, b"nothing here"), "returned 404 Not Found ('nothing here'); correct the url, or fix the server, then"),
        ((401, b""), "returned 401 Unauthorized; set token_from to the environment variable with its token"),
        ((302, b"", {"Location": "/elsewhere"}), "returned 302 Found; use the url that it redirects to"),
        ((200, b"[NaN, NaN, Infinity]"), "returned no number for 3 of 3 responses (NaN 2, infinite 1)"),
        ((200, b"this was never packed", {"Content-Encoding": "gzip"}), "returned an unreadable response (DecodingError"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_response_is_a_one_line_error_and_is_not_retried(answer: Answer, what: str, server: Server) -> None:
    server.in_turn(answer)
    assert rejection(server.url).startswith(what)
    assert len(server.bodies) == 1


# ---- proxies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_local_server_is_never_reached_through_a_proxy(name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert score(server.url).total.tolist() == [1, 2, 3]
    assert score(server.url.replace("127.0.0.1", "localhost")).total.tolist() == [1, 2, 3]


def test_local_addresses_are_recognised() -> None:
    for url, local in (
        ("http://localhost:8000/x", True),
        ("http://LOCALHOST./x", True),
        ("http://judge.localhost/x", True),
        ("http://127.8.9.1", True),
        ("https://[::1]:1/x", True),
        ("http://0.0.0.0:1", True),
        ("http://localhost.example.org", False),
        ("http://10.0.0.1", False),
        ("http://example.org/127.0.0.1", False),
    ):
        assert http_client.is_local(url) == local
