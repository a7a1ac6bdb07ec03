"""A server that answers probe requests in the manner that a test gives it, and well where none is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from localllm.bench.client.calls import Target
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.probing import asks
from localllm.bench.serving.probing.prober import probe
from localllm.bench.serving.probing.probes import Probes

RIGHT = {question: right for question, _, right in asks.EXACT}
MODEL_ANSWER = "one two three four five six seven eight nine ten eleven twelve"
JSON_ANSWER = '{"colour": "blue", "shades": 7}'


@dataclass
class Manners:
    """How it answers. `on`: (path, fields) -> status and body in place of a proper answer, None for that."""

    prompt_tokens: Callable[[int, str], int] = lambda number, text: len(text)
    answer: Callable[[str, int], str] = lambda question, n_before: RIGHT.get(question, MODEL_ANSWER)
    near: Callable[[str], Mapping[str, float]] = lambda word: {}
    on: Callable[[str, Mapping[str, Any]], tuple[int, bytes] | None] = lambda path, fields: None
    has_logprobs: bool = True
    has_usage: bool = True
    has_stream_usage: bool = True
    has_cached_tokens: bool = True
    max_tokens: bool = True
    stop: bool = True
    ignore_eos: bool = True
    json_schema: bool = True
    forced_tools: bool = True
    sampled: bool = False
    stream_text: Callable[[str], str] = lambda text: text
    finish_reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Probed:
    """One server, until closed."""

    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.asked: list[dict[str, Any]] = []
        of = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
                of.asked.append(fields)
                told = manners.on(self.path, fields)
                status, body = told or (200, of.reply(self.path, fields))
                self.send_response(status)
                kind = "text/event-stream" if fields.get("stream") and told is None else "application/json"
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def reply(self, path: str, fields: dict[str, Any]) -> bytes:
        manners = self.manners
        chat = fields.get("messages") or [{"content": fields.get("prompt")}]
        question = str(chat[-1]["content"])
        n_before = sum(1 for asked in self.asked if asked == fields) - 1
        words = manners.answer(question, n_before).split(" ")
        if manners.sampled and "temperature" not in fields:
            words = [str(len(self.asked)), *words]
        if question in asks.SHORT and not (fields.get("ignore_eos") and manners.ignore_eos):
            words = ["Yes."]
        elif fields.get("ignore_eos") and manners.ignore_eos:
            words = (words * 40)[: fields["max_tokens"]]
        if "response_format" in fields and manners.json_schema:
            words = [JSON_ANSWER]
        limit = fields["max_tokens"] if manners.max_tokens else len(words)
        reason = manners.finish_reason or ("length" if len(words) > limit else "stop")
        words = words[:limit]
        text = " ".join(words)
        if manners.stop:
            for end in fields.get("stop", ()):
                text = text.partition(end)[0]
        calls = [{"id": "1", "function": {"name": "f"}}] if manners.forced_tools else []
        calls = calls if fields.get("tool_choice") == "required" else []
        usage = {"prompt_tokens": manners.prompt_tokens(len(chat), question), "completion_tokens": len(words)}
        details = {"prompt_tokens_details": {"cached_tokens": 0}} if manners.has_cached_tokens else {}
        return self._encoded(path, fields, text, words, reason, calls, {**usage, **details})

    def _encoded(
        self, path: str, fields: Any, text: str, words: Any, reason: str, calls: Any, usage: dict[str, Any]
    ) -> bytes:
        manners = self.manners
        if fields.get("stream"):
            chunk = {"delta": {"content": manners.stream_text(text), **({"tool_calls": calls} if calls else {})}}
            events: list[Any] = [{"choices": [chunk]}, {"choices": [{"delta": {}, "finish_reason": reason}]}]
            if manners.has_stream_usage:
                events.append({"choices": [], "usage": usage})
            return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        is_chat = path.endswith("/chat/completions")
        choice |= {"message": {"content": text, "tool_calls": calls}} if is_chat else {"text": text}
        if fields.get("logprobs") and manners.has_logprobs:
            choice["logprobs"] = self._logprobs(words, is_chat)
        return json.dumps({"choices": [choice], **({"usage": usage} if manners.has_usage else {})}).encode()

    def _logprobs(self, words: list[str], is_chat: bool) -> Any:
        spaces = ["", *[" "] * len(words)]
        tokens = [space + word for space, word in zip(spaces, words, strict=False)]
        tops = [
            {token: -1.0, "far": -9.0, **{space + other: its for other, its in self.manners.near(word).items()}}
            for space, word, token in zip(spaces, words, tokens, strict=False)
        ]
        if not is_chat:
            return {"tokens": tokens, "token_logprobs": [-1.0] * len(words), "top_logprobs": tops}
        content = [
            {
                "token": token,
                "logprob": -1.0,
                "top_logprobs": [{"token": other, "logprob": logprob} for other, logprob in top.items()],
            }
            for token, top in zip(tokens, tops, strict=True)
        ]
        return {"content": content}


def probed(api: Any = "openai-chat", **manners: Any) -> Probes:
    """Return what probing finds of a server with these manners."""
    server = Probed(Manners(**manners))
    try:
        port = server._server.server_address[1]
        target = Target("127.0.0.1", int(port), timeout_s=20)
        return probe(Endpoint(target, "m", api, manners.get("facts", {})))
    finally:
        server.close()
