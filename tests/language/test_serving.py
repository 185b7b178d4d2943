"""Models served by a real server: the same rewards and samples as here, limits, and one line for each error."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

import surefoot
from surefoot.errors import SurefootError
from surefoot.inspector.serving import application
from surefoot.language.data.chat import Dialogue
from surefoot.language.data.rows import write_rows
from surefoot.language.data.sources import read_rows
from surefoot.language.rewards.endpoint import Endpoint
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.terms import FunctionReward
from surefoot.language.served import ServedPolicy, load_served
from surefoot.people.log import Round
from surefoot.recipes.reading import make_recipe
from surefoot.runs.rounds import RoundsSettings, _labelled

TOKEN = "secret"
PROMPTS, RESPONSES = ["one: ", "two: ", "three: "], ["a", "bb", "ccc"]


@contextmanager
def served(model: Any, most: int = 128) -> Iterator[str]:
    """A server of a model on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(application(model, TOKEN, most), log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)


@pytest.fixture(scope="session")
def reward(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """A run of a reward model whose scores have an offset and a scale."""
    folder = tmp_path_factory.mktemp("served")
    write_rows(folder / "pairs.jsonl", ({"prompt": f"{i} ", "chosen": "aeiou", "rejected": "bcdfg"} for i in range(6)))
    data = {"train": str(folder / "pairs.jsonl"), "max_length": 32, "batch": 3}
    surefoot.train("reward", run_dir=folder / "reward", model=str(folders["llama"]), steps=6, data=data)
    return folder / "reward"


@pytest.fixture(scope="module")
def policy(folders: dict[str, Path]) -> ServedPolicy:
    return load_served(str(folders["llama"]))


def term_of(url: str, model: Any) -> str:
    """What the command prints."""
    return f'{{ url = "{url}/score", token_from = "REWARD_TOKEN", arguments = {{ model = "{model.version}" }} }}'


def post(url: str, body: Any, token: str = TOKEN) -> Any:
    return httpx2.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def test_a_served_reward_is_that_of_the_run_by_command_python_and_best_of_n(
    reward: Path, folders: dict[str, Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    write_rows("prompts.jsonl", ({"prompt": prompt} for prompt in PROMPTS))
    words = f"best-of-n {folders['llama']} --prompts prompts.jsonl --samples 3 --max-tokens 6 --keep-cut".split()
    model = load_served(str(reward))
    with served(model) as url:
        code, _, err = command(*words, "--reward", term_of(url, model), "--out", "by_url.jsonl")
        assert code == 0, err
    assert command(*words, "--reward", str(reward), "--out", "here.jsonl")[0] == 0
    by_url, here = (list(read_rows(name)) for name in ("by_url.jsonl", "here.jsonl"))
    rewards = [row.columns.pop("reward") for row in by_url]
    assert rewards == pytest.approx([row.columns["reward"] for row in here], abs=1e-5)
    assert [row.columns["completion"] for row in by_url] == [row.columns["completion"] for row in here]
    code, out, err = command("score", str(reward), "--file", "by_url.jsonl", "--json")
    assert code == 0, err
    assert [json.loads(line)["reward"] for line in out.splitlines()] == pytest.approx(rewards, abs=1e-5)
    write_rows("messages.jsonl", [{"prompt": "one", "completion": [{"role": "assistant", "content": "a"}]}, {"prompt": "x"}])
    write_rows("pairs.jsonl", [{"prompt": "one", "chosen": "a", "rejected": "b"}])
    for name, error in (("messages", "line 1: columns differ"), ("pairs", "surefoot evaluate RUN --data FILE")):
        assert error in command("score", str(reward), "--file", f"{name}.jsonl")[2]


def test_a_served_reward_reads_the_tools_of_each_conversation(reward: Path) -> None:
    model, names = load_served(str(reward)), "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    model.reward.model.plain = None  # as of a model from the hub: of which kind its rows were is not known
    tokenizer = model.reward.tokens.tokenizer
    tokenizer.chat_template = names + tokenizer.chat_template
    asked = [{"role": "user", "content": "one"}]
    talks = [Dialogue(asked, {"tools": [{"name": "add"}]}), Dialogue(asked, {})]
    with served(model) as url:
        server = FunctionReward(Endpoint(f"{url}/score", token_from="REWARD_TOKEN"))
        scores = server(talks, ["a", "a"], {}).total.tolist()
    assert scores == pytest.approx(model.reward(talks, ["a", "a"], {}).total.tolist(), abs=1e-5)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)


def test_another_model_another_token_and_what_can_t_be_scored_are_one_line(reward: Path, folders: dict[str, Path]) -> None:
    model = load_served(str(reward))
    with served(model) as url:
        asked = {"token_from": "REWARD_TOKEN", "then": "repeat"}
        endpoint = Endpoint(f"{url}/score", **asked)
        endpoint.ready()
        expected = ModelReward(reward)(PROMPTS, RESPONSES, {}).total.tolist()
        assert endpoint(PROMPTS, RESPONSES, other=[1, 2, 3]) == pytest.approx(expected, abs=1e-5)
        pinned = Endpoint(f"{url}/score", arguments={"model": "reward@0"}, **asked)
        pinned.ready()
        with pytest.raises(SurefootError, match=rf"404 Not Found \(model='reward@0': this server has {model.version}"):
            pinned(PROMPTS, RESPONSES)
        model.version = "reward@other"
        with pytest.raises(SurefootError, match=r"has the model 'reward@other' now, and had 'reward@[0-9a-f]{12}' before"):
            endpoint(PROMPTS, RESPONSES)
        assert post(f"{url}/score", {}, token="x").status_code == 401
        assert httpx2.get(f"{url}/health").json() == {"model": "reward@other", "waiting": 0, "most": 128}
        for body, what in (
            ({"prompts": ["a"], "responses": []}, "lists of the same length"),
            ({"prompts": ["a"], "responses": [3]}, "responses[0]=3: must be text"),
            ({"prompts": [["a"]], "responses": ["b"]}, "prompts[0]=['a']: is neither text nor messages"),
            ({"prompts": ["a"], "responses": ["b"], "tools": [None, None]}, "tools: must be a list of 1"),
            ({"prompts": ["a"], "responses": ["b"], "tools": ["add"]}, "tools[0]='add': must be a list of schemas"),
            ({"prompts": ["a"], "responses": ["b" * 200]}, "more than its context of 128"),
            ([1], "has no JSON object"),
        ):
            reply = post(f"{url}/score", body)
            assert (reply.status_code, what in reply.json()["error"]["message"]) == (400, True), reply.text


class Slow:
    """A model that answers when it is allowed to."""

    name, version, paths = "slow", "slow@1", ("/score",)

    def __init__(self) -> None:
        self.begun, self.go, self.together = threading.Event(), threading.Event(), list[int]()

    def read(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "key": None}

    def answer(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.begun.set()
        self.go.wait(20)
        self.together.append(len(requests))
        if any(request["responses"] == ["bad"] for request in requests):
            raise SurefootError("bad: is bad")
        return [{"scores": [len(text) for text in request["responses"]]} for request in requests]


def test_requests_that_wait_are_answered_together_one_at_fault_alone_and_too_many_are_sent_back() -> None:
    model = Slow()
    with served(model, most=3) as url, ThreadPoolExecutor(8) as threads:

        def ask(text: str) -> Any:
            return threads.submit(post, f"{url}/score", {"prompts": ["p"], "responses": [text]})

        def until(count: int) -> None:
            while httpx2.get(f"{url}/health").json()["waiting"] != count:
                assert not model.go.is_set()

        first = ask("a")
        assert model.begun.wait(20)
        others = [ask(text) for text in ("bb", "bad", "ccc")]
        until(3)
        late = ask("late").result()
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        model.go.set()
        assert [one.result().json().get("scores") for one in (first, *others)] == [[1], [2], None, [3]]
        assert others[1].result().json()["error"]["message"] == "bad: is bad"
    assert model.together[1] == 3


def test_a_policy_answers_as_generate_whatever_is_asked_beside_it(policy: ServedPolicy) -> None:
    expected = [policy.policy.generate([f"{n}: "], samples=2, max_tokens=5 + n % 2, seed=n) for n in range(12)]
    with served(policy) as url, ThreadPoolExecutor(12) as threads:

        def ask(n: int) -> Any:
            return post(f"{url}/v1/completions", {"prompt": f"{n}: ", "n": 2, "max_tokens": 5 + n % 2, "seed": n}).json()

        answers = list(threads.map(ask, range(12)))
        assert [[choice["text"] for choice in answer["choices"]] for answer in answers] == expected
        assert answers[0]["usage"]["prompt_tokens"] == 6
        messages = [{"role": "user", "content": "hi"}]
        chat = post(f"{url}/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 6, "model": "llama"})
        said = policy.policy.generate([messages], greedy=True, max_tokens=6)
        assert [chat.json()["choices"][0]["message"]] == [{"role": "assistant", "content": said[0]}]
        asked = {"prompt": "3: ", "max_tokens": 6, "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
        asked |= {"user": "ann", "logit_bias": {}, "response_format": {"type": "text"}, "suffix": None}
        streamed = post(f"{url}/v1/completions", asked).text
        *pieces, usage, end = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
        choices = [json.loads(piece)["choices"][0] for piece in pieces]
        assert "".join(choice["text"] for choice in choices) == expected[3][0]
        assert (end, json.loads(usage)["choices"], json.loads(usage)["usage"]["prompt_tokens"]) == ("[DONE]", [], 3)
        assert choices[-1]["finish_reason"] == answers[3]["choices"][0]["finish_reason"]
        for body, what in (
            ({"prompt": "x", "top_p": 0.5}, "top_p=0.5: has no effect on this server; leave it out"),
            ({"prompt": "x", "temperature": -1}, "temperature=-1: must be a positive number"),
            ({"prompt": "x", "max_tokens": 500}, "context of 128"),
            ({"prompt": ["x"], "n": 5000}, "n=5000: 5000 responses; ask for 4096"),
            ({"prompt": 3}, "prompt: must be text"),
        ):
            assert what in post(f"{url}/v1/completions", body).json()["error"]["message"]


class Chooser(Slow):
    """A chat server that prefers the answer with more vowels, or always the first."""

    paths = ("/v1/chat/completions",)

    def __init__(self, always_first: bool) -> None:
        super().__init__()
        self.always_first = always_first

    def answer(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"choices": [{"message": {"content": self.verdict(one["messages"][0]["content"])}}]} for one in requests]

    def verdict(self, question: str) -> str:
        first, second = (sum(map(answer.count, "aeiou")) for answer in question.split("\n")[1:3])
        return "1" if self.always_first or first > second else "tie" if first == second else "2"


JUDGE = """
token_from = "REWARD_TOKEN"
judge = {{ model = "slow", prompt = "Which is better?\\n{{first}}\\n{{second}}", against = "other" }}
url = "{url}/v1/chat/completions"
"""


def labelled(judge: str, reward: Path, folders: dict[str, Path], folder: Path) -> Round:
    """A round whose twenty pairs a judge has labelled."""
    folder.mkdir()
    write_rows(folder / "prompts.jsonl", ({"prompt": f"{i} says "} for i in range(20)))
    table: dict[str, Any] = {"kind": "language", "model": str(folders["llama"]), "steps": 16}
    table |= {"data": {"train": str(folder / "prompts.jsonl"), "max_length": 16}, "reward": {"terms": [{"model": str(reward)}]}}
    recipe = make_recipe({**table, "sampling": {"prompts": 8, "max_tokens": 12}})
    _labelled(RoundsSettings(recipe, judge, pairs=20), folder, 1, print)
    return Round(folder / "round-1")


def test_a_generative_judge_compares_both_answers_in_both_orders_and_fills_the_log_of_people(
    reward: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    for always_first in (False, True):
        with served(Chooser(always_first)) as url:
            (tmp_path / "judge.toml").write_text(JUDGE.format(url=url))
            judge = str(tmp_path / "judge.toml"), reward, folders
            if always_first:
                with pytest.raises(SurefootError, match=r"the judge prefers an answer in none of \d+ pairs"):
                    labelled(*judge, tmp_path / "first")
                continue
            at = labelled(*judge, tmp_path / "vowels")
        for label in at.labels:
            a, b = (sum(map(at.queue[label.key][side].count, "aeiou")) for side in "ab")
            assert label.preference == ("a" if a > b else "b" if b > a else "equal")
        assert {label.who for label in at.labels} == {"judge"}
        assert {label.preference for label in at.labels} == {"a", "b", "equal"}
