"""A worker without a model, started as the real one is: it does what the model file and the prompts say.

The model file is JSON: `{"load": "ok" | "crash" | "silent" | "hang" | "stop" | "rubbish" | "fail" | "exit", ...}`;
what a file named by "switch" holds goes before. The prompt of a completion is a command; see `Stand.do`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from localllm.runtime import events
from localllm.worker import protocol
from localllm.worker.board import StepBoard
from localllm.worker.lifecycle import KEEPING_LINE

MODULE = "tests.worker.stand_in"


def fingerprint_of(prompt: str) -> bytes:
    """Return what the stand-in says of a prompt."""
    return hashlib.blake2b(prompt.encode(), digest_size=16).digest()


def happened(number: int, *told: events.Event) -> protocol.Happened:
    return protocol.Happened(time.monotonic(), [(number, [protocol.event_to_wire(event) for event in told])])


class Stand:
    """One connection."""

    def __init__(self, sock: socket.socket, board: StepBoard) -> None:
        self.sock = sock
        self.board = board

    def send(self, frame: protocol.Frame) -> None:
        self.sock.sendall(protocol.pack(frame))

    def serve(self) -> None:
        reader = protocol.FrameReader()
        while data := self.sock.recv(1 << 16):
            for frame in reader.feed(data):
                self.take(frame)
        plan = json.loads(self.model.read_text())
        if plan.get("says_it_keeps"):
            os.write(2, KEEPING_LINE + b"\n")
        time.sleep(plan.get("keep_s", 0.0))
        if "kept" in plan:
            Path(plan["kept"]).touch()

    def take(self, frame: protocol.AnyFrame) -> None:
        match frame:
            case protocol.Load():
                self.load(frame)
            case protocol.Submit():
                request = protocol.request_of(frame)
                assert isinstance(request.prompt, str)
                self.send(protocol.Accepted(frame.number, fingerprint_of(request.prompt)))
                self.do(frame.number, request.prompt.split())
            case protocol.Cancel():
                self.send(happened(frame.number, events.Finished(0, "cancelled"), events.Done()))
            case protocol.Call():
                self.call(frame)

    def load(self, load: protocol.Load) -> None:
        self.model = Path(load.model)
        plan = json.loads(self.model.read_text())
        self.note_ram(load.runtime["tiers"]["ram_bytes"])
        if "switch" in plan and Path(plan["switch"]).exists():
            plan["load"] = Path(plan["switch"]).read_text()
        if "unless_alive" in plan and Path("/proc", Path(plan["unless_alive"]).read_text()).exists():
            plan.update(load="fail", code="not_enough_memory")
        time.sleep(plan.get("load_s", 0.0))
        match plan.get("load", "ok"):
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "silent":
                return
            case "hang":
                time.sleep(1000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "rubbish":
                self.sock.sendall(b"\xff" * 100)
            case "exit":
                os._exit(3)
            case "fail":
                self.send(protocol.Failed(0, plan["code"], "it does not go"))
                os._exit(1)
            case "ok":
                model = {"name": load.name, "path": load.model, "sha256": None, "n_ctx": 64}
                self.send(protocol.Loaded({**model, "lone": load.lone, "refused": load.refused, "nice": load.nice}))

    def do(self, number: int, command: list[str]) -> None:
        match command:
            case ["say", n]:
                for i in range(int(n)):
                    self.send(happened(number, events.Token(0, f"w{i} ", (i,))))
                self.send(happened(number, events.Finished(0, "stop"), events.Usage(1, int(n), {}), events.Done()))
            case ["wait", *_]:
                self.send(happened(number, events.Queued("r", 0)))
            case ["die", name, *more]:
                if more != ["idle"]:
                    self.board.began([number, *map(int, more)], 0.01)
                os.kill(os.getpid(), signal.Signals[name])
                time.sleep(1000)
            case ["cut", n_bytes]:
                whole = protocol.pack(happened(number, events.Token(0, "cut", (1,))))
                self.sock.sendall(whole[: int(n_bytes)])
                os.kill(os.getpid(), signal.SIGKILL)
            case ["rubbish", kind]:
                self.sock.sendall(rubbish(number)[kind])
                time.sleep(1000)
            case ["hang", expected_s]:
                self.board.began([number], float(expected_s))
                time.sleep(1000)
            case ["doze"]:
                time.sleep(1000)
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["flood", n_mb]:
                line = b"a line that says secret things about nothing\n" * 20000
                for _ in range(int(n_mb)):
                    os.write(2, line)
                os.write(2, b"/src/ggml.c:77: GGML_ASSERT(a > b) failed\n")
                os.kill(os.getpid(), signal.SIGABRT)
            case ["linger"]:
                self.sock.close()
                time.sleep(1000)
            case ["fork"]:
                if os.fork() == 0:
                    time.sleep(3)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            case ["log", n]:
                for i in range(int(n)):
                    self.send(protocol.Log("info", f"line {i}\x1b[31m"))

    def call(self, call: protocol.Call) -> None:
        match call.verb:
            case "ping":
                self.send(protocol.Result(call.number, {}))
            case "echo":
                self.send(protocol.Result(call.number, call.argument))
            case "fail":
                self.send(protocol.Failed(call.number, "invalid_request", "no", "yes", {"field": "x"}))
            case "silence":
                pass
            case "limit_ram":
                self.note_ram(call.argument["limit_bytes"])
                self.send(protocol.Result(call.number, None))

    def note_ram(self, n_bytes: int | None) -> None:
        """Write down beside the model how much RAM it may keep KV in."""
        self.model.with_suffix(".ram").write_text(json.dumps(n_bytes))


def rubbish(number: int) -> dict[str, bytes]:
    """Return bytes that no worker sends, by what is wrong with them."""
    return {
        "length": struct.pack("<I", 1 << 31),
        "msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        "text": b"a line of text, as a library might print it\n" * 10,
        "kind": protocol.pack(protocol.Call(1, "ping")),
        "loaded": protocol.pack(protocol.Loaded({})),
        "event": protocol.pack(protocol.Happened(0.0, [(number, [[3, 0, 5, 7, 9]])])),
        "unknown": protocol.pack(protocol.Happened(0.0, [(number, [[99]])])),
        "empty": protocol.pack(protocol.Happened(0.0, [(number, [[]])])),
    }


if __name__ == "__main__":
    Stand(socket.socket(fileno=int(sys.argv[1])), StepBoard.attach(int(sys.argv[2]))).serve()
