"""The "vllm" engine against a local stand-in server: weights, requests, runs, and server failures.

If ``SUREFOOT_VLLM`` is the path of an environment with vLLM, the slow test at the end starts a real server.
"""

import json
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks

import surefoot
from surefoot.core.rollout import LearnerState, Rollout
from surefoot.errors import SurefootError
from surefoot.language import http_client
from surefoot.language.language_model import load_base
from surefoot.language.online.world import LanguageWorld
from surefoot.language.sampling.vllm import VllmServer, serve_command
from surefoot.recipes.language import LanguageRecipe
from surefoot.recipes.reading import make_recipe
from surefoot.store.metrics import read_metrics

from . import tiny
from .test_engines import request
from .test_sampler import PROMPTS, expect_own_log_probs
from .vllm_stand_in import StandIn

ASK = "/v1/completions"


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


class Bench:
    """A model folder, a stand-in server with this model, prompts and a reward function."""

    def __init__(self, root: Path, folder: Path, server: StandIn | None = None) -> None:
        self.root, self.folder = root, folder
        self.url = closed_port() if server is None else server.url
        tiny.write_texts(root, 40)

    def table(
        self, server: dict[str, Any] | None = None, ahead: int = 0, evaluated: bool = False, **changes: Any
    ) -> dict[str, Any]:
        """Settings of a run of three iterations, with evaluations in between or without."""
        table: dict[str, Any] = {
            "model": str(self.folder),
            "steps": 48,
            "data": {"train": str(self.root / "rows.jsonl"), "max_length": 32},
            "sampling": {"prompts": 16, "max_tokens": 8, "temperature": 0.8, "ahead": ahead},
            "server": {"url": self.url, "retries": 1, **(server or {})},
            "reward": {"terms": [{"function": f"{self.root}/rewards.py:score"}], "missing_eos": "none"},
            "optimizer": {"learning_rate": 1e-3},
            "objective": {"reuse": {"epochs": 2, "minibatches": 2}, "importance_cap": 3.0},
        }
        if evaluated:
            table["data"]["held_out"] = table["data"]["train"]
            table["evaluation"] = {"every": 16, "rows": 4}
        return table | changes

    def recipe(self, *arguments: Any, **changes: Any) -> LanguageRecipe:
        return make_recipe({"kind": "language", **self.table(*arguments, **changes)})

    def engine(self, longest: int = 64, **server: Any) -> VllmServer:
        recipe = self.recipe(server)
        return VllmServer(recipe, *load_base(recipe), str(self.folder), longest)

    def train(self, name: str, **settings: Any) -> Any:
        return surefoot.train("language", run_dir=self.root / name, display=None, **settings)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.root / name / "metrics.jsonl")


@pytest.fixture
def server(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)
    made = StandIn(folders["llama"])
    yield made
    made.close()


@pytest.fixture
def bench(tmp_path: Path, folders: dict[str, Path], server: StandIn) -> Bench:
    return Bench(tmp_path, folders["llama"], server)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model with other weights."""
    return tiny.write_folder(tmp_path / "other", "llama", seed=9)


def collected(recipe: LanguageRecipe, change: Callable[[Any], None] = lambda model: None) -> Rollout:
    """The first rollout of a recipe, after its model was changed."""
    world = LanguageWorld(recipe)
    change(world.policy.model)
    rollout = world.collector.collect(LearnerState.seeded(1, 48))
    world.close()
    return rollout


def moved(model: Any, names: str = "", by: float = 0.3) -> None:
    """Change the weights that have this in their names."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if names in name:
                weight.add_(by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))


def rejection(call: Callable[[], Any]) -> str:
    with pytest.raises(SurefootError) as raised:
        call()
    return str(raised.value)


# ---- weights and requests -----------------------------------------------------------------------------------------------


def test_weights_are_sent_once_per_version_and_old_folders_are_removed(server: StandIn, bench: Bench) -> None:
    folder = bench.root / "weights"
    engine = bench.engine(weights=str(folder))
    sent = 0
    for version, changed in ((None, True), (None, False), (0, False), (4, True), (4, False), (None, False), (9, True)):
        if changed:
            moved(engine.model, "lm_head", 0.01)
        engine.use(version)
        sent += changed
        assert [path.name for path in folder.iterdir()] == [server.version]
        for path in ("/collective_rpc", "/resume", "/reset_prefix_cache"):
            assert server.seen.count(path) == sent, (version, path)
    engine.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_an_adapter_is_sent_merged_into_its_dequantised_base(quantize: str | None, bench: Bench) -> None:
    if quantize:
        pytest.importorskip("bitsandbytes")
    rollout = collected(bench.recipe(adapter={"rank": 2, "quantize": quantize}), lambda model: moved(model, ".lora_B"))
    assert rollout.metrics["sampler_gap"] < 1e-4


def test_server_token_is_sent_with_every_request(server: StandIn, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEY", "hush")
    engine = bench.engine(token_from="VLLM_KEY")
    engine.use(0)
    engine.sample(request())
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer hush"}
    assert engine.command.endswith('--api-key "$VLLM_KEY"')
    assert "hush" not in engine.command


def test_check_prints_the_command_that_starts_the_server(bench: Bench) -> None:
    from surefoot.diagnostics.recipe import check_recipe
    from surefoot.runs.factory import prepared_world

    shown = {finding.name: finding.what for finding in check_recipe(bench.recipe(), prepared_world)}
    assert shown["sampling"] == f"engine vllm (vLLM stand-in at {bench.url})"
    assert shown["server"].startswith("VLLM_SERVER_DEV_MODE=1 vllm serve ")
    assert shown["reward"].startswith("16 numbers for 16 answers")
    recipe = bench.recipe({"url": "http://127.0.0.1:9123", "model": "mine"})
    assert serve_command(recipe, "/some where/model", 96) == (
        "VLLM_SERVER_DEV_MODE=1 vllm serve '/some where/model' --served-model-name mine --dtype float32 --max-model-len 96 "
        "--host 127.0.0.1 --port 9123 --generation-config vllm --logprobs-mode processed_logprobs"
    )
    bench.url = closed_port()
    assert "or start it: VLLM_SERVER_DEV_MODE=1 vllm serve " in check_recipe(bench.recipe(), prepared_world)[0].line


# ---- runs ---------------------------------------------------------------------------------------------------------------


def test_run_with_a_server_matches_in_process_sampling_and_resumes_bit_for_bit(server: StandIn, bench: Bench) -> None:
    """The stand-in samples like the in-process sampler, so the two runs differ only by rounding."""
    settings = bench.table()
    whole = bench.train("whole", **settings)
    assert server.seen.count("/collective_rpc") == 3, "weights are sent once per iteration"
    bench.train("process", **settings | {"server": None})
    assert len(bench.rows("whole")) == 3
    for row, alone in zip(bench.rows("whole"), bench.rows("process"), strict=True):
        assert row["sampler_gap"] < 1e-4
        assert row["importance_weight"] == pytest.approx(1, abs=1e-4)
        assert row["responses_missing"] == 0
        for name in ("reward", "policy_loss", "kl_reference"):
            assert row[name] == pytest.approx(alone[name], abs=1e-3), name
    bench.train("cut", callback=lambda metrics: metrics["steps"] >= 16, **settings)
    resumed = surefoot.resume(bench.root / "cut")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


# ---- one iteration ahead ------------------------------------------------------------------------------------------------


def test_server_samples_the_next_responses_during_the_update(server: StandIn, bench: Bench) -> None:
    settings = bench.table(ahead=1)
    learned, waited = threading.Event(), []

    def waits(number: int, path: str, body: dict[str, Any]) -> Any:
        if path == ASK and number == 1 + 16:  # the probe, and the first iteration
            waited.append(learned.wait(60))

    server.fault = waits
    bench.train("run", callback=lambda metrics: learned.set(), **settings)
    assert waited == [True]
    assert len(bench.rows("run")) == 3


def test_responses_sampled_ahead_use_the_previous_weights(bench: Bench) -> None:
    settings = bench.table(ahead=1, evaluated=True)
    bench.train("run", **settings)
    rows = bench.rows("run")
    assert [row["sampler_lag"] for row in rows] == [0, 4, 4]
    assert [row["data_epochs"] for row in rows] == [16 / 40, 32 / 40, 48 / 40]
    settings["sampling"]["ahead"] = 0
    first = LanguageWorld(make_recipe({"kind": "language", **settings, "server": None}))
    state = LearnerState.seeded(1, 48)
    for row in rows[:2]:  # no update between them
        assert first.collector.collect(state).metrics["reward"] == pytest.approx(row["reward"], abs=1e-3)
        state.steps += 16
    assert rows[0]["sampler_kl"] < 1e-6 < rows[1]["sampler_kl"]
    assert rows[0]["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert all(row["responses_missing"] == 0 for row in rows)


@pytest.mark.slow
def test_resume_when_sampling_ahead_keeps_the_position_and_uses_new_weights(bench: Bench) -> None:
    bench.train("cut", callback=lambda metrics: metrics["steps"] >= 16, **bench.table(ahead=1, evaluated=True))
    surefoot.resume(bench.root / "cut")
    assert [row["data_epochs"] for row in bench.rows("cut")] == [16 / 40, 32 / 40, 48 / 40]
    assert [row["sampler_lag"] for row in bench.rows("cut")] == [0, 0, 4]


@pytest.mark.slow
def test_two_ranks_sample_ahead_without_missing_responses(server: StandIn, bench: Bench, tmp_path: Path) -> None:
    server.fault = lambda number, path, body: time.sleep(0.02 if path == ASK and number % 2 else 0)  # one is slower
    settings = bench.table(ahead=1, evaluated=True, steps=64)
    on_ranks(2, lambda _: bench.train("run", **settings) and None, tmp_path / "results")
    assert [row["sampler_lag"] for row in bench.rows("run")] == [0, 4, 4, 4]
    assert all(row["responses_missing"] == 0 for row in bench.rows("run"))


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_settings", "message"),
    [
        ({}, "has no /weight_info: it is not vLLM, too old, or without VLLM_"),
        ({"model": "mine"}, "serves 'policy', not 'mine'; set server.model, or start it: VLLM_SERVER"),
        ({"longest": 500}, "has a context of 128 tokens, and prompts with their responses have up to 500; start it:"),
        ({"url": "http://gpu-7:8000"}, "is another machine; name a folder that both machines read"),
        ({"url": ""}, ": can't be reached ("),
    ],
)
def test_servers_that_can_not_serve_the_model_are_rejected_with_a_remedy(
    server_settings: dict[str, Any], message: str, server: StandIn, bench: Bench
) -> None:
    if server_settings.get("url") == "":
        server_settings = {"url": closed_port()}
    if not server_settings:
        server.fault = lambda number, path, body: (404, {"detail": "Not Found"}) if path == "/weight_info" else None
    assert message in rejection(lambda: bench.engine(**server_settings))


def test_server_that_rejects_weights_goes_on_sampling(server: StandIn, bench: Bench) -> None:
    server.fault = lambda number, path, body: (400, {"error": "no"}) if path == "/collective_rpc" else None
    assert "returned 400 Bad Request" in rejection(lambda: bench.engine().use(0))
    assert not server.paused


def test_servers_with_other_weights_or_temperature_are_detected_by_their_log_probs(
    server: StandIn, bench: Bench, other: Path
) -> None:
    def raw(number: int, path: str, body: dict[str, Any]) -> None:
        if path == ASK:
            body["temperature"] = 0.3

    server.fault = raw
    text = rejection(lambda: bench.engine().use(0))
    assert "those of a prompt don't: they are not those of sampling.temperature=0.8; start it:" in text
    server.fault = lambda number, path, body: (200, {}) if path == "/collective_rpc" else None
    bench.folder = other
    text = rejection(lambda: bench.engine().use(0))
    assert "nats on average (server.tolerance=0.05): it has another model or lower precision; start it:" in text


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, b"<html>"), "returned no completion ('<html>'); check that it is vLLM"),
        ((200, {"choices": [{"finish_reason": "stop", "text": "hi"}]}), "returned no token ids or log-probabilities; update"),
        ((400, {"error": "no"}), "returned 400 Bad Request"),
        ("slow", "did not answer within server.timeout="),
    ],
)
def test_unexpected_server_replies_raise_a_one_line_error(reply: Any, message: str, server: StandIn, bench: Bench) -> None:
    engine = bench.engine()
    engine.use(0)
    if reply == "slow":
        engine.settings, reply = engine.settings.model_copy(update={"timeout": 0.3}), None
        server.fault = lambda number, path, body: time.sleep(1.0) if path == ASK else None
    else:
        server.fault = lambda number, path, body: reply if path == ASK else None
    assert message in rejection(lambda: engine.sample(request()))


def test_truncated_reply_is_missing_and_the_others_are_kept(server: StandIn, bench: Bench) -> None:
    engine = bench.engine(at_once=1)
    engine.use(0)
    whole = engine.sample(request()).responses()
    start = server.seen.count(ASK)

    def truncate(reply: Any) -> Any:
        choice = reply[1]["choices"][0]
        choice["finish_reason"], choice["token_ids"] = "length", choice["token_ids"][:1]
        choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:1]
        return reply

    server.fault = lambda number, path, body: truncate if path == ASK and number - start in (2, 7) else None
    drawn = engine.sample(request())
    assert [row for row, reason in enumerate(drawn.finish_reasons) if reason == "error"] == [2, 7]
    assert drawn.responses() == [[] if row in (2, 7) else ids for row, ids in enumerate(whole)]


def test_request_to_a_busy_server_is_retried(server: StandIn, bench: Bench) -> None:
    engine = bench.engine(retries=2)
    engine.use(0)
    asked: dict[str, int] = {}

    def busy(number: int, path: str, body: dict[str, Any]) -> Any:
        key = json.dumps(body)
        asked[key] = asked.get(key, 0) + 1
        return (503, {}) if path == ASK and asked[key] <= 2 else None

    server.fault = busy
    assert engine.sample(request()).missing is None


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_run_ends_with_one_line_if_the_server_dies_and_can_be_resumed(ahead: bool, server: StandIn, bench: Bench) -> None:
    dead = threading.Event()

    def dies(number: int, path: str, body: dict[str, Any]) -> Any:
        if path == ASK and number >= (1 + 16 if ahead else 1 + 16 + 1 + 9):  # with the probes of two iterations
            dead.set()
        return (0, None) if dead.is_set() else None

    server.fault = dies
    settings = bench.table({"at_once": 1}, ahead=int(ahead))
    text = rejection(lambda: bench.train("run", **settings))
    assert text.startswith(f"server.url={server.url!r}: can't be reached")
    assert bench.rows("run")[0]["responses_missing"] == 0
    dead.clear()
    server.fault = lambda number, path, body: None
    surefoot.resume(bench.root / "run")
    assert len(bench.rows("run")) == 3


def test_missing_responses_are_masked_and_counted(server: StandIn, bench: Bench) -> None:
    server.fault = lambda number, path, body: (0, None) if path == ASK and number >= 1 + 11 else None
    rollout = collected(bench.recipe({"at_once": 1}))
    assert rollout.metrics["responses_missing"] == 5 / 16
    assert rollout.metrics["without_score"] == 5 / 16
    assert rollout.mask.any(-1).tolist() == [True] * 11 + [False] * 5
    assert rollout.rewards.isfinite().all()


TALK = """
class Talk:
    def reset(self, row):
        self.turns = 0
        return row["prompt"]
    def step(self, response):
        self.turns += 1
        return " and ", float(len(set(response))), self.turns >= 3
"""


@pytest.mark.slow
def test_server_samples_every_turn_and_unanswered_conversations_are_masked(server: StandIn, bench: Bench) -> None:
    (bench.root / "talk.py").write_text(TALK)
    table = bench.table({"at_once": 1}, turns={"environment": f"{bench.root}/talk.py:Talk"}, reward={"missing_eos": "none"})
    table["sampling"] = {"prompts": 4, "max_tokens": 8, "temperature": 0.8, "stop": ["e", "a", "o", "t"]}
    served, alone = (collected(bench.recipe(**table | changes)) for changes in ({}, {"server": None}))
    lost = server.seen.count(ASK) + 1 + 4 + 1  # after the probe and the first turns, the second answer of the second turns
    aborted = (200, {"choices": [{"finish_reason": "abort", "token_ids": []}]})
    server.fault = lambda number, path, body: aborted if number == lost else None
    with_loss = collected(bench.recipe(**table))
    assert torch.equal(served.actions, alone.actions), "the same conversations as with in-process sampling"
    assert served.metrics["turns"] == alone.metrics["turns"] > 1
    assert served.metrics["responses_missing"] == 0
    assert with_loss.metrics["responses_missing"] == 1 / 4
    assert with_loss.mask.any(-1).sum() == 3


def test_weights_of_another_run_are_detected_and_a_restarted_server_gets_them_again(
    server: StandIn, bench: Bench, other: Path
) -> None:
    engine, second = bench.engine(), bench.engine()
    engine.use(0)
    before = engine.sample(request())
    second.use(0)
    text = rejection(lambda: engine.sample(request()))
    assert f"its weights are {second.label}, not {engine.label}: another run uses it; give each run its own server" in text
    server.version = "default"
    server.load(other)
    text = rejection(lambda: engine.sample(request()))
    assert f"its weights are default, not {engine.label}: it was started again, then resume" in text
    engine.use(0)
    assert engine.sample(request()).responses() == before.responses()


# ---- a real vLLM --------------------------------------------------------------------------------------------------------

VLLM = os.environ.get("SUREFOOT_VLLM", "")
START = 1500
"""seconds that a server may take to start on a busy machine"""


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Bench]:
    """A real CPU server with a small Llama, started by the recipe's command."""
    folder = tiny.write_folder(
        tmp_path / "model", "llama", hidden_size=128, intermediate_size=256
    )  # vLLM has no heads of width 8
    bench = Bench(tmp_path, folder)
    command = serve_command(bench.recipe(), str(folder), 96).partition("vllm serve ")[2]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    words, log = (
        [f"{VLLM}/bin/vllm", "serve", *shlex.split(command), "--enforce-eager", "--max-num-seqs", "64"],
        tmp_path / "log",
    )
    with log.open("w") as file:
        process = subprocess.Popen(words, env=os.environ | settings, stdout=file, stderr=file)
    try:
        client, ready, ends = http_client.HttpClient(bench.url), False, time.monotonic() + START
        with client.open() as connection:
            while not ready:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < ends, log.read_text()[-3000:]
                with suppress(SurefootError):
                    client.request(connection, time.monotonic() + 10, url=f"{bench.url}/health", method="GET")
                    ready = True
                time.sleep(1)
        yield bench
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.skipif(not VLLM, reason="SUREFOOT_VLLM does not name an environment that has vLLM")
@pytest.mark.slow
@pytest.mark.timeout(START + 600)
def test_real_vllm_has_the_trainers_log_probs_before_and_after_an_update_and_trains(vllm: Bench) -> None:
    engine = vllm.engine(timeout=300)
    engine.use(0)
    first, again = engine.sample(request()), engine.sample(request())
    assert first.responses() == again.responses(), "equal seeds give equal responses"
    assert set(first.finish_reasons) == {"stop", "length"}
    expect_own_log_probs(engine.model, PROMPTS, first, 0.8, within=1e-4)
    moved(engine.model, by=0.05)
    engine.use(1)
    after = engine.sample(request())
    assert after.responses() != first.responses()
    expect_own_log_probs(engine.model, PROMPTS, after, 0.8, within=1e-4)
    stop = engine.sample(request(eos_ids=(1,), stop=["e", "st"]))
    assert "stop" in stop.finish_reasons
    for ids, reason in zip(stop.responses(), stop.finish_reasons, strict=True):
        ends = ids[-1] == 1 or any(word in engine.tokens.decode(ids) for word in ("e", "st"))
        assert ends == (reason == "stop")
    for prompt, ids in zip(PROMPTS, engine.sample(request(greedy=True, samples=1, seeds=())).responses(), strict=True):
        with torch.no_grad():
            logits = engine.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert ids == logits.argmax(-1).tolist()
    engine.close()
    settings = vllm.table({"timeout": 300})
    whole = vllm.train("whole", **settings)
    assert all(row["sampler_gap"] < 1e-4 and row["responses_missing"] == 0 for row in vllm.rows("whole"))
    vllm.train("cut", callback=lambda metrics: metrics["steps"] >= 16, **settings)
    resumed = surefoot.resume(vllm.root / "cut")
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, atol=1e-5, rtol=0, msg=name)
