"""`localllm serve`: models behind the OpenAI API, on this machine."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from localllm.cli.options import CacheFlags, LoadFlags, Template
from localllm.cli.serve_options import AccessFlags, Aliases, ListenFlags, Models, WorkFlags
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.server.state import ServerSettings
    from localllm.worker.supervisor import SupervisorSettings

WATCHDOG_VARIABLE = "LOCALLLM_WATCHDOG_S"
LEAST_WATCHDOG_S = 0.1


def serve(
    models: Models = None,
    *,
    listen: ListenFlags,
    access: AccessFlags,
    work: WorkFlags,
    load: LoadFlags,
    cache: CacheFlags,
    template: Template = None,
    alias: Aliases = None,
) -> None:
    """Serve models over HTTP: the OpenAI API, for this machine.

    Ctrl-C or `localllm stop` lets running answers end and stops; twice stops at once. `run` and `chat` use the server
    where it holds their model.
    """
    from localllm.cli.keeping import tell_once

    server = server_settings(listen, access)
    supervisor = supervisor_settings(tuple(models or ()), tuple(alias or ()), work, load, cache, template)
    notices: list[str] = []
    tell_once(supervisor.runtime.tiers, notices.append)
    from localllm.server.isolation import kept_apart
    from localllm.server.serving import run_server

    if not server.is_cache_shared:
        notices.append(kept_apart(len(server.api_keys)))
    raise typer.Exit(run_server(server, supervisor, notices))


def server_settings(listen: ListenFlags, access: AccessFlags) -> ServerSettings:
    """Return how to listen and whom to let in. Raises UsageError for what would be open or cannot be."""
    from localllm.cli.api_key import read_api_keys
    from localllm.cli.http_client import is_loopback
    from localllm.cli.output import Notes
    from localllm.server.state import ServerSettings

    keys = read_api_keys(access.api_key_file, Notes())
    if not keys and not is_loopback(listen.host):
        raise UsageError(
            f"Others could reach {listen.host or 'every address'}: that needs a key.",
            "localllm serve --host ADDRESS --api-key-file FILE",
        )
    if (listen.tls_cert is None) != (listen.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together.", "localllm serve --tls-cert FILE --tls-key FILE")
    for file in (listen.tls_cert, listen.tls_key):
        if file is not None and not file.is_file():
            raise UsageError(f"There is no file {file}.", "check --tls-cert and --tls-key")
    return ServerSettings(
        host=listen.host,
        port=listen.port,
        allow_hosts=tuple(access.allow_host or ()),
        allow_origins=tuple(access.allow_origin or ()),
        api_keys=keys,
        strict=access.strict,
        is_cache_shared=not access.no_shared_cache,
        keeps_agent_headers=access.keep_agent_headers,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        drain_timeout_s=listen.drain_timeout,
        log_format=listen.log_format,
        socket_path=None if listen.socket is None else Path(listen.socket).absolute(),
    )


def supervisor_settings(
    models: tuple[str, ...],
    aliases: tuple[str, ...],
    work: WorkFlags,
    load: LoadFlags,
    cache: CacheFlags,
    template: Path | None,
) -> SupervisorSettings:
    """Return what to load, and how it shares the machine. Raises UsageError naming the flag at fault."""
    from localllm.backends.cpu.probe import probe
    from localllm.cli.units import parse_duration, parse_size
    from localllm.cli.wishes import serving_config
    from localllm.worker.supervisor import SupervisorSettings

    if aliases and not models:
        raise UsageError("--alias names a model that is given on the command line.", "localllm serve MODEL --alias x")
    config, runtime, nice = serving_config(load, work, cache, template, default_threads=probe().default_threads)
    settings = SupervisorSettings(
        models=models,
        aliases=aliases,
        config=config,
        runtime=runtime,
        nice=nice,
        max_memory_bytes=None if work.max_memory is None else parse_size("--max-memory", work.max_memory),
        keep_alive_s=parse_duration("--keep-alive", work.keep_alive),
    )
    watchdog_s = _watchdog_s()
    return settings if watchdog_s is None else replace(settings, watchdog_s=watchdog_s)


def _watchdog_s() -> float | None:
    """Return the least time without progress that ends a worker, where LOCALLLM_WATCHDOG_S says one."""
    text = os.environ.get(WATCHDOG_VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_WATCHDOG_S <= seconds < math.inf:
        raise UsageError(
            f"{WATCHDOG_VARIABLE} takes a number of seconds from {LEAST_WATCHDOG_S}, not {text!r}.",
            f"unset {WATCHDOG_VARIABLE}",
        )
    return seconds
