"""What a trained model answers to other programs: rewards of responses, or completions as in OpenAI's API.

A request is a JSON object, and so is its answer; ``inspector.serving`` carries them over HTTP. Requests with the same key are
answered together, and the answer to each depends on that request alone.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.core.seeding import MAX_SEED, derived_seed
from surefoot.errors import SurefootError
from surefoot.files import check_whole, read_toml
from surefoot.language import quiet_transformers
from surefoot.language.chat import write_response
from surefoot.language.data.chat import Dialogue
from surefoot.language.data.rows import (
    TOOLS,
    Row,
    check_same_kind,
    fault_in,
    messages_column,
    require_columns,
    text_or_messages,
)
from surefoot.language.language_model import LanguageModel, check_prompts, load_language_model
from surefoot.language.models.adapters import weights_hash
from surefoot.language.models.classifier import classifier_kind
from surefoot.language.models.loading import HEAD, context_length, read_config
from surefoot.language.rewards.model import ModelReward
from surefoot.language.rewards.scores import Prompt
from surefoot.language.sampling.ends import Ends
from surefoot.language.sampling.engines import Request, check_request
from surefoot.language.sampling.sampler import sample
from surefoot.store.hub import local_folder
from surefoot.store.manifest import is_checkpoint

MOST = 4096
"""responses of a request"""
AT_ONCE = 256
"""responses sampled at a time"""
TOKENS = 256
"""the limit of a response whose request has none"""
FIELDS = {"model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "stop", "seed", "stream"}
FIELDS |= {"stream_options", "user"}  # whose name has no effect in OpenAI's API either
NEUTRAL: dict[str, Any] = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "best_of": 1, "echo": False}
NEUTRAL |= {"logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "store": False, "repetition_penalty": 1}
"""fields of OpenAI's API, besides, that are accepted at these values, at which they have no effect"""


def load_served(model: str, device: str = "cpu", trust_remote_code: bool = False) -> "ServedReward | ServedPolicy":
    """A run, a checkpoint of a policy, a folder of ``transformers`` or a hub id. Raises SurefootError for another model."""
    path = local_folder(Path(model).expanduser())
    name, scores = path.resolve().name, (path / HEAD).is_file()
    if (path / "config.toml").is_file():
        scores = read_toml(path / "config.toml").get("kind") == "reward"
    elif not scores and not is_checkpoint(path):
        scores = classifier_kind(read_config(str(path), trust_remote_code)) is not None
    if scores:
        return ServedReward(name, ModelReward(model, device=device, field="model"))
    policy = load_language_model(model, trust_remote_code)
    policy.model.to(device)  # type: ignore[arg-type]
    return ServedPolicy(name, policy)


def scored_texts(row: Row) -> tuple[Prompt, str]:
    """``prompt`` and ``completion`` of a row, each text or messages. Raises SurefootError, with its place, for another row."""
    try:
        pairs = "; pairs have a command of their own: surefoot evaluate RUN --data FILE"
        remedy = pairs if "chosen" in row.columns else "; rename them in the file"
        require_columns(row, ("prompt", "completion"), "a row has prompt and completion", remedy)
        prompt, answer = (text_or_messages(row, name) for name in ("prompt", "completion"))
        if isinstance(answer, str):
            return prompt, answer
        check_same_kind({"prompt": prompt, "completion": answer})
        return [*prompt, *answer[:-1]], str(answer[-1].get("content", ""))
    except SurefootError as error:
        raise SurefootError(f"{row.where}: {error}") from None


class ServedReward:
    """The rewards of a reward model, in the protocol of ``rewards.endpoint``."""

    paths = ("/score",)

    def __init__(self, name: str, reward: ModelReward) -> None:
        self.name, self.reward = name, reward
        self.version = f"{name}@{weights_hash(reward.model)[:12]}"

    def read(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request, checked: lists ``prompts``, ``responses`` and, if given, ``tools``; other columns have no effect.

        Raises SurefootError.
        """
        prompts, responses = body.get("prompts"), body.get("responses")
        if not isinstance(prompts, list) or not isinstance(responses, list) or not len(prompts) == len(responses) <= MOST:
            raise SurefootError(f"prompts, responses: must be lists of the same length, of at most {MOST}")
        check_prompts(prompts)
        self.reward.check_prompts(prompts)
        for number, response in enumerate(responses):
            if not isinstance(response, str) or fault_in(response):
                raise SurefootError(f"responses[{number}]={response!r:.60}: must be text")
        tools = body.get(TOOLS) or [None] * len(prompts)
        if not isinstance(tools, list) or len(tools) != len(prompts):
            raise SurefootError(f"{TOOLS}: must be a list of {len(prompts)}, one for each prompt")
        for number, own in enumerate(tools):
            if own is not None and not (isinstance(own, list) and all(isinstance(each, dict) for each in own)):
                raise SurefootError(f"{TOOLS}[{number}]={own!r:.60}: must be a list of schemas, or null")
        pairs = zip(prompts, tools, strict=True)
        prompts = [Dialogue(prompt, {TOOLS: own}) if own and isinstance(prompt, list) else prompt for prompt, own in pairs]
        return {"prompts": prompts, "responses": responses, "key": None}

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The scores of each request. Raises SurefootError for a text that is longer than the model's context."""
        prompts, responses = ([one for request in requests for one in request[name]] for name in ("prompts", "responses"))
        scores = iter(self.reward(prompts, responses, {}).total.tolist())
        return [{"scores": [next(scores) for _ in request["prompts"]], "model": self.version} for request in requests]


class ServedPolicy:
    """Completions and chat completions of a policy, drawn by the sampler of runs."""

    paths = ("/v1/completions", "/v1/chat/completions")

    def __init__(self, name: str, policy: LanguageModel) -> None:
        self.name, self.policy = name, policy
        self.version = f"{name}@{weights_hash(policy.model)[:12]}"

    def read(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request as ids and options. Raises SurefootError for what is invalid, or would have no effect."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name not in FIELDS and value != NEUTRAL.get(name):
                raise SurefootError(f"{name}={value!r:.40}: has no effect on this server; leave it out")
        chat, stop, heat = "chat" in path, given.get("stop", ()), given.get("temperature", 1.0)
        stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
        if type(heat) not in (int, float) or not isinstance(stop, tuple) or not all(isinstance(word, str) for word in stop):
            raise SurefootError(f"temperature={heat!r:.40}, stop={stop!r:.40}: must be a number, and text or a list of texts")
        samples, seed, ids = given.get("n", 1), given.get("seed", secrets.randbelow(MAX_SEED)), self._ids(given, chat)
        context = context_length(self.policy.model) or MOST
        limit = given.get("max_completion_tokens", given.get("max_tokens", max(1, min(TOKENS, context - max(map(len, ids))))))
        check_whole(1, n=samples)
        check_whole(0, seed=seed)
        asked = {"chat": chat, "stream": bool(given.get("stream")), "key": (limit, heat or 1.0, heat == 0, stop)}
        asked["usage"] = given.get("stream_options") == {"include_usage": True}
        ends, options = self._sampling(asked)
        check_request(self.policy.model, Request(ids, range(len(ids)), **options, **ends.options))
        if samples * len(ids) > (most := 1 if asked["stream"] else MOST):
            raise SurefootError(f"n={samples}: {samples * len(ids)} responses; ask for {most} at a time")
        ids = [each for each in ids for _ in range(samples)]
        seeds = [derived_seed(seed, "generate", index) for index in range(len(ids))]  # as LanguageModel.generate
        return {**asked, "id": f"cmpl-{secrets.token_hex(12)}", "ids": ids, "seeds": seeds}

    def _ids(self, body: Mapping[str, Any], chat: bool) -> list[list[int]]:
        """The prompts of a request."""
        prompts = [body["prompt"]] if isinstance(body.get("prompt"), str) else body.get("prompt")
        if chat:
            if not isinstance(body.get("messages"), list):
                raise SurefootError("messages: must be a list of messages, each with a role and a content")
            prompts = [messages_column(Row(dict(body), "", ""), "messages")]
        elif not isinstance(prompts, list) or not prompts or not all(isinstance(each, str) for each in prompts):
            raise SurefootError("prompt: must be text, or a list of texts")
        check_prompts(prompts)
        with quiet_transformers():  # the tokenizer warns of long text, which is rejected
            return [self.policy.tokens.encode_prompt(prompt) for prompt in prompts]

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The completions of each request."""
        ends, options = self._sampling(requests[0])
        ids, seeds = ([one for request in requests for one in request[name]] for name in ("ids", "seeds"))
        drawn = sample(self.policy.model, Request(ids, seeds, **options, **ends.options), rows=AT_ONCE)
        ended, answers = iter(zip(drawn.responses(), drawn.finish_reasons, strict=True)), []
        for request in requests:
            own = [next(ended) for _ in request["ids"]]
            answers.append(self._message(request, [(ends.text(response), reason) for response, reason in own]))
            answers[-1]["usage"] = self._usage(request, [response for response, _ in own])
        return answers

    def _usage(self, request: Mapping[str, Any], responses: Sequence[Sequence[int]]) -> dict[str, int]:
        asked, written = (sum(map(len, ids)) for ids in (request["ids"], responses))
        return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}

    def stream(self, request: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Pass one response to ``write``, piece by piece."""

        def piece(text: str, reason: str | None = None) -> None:
            write(self._message(request, [(text, reason)], "delta"))

        ends, options = self._sampling(request)
        drawn = write_response(self.policy, request["ids"][0], ends, piece, seeds=request["seeds"], **options)
        piece("", drawn.finish_reasons[0])
        if request["usage"]:
            write({**self._message(request, [], "delta"), "usage": self._usage(request, drawn.responses())})

    def _sampling(self, request: Mapping[str, Any]) -> tuple[Ends, dict[str, Any]]:
        limit, temperature, greedy, stop = request["key"]
        return Ends(self.policy.tokens, stop), {"max_tokens": limit, "temperature": temperature, "greedy": greedy}

    def _message(self, request: Mapping[str, Any], choices: Sequence[tuple[str, str | None]], key: str = "message") -> Any:
        """Texts, and why they ended, as OpenAI's API has them."""
        made, kind = [], "chat.completion" if request["chat"] else "text_completion"
        for index, (text, reason) in enumerate(choices):
            answer = {key: {"role": "assistant", "content": text}} if request["chat"] else {"text": text}
            made.append({"index": index, **answer, "logprobs": None, "finish_reason": reason})
        kind += ".chunk" * (request["chat"] and key == "delta")
        about = {"id": request["id"], "object": kind, "created": int(time.time()), "model": self.version}
        return {**about, "choices": made}
