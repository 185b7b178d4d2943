"""The engine "vllm": a running vLLM server samples, by its OpenAI-compatible completions with token ids and log-probabilities.

New weights go through a folder that both read: the server pauses, loads them, drops its cache of prefixes and goes on. A
version names the weights on the server; a probe compares its log-probabilities with the trainer's.
The server needs ``VLLM_SERVER_DEV_MODE=1``, which adds the endpoints for weights, so it must not be open to others.
"""

import json
import secrets
import shlex
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from surefoot.calls import DeadlineExceeded, in_threads
from surefoot.errors import SurefootError
from surefoot.language.data.tokens import Tokens
from surefoot.language.http_client import HttpClient, is_local
from surefoot.language.models.loading import save_model
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import (
    Answer,
    Engine,
    EngineName,
    Request,
    Samples,
    check_request,
    detector_for,
    samples_of,
)
from surefoot.language.sampling.sampler import eval_mode, log_softmax
from surefoot.ranks.collectives import bit_sum, from_first, rank
from surefoot.recipes.language import LanguageRecipe, ServerSettings

if TYPE_CHECKING:
    import httpx2

PROBE = 24
"""tokens of a probe that the server reads, and a third as many that it samples"""
UNNAMED = "default"
"""the version of the weights that a server starts with"""
POLL = 0.2
"""seconds between two looks at the version of the server's weights"""


class VllmServer(Engine):
    """Samples on a vLLM server with the trainer's weights; of several ranks, the first sends weights and all sample.

    longest   tokens of the longest prompt with its response

    Raises SurefootError, with the command that starts the server, if there is none, or it serves another model or too short a
    context.
    """

    name: EngineName = "vllm"
    exact = False

    def __init__(self, recipe: LanguageRecipe, model: Any, tokens: Tokens, folder: str, longest: int) -> None:
        settings = self.settings = recipe.server or ServerSettings()
        self.model, self.tokens, self.temperature = model, tokens, recipe.sampling.temperature
        self.longest = longest
        self.command = serve_command(recipe, folder, longest)
        self.run = from_first(secrets.token_hex(4))
        """part of every version, so that weights of another run are not taken for this run's"""
        self.sent, self.label = 0, ""
        """how many weights were sent, and the name of the last ones on the server"""
        self.checksum: int | None = None
        """of the weights that were sent"""
        self.weights = None if settings.weights is None else Path(settings.weights).expanduser()
        self.remove: Any = None
        """removes a temporary folder of weights"""
        limit, then = f"server.timeout={settings.timeout:g} s", f"or start it: {self.command}"
        self.http = HttpClient(settings.url, token_from=settings.token_from, retries=settings.retries, limit=limit, then=then)
        try:
            self.http.ready("sampling.engine = 'vllm'")
        except SurefootError as error:
            raise self._error(str(error)) from None
        if self.weights is None and not is_local(settings.url):
            raise SurefootError(
                f"server.weights: server.url={settings.url!r} is another machine; name a folder that both machines read"
            )
        self.client: httpx2.Client | None = None
        """while something is asked of the server"""
        with self._connected():
            found = self._ask("GET", "version").get("version", "of unknown version")
            self._check_model()
            self._ask("GET", "weight_info")
        self.reason = f"vLLM {found} at {self.http.url}"

    # ---- weights ----

    def use(self, version: int | None) -> None:
        """Send the trainer's weights, unless the server has them; again to a server that was started again."""
        fresh = False
        if version is None or version != self.version:
            total = sum(int(bit_sum(tensor)) for tensor in (*self.model.parameters(), *self.model.buffers()))
            if fresh := total != self.checksum:
                self.checksum, self.sent = total, self.sent + 1
                self.label = f"{self.run}-{self.sent}-{'start' if version is None else version}"
        with self._connected():
            if rank() != 0:
                self._wait_for_label()
            elif (label := self._label_on_server()) != self.label:
                if not fresh and label != UNNAMED:
                    raise self._other_weights(label)
                self._send()
                self._probe()
        self.version = version

    def _send(self) -> None:
        """Let the server load the weights from the folder, while it samples nothing, and name them."""
        if self.weights is None:
            self.weights = Path(tempfile.mkdtemp(prefix="surefoot-weights-"))
            self.remove = weakref.finalize(self, shutil.rmtree, self.weights, ignore_errors=True)
        self.weights.mkdir(parents=True, exist_ok=True)
        folder = self.weights / self.label
        before = [path for path in folder.parent.iterdir() if path.name.startswith(f"{self.run}-")]
        save_model(self.model, self.tokens.tokenizer, folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        self._ask("POST", "pause?mode=abort")
        try:
            self._ask("POST", "collective_rpc", reload)
            self._ask("POST", "reset_prefix_cache")
            self._ask("POST", "update_weight_version", {"new_version": self.label})
        except SurefootError:
            with suppress(SurefootError):
                self._ask("POST", "resume")
            raise
        self._ask("POST", "resume")
        for old in before:
            shutil.rmtree(old, ignore_errors=True)

    def _wait_for_label(self) -> None:
        """Wait until the first rank has sent the weights."""
        ends = time.monotonic() + self.settings.timeout
        while self._label_on_server() != self.label:
            if time.monotonic() > ends:
                raise self._error(f"did not get the weights {self.label} within {self.http.limit}; see the first rank")
            time.sleep(POLL)

    def _label_on_server(self) -> str:
        return str(self._ask("GET", "weight_info").get("weight_version"))

    def _other_weights(self, label: str) -> SurefootError:
        what = "it was started again" if label == UNNAMED else "another run uses it; give each run its own server"
        return self._error(f"its weights are {label}, not {self.label}: {what}, then resume from the last checkpoint")

    def _probe(self) -> None:
        """Compare the server's log-probabilities with the trainer's, of given tokens and of sampled ones.

        Raises SurefootError if they differ by more than ``server.tolerance`` nats on average.
        """
        length = max(2, min(PROBE, self.longest * 3 // 4))
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = [37 * n % vocabulary for n in range(1, length + 1)]
        request = Request([ids], [1], max(1, length // 3), (), self.tokens.pad_id, temperature=self.temperature)
        try:
            answer = self._complete(ids, 1, request, {"prompt_logprobs": 0}, time.monotonic() + self.settings.timeout)
        except DeadlineExceeded:
            raise self._error(f"did not answer the first request within {self.http.limit}; raise it") from None
        choice = self._choice(answer)
        try:
            read = [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)]
        except (KeyError, TypeError, ValueError):
            raise self._error(f"returned no log-probabilities of a prompt; update vLLM, or start it: {self.command}") from None
        sampled, log_probs, _ = self._answer(choice, request)
        device = self.model.get_input_embeddings().weight.device
        with torch.no_grad(), eval_mode(self.model):
            logits: Tensor = self.model(input_ids=torch.tensor([[*ids, *sampled]], device=device)).logits[0, :-1]
        after = torch.tensor([*ids[1:], *sampled], device=device).unsqueeze(-1)
        plain, scaled = (log_softmax(logits, t).gather(-1, after).squeeze(-1).cpu() for t in (1.0, self.temperature))
        gap = float((plain[: len(read)] - torch.tensor(read)).abs().mean())
        if not gap <= self.settings.tolerance:
            raise self._error(
                f"its log-probabilities differ from the trainer's by {gap:.2g} nats on average (server.tolerance="
                f"{self.settings.tolerance:g}): it has another model or lower precision; start it: {self.command}"
            )
        gap = float((scaled[len(read) :] - torch.tensor(log_probs)).abs().mean())
        if not gap <= self.settings.tolerance:
            raise self._error(
                f"its log-probabilities of sampled tokens differ from the trainer's by {gap:.2g} nats on average, those of a "
                f"prompt don't: they are not those of sampling.temperature={self.temperature:g}; start it: {self.command}"
            )

    # ---- sampling ----

    def sample(self, request: Request) -> Samples:
        """One request for each response, ``server.at_once`` at the same time.

        A response that the server does not return, or returns truncated, is missing. Raises SurefootError if all are, or if the
        weights were changed meanwhile.
        """
        check_request(self.model, request)
        count, samples = len(request.prompts), request.samples
        ends, down = time.monotonic() + self.settings.timeout, threading.Event()
        problems: list[str] = []
        device = self.model.get_input_embeddings().weight.device
        detector = detector_for(request, device)

        def one(number: int) -> Answer:
            if down.is_set():
                return None
            seed = 0 if request.greedy else request.seeds[number]
            try:
                response = self._complete(request.prompts[number // samples], seed, request, {}, ends)
            except (SurefootError, DeadlineExceeded) as error:
                down.set()  # after all retries; the other requests would only wait as long
                problems.append(str(error) or f"did not answer within {self.http.limit}; raise it, or lower server.at_once")
                return None
            try:
                answer = self._answer(self._choice(response), request)
            except SurefootError as error:
                problems.append(str(error))
                return None
            if request.on_finished is not None:
                ids = answer[0][: request.max_tokens]
                request.on_finished(number, ids[: detector.length(ids) or None])
            return answer

        with self._connected():
            answers = in_threads(one, range(count * samples), self.settings.at_once)
            if all(answer is None for answer in answers):
                raise self._error(problems[0])
            label = None if down.is_set() else self._label_on_server()
        if label not in (None, self.label):
            raise self._other_weights(label)
        return samples_of(request, answers, device, "vllm", self.version)

    def _complete(self, prompt: Any, seed: int, request: Request, more: dict[str, Any], ends: float) -> "httpx2.Response":
        body = {
            "model": self.settings.model,
            "prompt": list(prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0 if request.greedy else request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop": list(request.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": not Ends(self.tokens, tuple(request.stop)).mixed,  # as stop texts are searched for
            "spaces_between_special_tokens": False,
            "ignore_eos": True,  # the run's own ends, in the next line, count instead
            "stop_token_ids": list(request.eos_ids),
            "logprobs": 0,
            "return_token_ids": True,
            **more,
        }
        assert self.client is not None
        return self.http.request(self.client, ends, json.dumps(body).encode(), url=self._url("v1/completions"))

    def _choice(self, response: "httpx2.Response") -> dict[str, Any]:
        try:
            (choice,) = response.json()["choices"]
            return dict(choice)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._error(f"returned no completion{self.http.excerpt(response)}; check that it is vLLM") from None

    def _answer(self, choice: dict[str, Any], request: Request) -> tuple[list[int], list[float], bool]:
        """Tokens and log-probabilities of a completion. Raises SurefootError for one that is truncated or has none."""
        try:
            ids = [int(token) for token in choice["token_ids"]]
            log_probs = [float(number) for number in choice["logprobs"]["token_logprobs"]]
        except (KeyError, TypeError, ValueError):
            raise self._error(f"returned no token ids or log-probabilities; update vLLM, or start it: {self.command}") from None
        reason = choice.get("finish_reason")
        if len(ids) != len(log_probs) or not ids or reason not in ("stop", "length"):
            raise self._error(f"returned {len(ids)} tokens with {len(log_probs)} log-probabilities, finished by {reason!r}")
        if reason == "length" and len(ids) < request.max_tokens:
            raise self._error(
                f"truncated a response at {len(ids)} of {request.max_tokens} tokens; raise its --max-model-len: {self.command}"
            )
        return ids, log_probs, reason == "stop"

    # ---- requests ----

    def _check_model(self) -> None:
        table = self._ask("GET", "v1/models")
        served = {str(model.get("id")): model for model in table.get("data", []) if isinstance(model, dict)}
        if self.settings.model not in served:
            raise self._error(
                f"serves {', '.join(map(repr, served)) or 'no model'}, not {self.settings.model!r}; set server.model, or start "
                f"it: {self.command}"
            )
        context = served[self.settings.model].get("max_model_len")
        if isinstance(context, int) and context < self.longest:
            raise self._error(
                f"has a context of {context} tokens, and prompts with their responses have up to {self.longest}; start it: "
                f"{self.command}"
            )

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connections for some requests; none is left open between batches."""
        with self.http.open(self.settings.at_once) as self.client:
            yield
        self.client = None

    def _url(self, path: str) -> str:
        return f"{self.http.url.rstrip('/')}/{path}"

    def _ask(self, method: Literal["GET", "POST"], path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the server answers; nothing if that is no table."""
        assert self.client is not None
        ends, content = time.monotonic() + self.settings.timeout, None if method == "GET" else json.dumps(body or {}).encode()
        try:
            response = self.http.request(self.client, ends, content, url=self._url(path), method=method)
        except DeadlineExceeded:
            raise self._error(f"did not answer /{path} within {self.http.limit}; check the server, or raise it") from None
        except SurefootError as error:
            text = str(error)
            if "returned 404" in text:
                text = f"has no /{path}: it is not vLLM, too old, or without VLLM_SERVER_DEV_MODE=1; start it: {self.command}"
            raise self._error(text) from None
        try:
            table = response.json() if response.content else {}
        except (ValueError, RecursionError):
            table = {}
        return table if isinstance(table, dict) else {}

    def _error(self, what: str) -> SurefootError:
        prefix = f"server.url={self.settings.url!r}: "
        return SurefootError(what if what.startswith(prefix) else prefix + what)

    def close(self) -> None:
        """Send nothing more, and remove the weights; the server keeps the last ones."""
        if self.client is not None:  # while it samples ahead
            self.client.close()
        if rank() == 0 and self.weights is not None and self.weights.is_dir():
            for old in self.weights.glob(f"{self.run}-*"):
                shutil.rmtree(old, ignore_errors=True)
        if self.remove is not None:
            self.remove()


def serve_command(recipe: LanguageRecipe, folder: str, longest: int) -> str:
    """The command that starts a server for a recipe.

    folder    of the model, or its hub id
    longest   tokens of the longest prompt with its response
    """
    settings = recipe.server or ServerSettings()
    parts = urlsplit(settings.url)
    dtype = "float32" if recipe.precision == "float32" else "bfloat16"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    code = " --trust-remote-code" if recipe.trust_remote_code else ""
    key = "" if settings.token_from is None else f' --api-key "${settings.token_from}"'
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(folder)} --served-model-name {shlex.quote(settings.model)} "
        f"--dtype {dtype} --max-model-len {longest} --host {parts.hostname or '127.0.0.1'} --port {port} "
        f"--generation-config vllm --logprobs-mode processed_logprobs{code}{key}"
    )
