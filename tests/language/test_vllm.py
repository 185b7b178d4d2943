"""The "vllm" engine against a local stand-in server: weights, requests, runs, and server failures.

If ``SUREFOOT_VLLM`` is the path of an environment with vLLM, the slow tests at the end start a real server.
"""

import json
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import on_ranks

import surefoot
from surefoot.core.rollout import LearnerState
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


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)


@pytest.fixture
def server(folders: dict[str, Path]) -> Iterator[StandIn]:
    made = StandIn(folders["llama"])
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Prompts and a reward function."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i % 7} says "}) + "\n" for i in range(40)))
    (tmp_path / "rewards.py").write_text("def score(responses):\n    return [float(len(set(text))) for text in responses]\n")
    return tmp_path


def fields(files: Path, folder: Path, url: str, **server: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "steps": 48,
        "data": {"train": str(files / "prompts.jsonl"), "max_length": 32},
        "sampling": {"prompts": 16, "max_tokens": 8, "temperature": 0.8},
        "server": {"url": url, "retries": 1, **server},
        "reward": {"terms": [{"function": f"{files}/rewards.py:score"}], "missing_eos": "none"},
        "optimizer": {"learning_rate": 1e-3},
        "objective": {"reuse": {"epochs": 2, "minibatches": 2}, "importance_cap": 3.0},
    }


def recipe_of(files: Path, folder: Path, url: str, **server: Any) -> LanguageRecipe:
    recipe = make_recipe({"kind": "language", **fields(files, folder, url, **server)})
    assert isinstance(recipe, LanguageRecipe)
    return recipe


def engine_of(files: Path, folder: Path, url: str, longest: int = 64, **server: Any) -> VllmServer:
    recipe = recipe_of(files, folder, url, **server)
    return VllmServer(recipe, *load_base(recipe), str(folder), longest)


# ---- weights and requests -----------------------------------------------------------------------------------------------


def test_sampling_uses_the_sent_weights_not_the_servers_initial_ones(
    server: StandIn, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = tiny.write_folder(tmp_path / "other", "llama", seed=9)
    engine = engine_of(files, other, server.url)
    engine.use(None)
    drawn = engine.sample(request())
    expect_own_log_probs(engine.model, PROMPTS, drawn, 0.8, within=1e-4)
    assert drawn.path == "vllm"
    assert server.folder.name == engine.label == server.version
    engine.close()


def test_weights_are_sent_once_per_version_and_old_folders_are_removed(
    server: StandIn, files: Path, folders: dict[str, Path]
) -> None:
    engine = engine_of(files, folders["llama"], server.url, weights=str(files / "weights"))
    sent = 0
    for version, changed in ((None, True), (None, False), (0, False), (4, True), (4, False), (None, False), (9, True)):
        if changed:
            with torch.no_grad():
                engine.model.lm_head.weight.mul_(1.01)
        engine.use(version)
        sent += changed
        assert [path.name for path in (files / "weights").iterdir()] == [server.version]
        for path in ("/collective_rpc", "/resume", "/reset_prefix_cache"):
            assert server.seen.count(path) == sent, (version, path)
    engine.close()
    assert not list((files / "weights").iterdir())


def test_an_adapter_is_sent_merged(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    recipe = make_recipe({"kind": "language", **fields(files, folders["llama"], server.url), "adapter": {"rank": 2}})
    world = LanguageWorld(recipe)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in world.policy.model.named_parameters():
            if ".lora_B" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    rollout = world.collector.collect(LearnerState.seeded(1, 48))
    assert rollout.metrics["sampler_gap"] < 1e-4
    world.close()


def test_4_bit_base_is_dequantised_before_sending(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    pytest.importorskip("bitsandbytes")
    changes = {"adapter": {"rank": 2, "quantize": "nf4"}}
    world = LanguageWorld(make_recipe({"kind": "language", **fields(files, folders["llama"], server.url), **changes}))  # type: ignore[arg-type]
    assert world.collector.collect(LearnerState.seeded(1, 48)).metrics["sampler_gap"] < 1e-4
    world.close()


def test_server_token_is_sent_with_every_request(
    server: StandIn, files: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KEY", "hush")
    engine = engine_of(files, folders["llama"], server.url, token_from="VLLM_KEY")
    engine.use(0)
    engine.sample(request())
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer hush"}
    assert engine.command.endswith('--api-key "$VLLM_KEY"')
    assert "hush" not in engine.command


def test_serve_command_has_the_model_precision_and_context_of_the_recipe(files: Path, folders: dict[str, Path]) -> None:
    recipe = recipe_of(files, folders["llama"], "http://127.0.0.1:9123", model="mine")
    assert serve_command(recipe, "/some where/model", 96) == (
        "VLLM_SERVER_DEV_MODE=1 vllm serve '/some where/model' --served-model-name mine --dtype float32 --max-model-len 96 "
        "--host 127.0.0.1 --port 9123 --generation-config vllm --logprobs-mode processed_logprobs"
    )


def test_check_prints_the_command_that_starts_the_server(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    from surefoot.diagnostics.recipe import check_recipe
    from surefoot.runs.factory import prepared_world

    recipe = recipe_of(files, folders["llama"], server.url)
    shown = {finding.name: finding.what for finding in check_recipe(recipe, prepared_world)}
    assert shown["sampling"] == f"engine vllm (vLLM stand-in at {server.url})"
    assert shown["server"].startswith("VLLM_SERVER_DEV_MODE=1 vllm serve ")
    assert shown["reward"].startswith("16 numbers for 16 answers")
    missing = check_recipe(recipe_of(files, folders["llama"], closed_port()), prepared_world)
    assert "or start it: VLLM_SERVER_DEV_MODE=1 vllm serve " in missing[0].line


# ---- runs ---------------------------------------------------------------------------------------------------------------


def test_run_with_a_server_matches_in_process_sampling(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    """The stand-in samples like the in-process sampler, so the two runs differ only by rounding."""
    settings = fields(files, folders["llama"], server.url)
    surefoot.train("language", run_dir=files / "server", **settings)
    surefoot.train("language", run_dir=files / "process", **{**settings, "server": None})
    rows, others = (read_metrics(files / name / "metrics.jsonl") for name in ("server", "process"))
    assert len(rows) == 3
    for row, other in zip(rows, others, strict=True):
        assert row["sampler_gap"] < 1e-4
        assert row["importance_weight"] == pytest.approx(1, abs=1e-4)
        assert row["responses_missing"] == 0
        for name in ("reward", "policy_loss", "kl_reference"):
            assert row[name] == pytest.approx(other[name], abs=1e-3), name
    assert server.seen.count("/collective_rpc") == 3, "weights are sent once per iteration"


def test_run_with_a_server_resumes_bit_for_bit(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    settings = fields(files, folders["llama"], server.url)
    whole = surefoot.train("language", run_dir=files / "whole", **settings)
    surefoot.train("language", run_dir=files / "cut", callback=lambda metrics: metrics["steps"] >= 16, **settings)
    resumed = surefoot.resume(files / "cut")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


# ---- one iteration ahead ------------------------------------------------------------------------------------------------


def ahead(files: Path, folder: Path, url: str) -> dict[str, Any]:
    """Settings with sampling one iteration ahead and evaluations in between."""
    made = fields(files, folder, url)
    made["sampling"] |= {"ahead": 1}
    made["data"] |= {"held_out": str(files / "prompts.jsonl")}
    return made | {"evaluation": {"every": 16, "rows": 4}}


def test_server_samples_the_next_responses_during_the_update(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    settings = fields(files, folders["llama"], server.url)
    settings["sampling"] |= {"ahead": 1}
    learned, waited = threading.Event(), []

    def waits(number: int, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions" and number == 1 + 16:  # the probe, and the first iteration
            waited.append(learned.wait(60))

    server.fault = waits
    surefoot.train("language", run_dir=files / "run", callback=lambda metrics: learned.set(), **settings)
    assert waited == [True]
    assert len(read_metrics(files / "run" / "metrics.jsonl")) == 3


def test_responses_sampled_ahead_use_the_previous_weights(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    settings = ahead(files, folders["llama"], server.url)
    surefoot.train("language", run_dir=files / "run", **settings)
    rows = read_metrics(files / "run" / "metrics.jsonl")
    assert [row["sampler_lag"] for row in rows] == [0, 4, 4]
    assert [row["data_epochs"] for row in rows] == [16 / 40, 32 / 40, 48 / 40]
    in_process = {**settings, "server": None, "sampling": settings["sampling"] | {"ahead": 0}}
    first = LanguageWorld(make_recipe({"kind": "language", **in_process}))  # type: ignore[arg-type]
    state = LearnerState.seeded(1, 48)
    for row in rows[:2]:  # no update between them
        assert first.collector.collect(state).metrics["reward"] == pytest.approx(row["reward"], abs=1e-3)
        state.steps += 16
    assert rows[0]["sampler_kl"] < 1e-6 < rows[1]["sampler_kl"]
    assert rows[0]["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert all(row["responses_missing"] == 0 for row in rows)


@pytest.mark.slow
def test_resume_when_sampling_ahead_keeps_the_position_and_uses_new_weights(
    server: StandIn, files: Path, folders: dict[str, Path]
) -> None:
    settings = ahead(files, folders["llama"], server.url)
    surefoot.train("language", run_dir=files / "cut", callback=lambda metrics: metrics["steps"] >= 16, **settings)
    surefoot.resume(files / "cut")
    rows = read_metrics(files / "cut" / "metrics.jsonl")
    assert [row["data_epochs"] for row in rows] == [16 / 40, 32 / 40, 48 / 40]
    assert [row["sampler_lag"] for row in rows] == [0, 0, 4]


@pytest.mark.slow
def test_two_ranks_sample_ahead_without_missing_responses(
    server: StandIn, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = ahead(files, folders["llama"], server.url) | {"steps": 64}

    def slow_for_one(number: int, path: str, body: dict[str, Any]) -> None:
        time.sleep(0.02 if path == "/v1/completions" and number % 2 else 0)

    server.fault = slow_for_one

    def body(_: int) -> None:
        surefoot.train("language", run_dir=files / "run", display=None, **settings)

    on_ranks(2, body, tmp_path / "results")
    rows = read_metrics(files / "run" / "metrics.jsonl")
    assert [row["sampler_lag"] for row in rows] == [0, 4, 4, 4]
    assert all(row["responses_missing"] == 0 for row in rows)


@pytest.mark.slow
def test_server_failure_while_sampling_ahead_raises_a_one_line_error(
    server: StandIn, files: Path, folders: dict[str, Path]
) -> None:
    def dies(number: int, path: str, body: dict[str, Any]) -> Any:
        return (0, None) if path == "/v1/completions" and number >= 1 + 16 else None

    server.fault = dies
    settings = fields(files, folders["llama"], server.url)
    settings["sampling"] |= {"ahead": 1}
    text = rejection(lambda: surefoot.train("language", run_dir=files / "run", **settings))
    assert text.startswith(f"server.url={server.url!r}: can't be reached")
    assert len(read_metrics(files / "run" / "metrics.jsonl")) == 1
    server.fault = lambda number, path, body: None
    surefoot.resume(files / "run")
    assert len(read_metrics(files / "run" / "metrics.jsonl")) == 3


# ---- failures -----------------------------------------------------------------------------------------------------------


def rejection(call: Callable[[], Any]) -> str:
    with pytest.raises(SurefootError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text
    return text


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_unreachable_server_error_contains_the_start_command(files: Path, folders: dict[str, Path]) -> None:
    url = closed_port()
    text = rejection(lambda: engine_of(files, folders["llama"], url))
    assert text.startswith(f"server.url={url!r}: can't be reached (")
    assert (
        f"or start it: VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(folders['llama']))} --served-model-name policy"
        in text
    )


def test_server_without_weight_endpoints_is_rejected(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    server.fault = lambda number, path, body: (404, {"detail": "Not Found"}) if path == "/weight_info" else None
    text = rejection(lambda: engine_of(files, folders["llama"], server.url))
    assert ": has no /weight_info: it is not vLLM, too old, or without VLLM_SERVER_DEV_MODE=1; start it: VLLM_SERVER" in text


def test_wrong_model_name_or_too_short_context_is_rejected(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    text = rejection(lambda: engine_of(files, folders["llama"], server.url, model="mine"))
    assert ": serves 'policy', not 'mine'; set server.model, or start it: VLLM_SERVER" in text
    text = rejection(lambda: engine_of(files, folders["llama"], server.url, longest=500))
    assert ": has a context of 128 tokens, and prompts with their responses have up to 500; start it:" in text


def test_server_with_another_model_is_detected_by_its_log_probs(
    server: StandIn, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = tiny.write_folder(tmp_path / "other", "llama", seed=9)
    server.fault = lambda number, path, body: (200, {}) if path == "/collective_rpc" else None
    engine = engine_of(files, other, server.url)
    text = rejection(lambda: engine.use(0))
    assert "nats on average (server.tolerance=0.05): it has another model or lower precision; start it:" in text


def test_log_probabilities_without_the_temperature_are_rejected(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    def raw(number: int, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions":
            body["temperature"] = 0.3
        return None

    server.fault = raw
    engine = engine_of(files, folders["llama"], server.url)
    text = rejection(lambda: engine.use(0))
    assert "those of a prompt don't: they are not those of sampling.temperature=0.8; start it:" in text


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, b"<html>"), "returned no completion ('<html>'); check that it is vLLM"),
        ((200, {"choices": []}), "returned no completion"),
        (
            (200, {"choices": [{"finish_reason": "stop", "text": "hi"}]}),
            "returned no token ids or log-probabilities; update vLLM",
        ),
        ((400, {"error": "no"}), "returned 400 Bad Request"),
    ],
)
def test_unexpected_server_replies_raise_a_one_line_error(
    server: StandIn, files: Path, folders: dict[str, Path], reply: Any, message: str
) -> None:
    engine = engine_of(files, folders["llama"], server.url)
    engine.use(0)
    server.fault = lambda number, path, body: reply if path == "/v1/completions" else None
    assert message in rejection(lambda: engine.sample(request()))


def test_truncated_reply_is_missing_and_the_others_are_kept(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    engine = engine_of(files, folders["llama"], server.url, at_once=1)
    engine.use(0)
    whole = engine.sample(request())
    start = server.seen.count("/v1/completions")

    def truncate(reply: Any) -> Any:
        choice = reply[1]["choices"][0]
        choice["finish_reason"], choice["token_ids"] = "length", choice["token_ids"][:1]
        choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:1]
        return reply

    server.fault = lambda number, path, body: truncate if path == "/v1/completions" and number - start in (2, 7) else None
    drawn = engine.sample(request())
    assert [row for row, reason in enumerate(drawn.finish_reasons) if reason == "error"] == [2, 7]
    assert [ids for row, ids in enumerate(drawn.responses()) if row not in (2, 7)] == [
        ids for row, ids in enumerate(whole.responses()) if row not in (2, 7)
    ]


def test_request_to_a_busy_server_is_retried(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    engine = engine_of(files, folders["llama"], server.url, retries=2)
    engine.use(0)
    asked: dict[str, int] = {}

    def busy(number: int, path: str, body: dict[str, Any]) -> Any:
        key = json.dumps(body)
        asked[key] = asked.get(key, 0) + 1
        return (503, {}) if path == "/v1/completions" and asked[key] <= 2 else None

    server.fault = busy
    assert engine.sample(request()).missing is None


@pytest.mark.slow
def test_run_ends_with_one_line_if_the_server_dies_and_can_be_resumed(
    server: StandIn, files: Path, folders: dict[str, Path]
) -> None:
    dead = threading.Event()

    def dies(number: int, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions" and number >= 1 + 16 + 1 + 9:  # with the probes of two iterations
            dead.set()
        return (0, None) if dead.is_set() else None

    server.fault = dies
    settings = fields(files, folders["llama"], server.url, at_once=1)
    text = rejection(lambda: surefoot.train("language", run_dir=files / "run", **settings))
    assert text.startswith(f"server.url={server.url!r}: can't be reached")
    rows = read_metrics(files / "run" / "metrics.jsonl")
    assert [row["responses_missing"] for row in rows[:1]] == [0]
    dead.clear()
    server.fault = lambda number, path, body: None
    resumed = surefoot.resume(files / "run")
    whole = surefoot.train("language", run_dir=files / "whole", **settings)
    assert resumed.model.state_dict().keys() == whole.model.state_dict().keys()
    assert len(read_metrics(files / "run" / "metrics.jsonl")) == 3


def test_missing_responses_are_masked_and_counted(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    world = LanguageWorld(recipe_of(files, folders["llama"], server.url, at_once=1))
    server.fault = lambda number, path, body: (0, None) if path == "/v1/completions" and number >= 1 + 11 else None
    rollout = world.collector.collect(LearnerState.seeded(1, 48))
    assert rollout.metrics["responses_missing"] == 5 / 16
    assert rollout.metrics["without_score"] == 5 / 16
    assert rollout.mask.any(-1).tolist() == [True] * 11 + [False] * 5
    assert rollout.rewards.isfinite().all()
    world.close()


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
def test_server_samples_every_turn_and_unanswered_conversations_are_masked(
    server: StandIn, files: Path, folders: dict[str, Path]
) -> None:
    (files / "talk.py").write_text(TALK)
    table = {**fields(files, folders["llama"], server.url, at_once=1), "turns": {"environment": f"{files}/talk.py:Talk"}}
    del table["reward"]["terms"]
    table["sampling"] = {"prompts": 4, "max_tokens": 8, "temperature": 0.8, "stop": ["e", "a", "o", "t"]}
    rollouts = []
    for engine in ("vllm", "packed", "vllm"):
        changes = {"sampling": {**table["sampling"], "engine": engine}, "server": table["server"] if engine == "vllm" else None}
        world = LanguageWorld(make_recipe({"kind": "language", **table, **changes}))  # type: ignore[arg-type]
        rollouts.append(world.collector.collect(LearnerState.seeded(1, 48)))
        world.close()
        start = server.seen.count("/v1/completions")
        lost = start + 1 + 4 + 1  # after the probe and the first turns, the second answer of the second turns

        def loses(number: int, path: str, body: dict[str, Any], lost: int = lost) -> Any:
            return (200, {"choices": [{"finish_reason": "abort", "token_ids": []}]}) if number == lost else None

        server.fault = loses
    served, alone, with_loss = rollouts
    assert torch.equal(served.actions, alone.actions), "the same conversations as with in-process sampling"
    assert served.metrics["turns"] == alone.metrics["turns"]
    assert served.metrics["turns"] > 1
    assert served.metrics["responses_missing"] == 0
    assert with_loss.metrics["responses_missing"] == 1 / 4
    assert with_loss.mask.any(-1).sum() == 3


def test_slow_server_hits_the_timeout(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    engine = engine_of(files, folders["llama"], server.url)
    engine.use(0)
    engine.settings = engine.settings.model_copy(update={"timeout": 0.3})
    server.fault = lambda number, path, body: time.sleep(1.0) if path == "/v1/completions" else None
    text = rejection(lambda: engine.sample(request()))
    assert "did not answer within server.timeout=" in text


def test_weights_replaced_by_another_run_are_detected(server: StandIn, files: Path, folders: dict[str, Path]) -> None:
    engine, other = (engine_of(files, folders["llama"], server.url) for _ in range(2))
    engine.use(0)
    other.use(0)
    text = rejection(lambda: engine.sample(request()))
    assert f"its weights are {other.label}, not {engine.label}: another run uses it; give each run its own server" in text


def test_restarted_server_gets_the_weights_again(
    server: StandIn, files: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = engine_of(files, folders["llama"], server.url)
    engine.use(0)
    before = engine.sample(request())
    server.version = "default"
    server.load(tiny.write_folder(tmp_path / "other", "llama", seed=9))
    text = rejection(lambda: engine.sample(request()))
    assert f"its weights are default, not {engine.label}: it was started again, then resume" in text
    engine.use(0)
    assert engine.sample(request()).responses() == before.responses()


def test_remote_server_requires_a_shared_weights_folder(files: Path, folders: dict[str, Path]) -> None:
    text = rejection(lambda: engine_of(files, folders["llama"], "http://gpu-7:8000"))
    assert text == "server.weights: server.url='http://gpu-7:8000' is another machine; name a folder that both machines read"


# ---- a real vLLM --------------------------------------------------------------------------------------------------------

VLLM = os.environ.get("SUREFOOT_VLLM", "")
real = pytest.mark.skipif(not VLLM, reason="SUREFOOT_VLLM does not name an environment that has vLLM")
START = 1500
"""seconds that a server may take to start on a busy machine"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real CPU server with a small Llama, started by the recipe's command. Gives its URL and the model folder."""
    root = tmp_path_factory.mktemp("vllm")
    model = tiny.write_folder(root / "model", "llama", hidden_size=128, intermediate_size=256)  # vLLM has no heads of width 8
    url = closed_port()
    recipe = recipe_of(root, model, url)
    command = serve_command(recipe, str(model), 96).partition("vllm serve ")[2]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (root / "log").open("w") as log:
        process = subprocess.Popen(
            [f"{VLLM}/bin/vllm", "serve", *shlex.split(command), "--enforce-eager", "--max-num-seqs", "64"],
            env=os.environ | settings,
            stdout=log,
            stderr=log,
        )
    try:
        client = http_client.HttpClient(url)
        with client.open() as connection:
            ends = time.monotonic() + START
            while True:
                try:
                    client.request(connection, time.monotonic() + 10, url=f"{url}/health", method="GET")
                    break
                except SurefootError:
                    assert process.poll() is None, (root / "log").read_text()[-3000:]
                    assert time.monotonic() < ends, (root / "log").read_text()[-3000:]
                    time.sleep(1)
        yield url, model
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@real
@pytest.mark.slow
@pytest.mark.timeout(START + 300)
def test_real_vllm_log_probs_match_the_trainer_before_and_after_an_update(vllm: tuple[str, Path], files: Path) -> None:
    url, model = vllm
    engine = engine_of(files, model, url, timeout=300)
    engine.use(0)
    first, again = engine.sample(request()), engine.sample(request())
    assert first.responses() == again.responses(), "equal seeds give equal responses"
    assert set(first.finish_reasons) == {"stop", "length"}
    expect_own_log_probs(engine.model, PROMPTS, first, 0.8, within=1e-4)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    engine.use(1)
    after = engine.sample(request())
    assert after.responses() != first.responses()
    expect_own_log_probs(engine.model, PROMPTS, after, 0.8, within=1e-4)
    stop = engine.sample(request(eos_ids=(1,), stop=["e", "st"]))
    assert "stop" in stop.finish_reasons
    for ids, reason in zip(stop.responses(), stop.finish_reasons, strict=True):
        ends = ids[-1] == 1 or any(word in engine.tokens.decode(ids) for word in ("e", "st"))
        assert ends == (reason == "stop")
    greedy = engine.sample(request(greedy=True, samples=1, seeds=()))
    for prompt, ids in zip(PROMPTS, greedy.responses(), strict=True):
        with torch.no_grad():
            assert (
                ids
                == engine.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            )
    engine.close()


@real
@pytest.mark.slow
@pytest.mark.timeout(START + 300)
def test_run_with_a_real_vllm_trains_and_resumes(vllm: tuple[str, Path], files: Path) -> None:
    url, model = vllm
    settings = fields(files, model, url, timeout=300)
    whole = surefoot.train("language", run_dir=files / "whole", **settings)
    rows = read_metrics(files / "whole" / "metrics.jsonl")
    assert all(row["sampler_gap"] < 1e-4 and row["responses_missing"] == 0 for row in rows)
    surefoot.train("language", run_dir=files / "cut", callback=lambda metrics: metrics["steps"] >= 16, **settings)
    resumed = surefoot.resume(files / "cut")
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, atol=1e-5, rtol=0, msg=name)
