"""The flags of `serve` alone: where it answers, whom, and how it shares the machine; and what it loads first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from localllm.cli.options import MODEL_HELP, ApiKeyFile, model_argument, option
from localllm.cli.units import number_or_auto, parse_duration, parse_size

Models: TypeAlias = Annotated[
    list[str] | None,
    model_argument(
        f"Models to load now and keep. {MODEL_HELP} The others of `localllm ls` are loaded when a request names them.",
        metavar="[MODEL]...",
    ),
]
Aliases: TypeAlias = Annotated[
    list[str] | None,
    option("--alias", metavar="NAME", help="Further name of the first model; repeatable."),
]


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """Where a server answers, and how it ends."""

    host: Annotated[
        str, option("--host", metavar="ADDRESS", help="Address to listen on; another than loopback needs a key.")
    ] = "127.0.0.1"
    port: Annotated[int, option("--port", min=0, max=65535, metavar="N", help="Port; 0 = any that is free.")] = 8080
    socket: Annotated[
        Path | None,
        option("--socket", metavar="PATH", help="Private Unix socket. Default: one in the user's runtime folder."),
    ] = None
    tls_cert: Annotated[
        Path | None, option("--tls-cert", metavar="FILE", help="Certificate chain in PEM: serve https.")
    ] = None
    tls_key: Annotated[Path | None, option("--tls-key", metavar="FILE", help="The certificate's key in PEM.")] = None
    drain_timeout: Annotated[
        float, option("--drain-timeout", min=0, metavar="SECONDS", help="How long a stop waits for running answers.")
    ] = 5.0
    log_format: Annotated[
        Literal["text", "json"],
        option("--log-format", metavar="text|json", help="Form of the log on stderr, a request a line."),
    ] = "text"


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Who may ask a server, and what."""

    api_key_file: ApiKeyFile = None
    allow_host: Annotated[
        list[str] | None,
        option("--allow-host", metavar="NAME", help="Further name that requests may call the server by; repeatable."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        option("--allow-origin", metavar="ORIGIN", help="Web origin whose pages may call the server; repeatable."),
    ] = None
    strict: Annotated[bool, option("--strict", help="Refuse requests with fields that are not known.")] = False
    no_shared_cache: Annotated[
        bool,
        option("--no-shared-cache", help="Clients (by key, or connection) use nothing that was computed for others."),
    ] = False
    keep_agent_headers: Annotated[
        bool,
        option(
            "--keep-agent-headers",
            help="Show the model lines that agents change with each request (x-anthropic-billing-header) too.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class WorkFlags:
    """How a server shares the machine between requests and models."""

    parallel: Annotated[
        str,
        option(
            "--parallel", check=number_or_auto, metavar="N|auto", help="Sequences at work at once; auto: 8 on a CPU."
        ),
    ] = "auto"
    queue: Annotated[int, option("--queue", min=1, metavar="N", help="Requests that may wait; more are refused.")] = 128
    mode: Annotated[
        Literal["interactive", "batch", "quiet"],
        option(
            "--mode",
            metavar="interactive|batch|quiet",
            help="Quick turns, most tokens in all, or cores left to others.",
        ),
    ] = "interactive"
    max_memory: Annotated[
        str | None,
        option(
            "--max-memory",
            check=parse_size,
            metavar="SIZE",
            help="Memory of all models together (8GB). Default: what is free.",
        ),
    ] = None
    keep_alive: Annotated[
        str,
        option(
            "--keep-alive",
            check=parse_duration,
            metavar="DURATION|forever",
            help="How long a model that was not named at start stays loaded without use.",
        ),
    ] = "10m"
