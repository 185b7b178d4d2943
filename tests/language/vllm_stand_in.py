"""A local server that answers like vLLM, with a ``transformers`` model: for tests without vLLM, and for tests of failures.

``test_vllm.py`` also tests against a real vLLM, where one is installed.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import load_model
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample

Reply = tuple[int, Any]


class StandIn:
    """Serves the model in a folder under the name "policy".

    fault   called before each reply with the number of the request on its path, the path and the body; returns another reply, a
            function that changes the usual reply, or None for the usual reply. Status 0 hangs up
    """

    def __init__(self, folder: Path, max_model_len: int = 128) -> None:
        self.max_model_len = max_model_len
        self.lock = threading.Lock()
        self.load(folder)
        self.version, self.paused = "default", False
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Callable[[int, str, dict[str, Any]], Any] = lambda number, path, body: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self, {})

            def do_POST(self) -> None:
                outer.answer(self, json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

            def log_message(self, *words: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def load(self, folder: Path) -> None:
        self.folder = folder
        self.model, tokenizer = load_model(folder)
        self.tokens = Tokens(tokenizer, self.model)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler: Any, body: dict[str, Any]) -> None:
        path = urlsplit(handler.path).path
        with self.lock:
            number = self.seen.count(path)
            self.seen.append(path)
            self.headers.append(dict(handler.headers))
        found = self.fault(number, path, body)
        status, table = (
            self.reply(path, parse_qs(urlsplit(handler.path).query), body) if found is None or callable(found) else found
        )
        if callable(found):
            status, table = found((status, table))
        if status == 0:
            handler.close_connection = True
            return
        text = table if isinstance(table, bytes) else json.dumps(table).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def reply(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Reply:
        with self.lock:
            match path:
                case "/version":
                    return 200, {"version": "stand-in"}
                case "/v1/models":
                    return 200, {"data": [{"id": "policy", "max_model_len": self.max_model_len}]}
                case "/weight_info":
                    return 200, {"weight_version": self.version}
                case "/update_weight_version":
                    self.version = body["new_version"]
                    return 200, {"success": True}
                case "/pause":
                    assert query == {"mode": ["abort"]}
                    self.paused = True
                    return 200, {"status": "paused"}
                case "/resume":
                    self.paused = False
                    return 200, {"status": "resumed"}
                case "/collective_rpc":
                    assert self.paused, "weights change only while nothing is sampled"
                    assert body["method"] == "reload_weights"
                    self.load(Path(body["kwargs"]["weights_path"]))
                    return 200, {"results": [None]}
                case "/reset_prefix_cache":
                    return 200, b""
                case "/v1/completions":
                    return self.complete(body)
                case _:
                    return 404, {"detail": "Not Found"}

    def complete(self, body: dict[str, Any]) -> Reply:
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"max_tokens={body['max_tokens']} is too large"}}
        greedy = body["temperature"] == 0
        request = Request(
            [body["prompt"]],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"] or 1.0,
            eos_ids=body["stop_token_ids"],
            pad_id=self.tokens.pad_id,
            seeds=() if greedy else [body["seed"]],
            stop=body["stop"],
            decode=lambda ids: self.tokens.decode(ids, special=not body["skip_special_tokens"]),
            greedy=greedy,
        )
        drawn = sample(self.model, request)
        choice: dict[str, Any] = {
            "finish_reason": "stop" if drawn.ended[0] else "length",
            "token_ids": drawn.responses()[0],
            "logprobs": {"token_logprobs": drawn.log_probs[0].tolist()},
        }
        if "prompt_logprobs" in body:
            with torch.no_grad():
                log_probs = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
            entries = [{str(token): {"logprob": float(log_probs[t, token])}} for t, token in enumerate(body["prompt"][1:])]
            choice["prompt_logprobs"] = [None, *entries]
        return 200, {"choices": [choice]}
