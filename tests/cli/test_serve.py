"""`localllm serve`: what its flags become, and what is refused before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from localllm.cli.api_key import read_api_key
from localllm.cli.output import Notes
from localllm.models.kv_types import KvTypes
from localllm.server import serving
from localllm.server.state import ServerSettings
from localllm.worker.supervisor import SupervisorSettings
from tests.cli.conftest import Result

Cli = Callable[..., Result]
KEY = "0123456789abcdef"


@dataclass
class Served:
    """What the server was asked for; `code` is what it ends with."""

    code: int = 0
    server: ServerSettings | None = None
    supervisor: SupervisorSettings | None = None
    notices: Sequence[str] = ()

    def run(self, server: ServerSettings, supervisor: SupervisorSettings, notices: Sequence[str]) -> int:
        """Stand for `run_server`."""
        self.server, self.supervisor, self.notices = server, supervisor, notices
        return self.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    told = Path(os.environ["LOCALLLM_HOME"]) / "kv" / "told"  # where KV is kept is said once, and was
    told.parent.mkdir(parents=True)
    told.touch()
    record = Served()
    monkeypatch.setattr(serving, "run_server", record.run)
    return record


def test_without_flags_it_is_private_to_this_machine(cli: Cli, served: Served) -> None:
    assert cli("serve") == Result(0, "", "")
    assert served.server == ServerSettings()
    assert served.server.host == "127.0.0.1"
    settings = served.supervisor
    assert settings is not None
    assert (settings.models, settings.aliases, settings.nice) == ((), (), 0)
    assert (settings.config.parallel, settings.config.retained, settings.config.threads) == (8, 4, None)
    assert (settings.keep_alive_s, settings.max_memory_bytes, settings.watchdog_s) == (600.0, None, 60.0)
    assert settings.runtime.max_waiting == 128


def test_where_kv_is_kept_is_said_once(cli: Cli, served: Served) -> None:
    (Path(os.environ["LOCALLLM_HOME"]) / "kv" / "told").unlink()
    assert cli("serve").code == 0
    [notice] = served.notices
    assert "is kept in" in notice
    assert cli("serve").code == 0
    assert list(served.notices) == []


def test_what_is_kept_and_for_whom_arrives(cli: Cli, served: Served) -> None:
    flags = ("--kv-ram", "1GB", "--private", "--deterministic", "--no-shared-cache", "--keep-agent-headers")
    assert cli("serve", *flags).code == 0
    assert served.server is not None
    assert served.supervisor is not None
    assert (served.server.is_cache_shared, served.server.keeps_agent_headers) == (False, True)
    tiers = served.supervisor.runtime.tiers
    assert (tiers.ram_bytes, tiers.disk_dir, tiers.keeps_all) == (10**9, "", True)
    assert served.supervisor.config.deterministic is True


def test_every_flag_arrives(cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("key", "cert.pem", "cert.key", "t.jinja"):
        Path(name).write_text(KEY)
        Path(name).chmod(0o600)
    result = cli(
        *("serve", "a", "b", "--host", "0.0.0.0", "--port", "0", "--api-key-file", "key", "--strict"),
        *("--allow-host", "box.local", "--allow-origin", "https://a.example", "--allow-origin", "https://b.example"),
        *("--tls-cert", "cert.pem", "--tls-key", "cert.key", "--drain-timeout", "1.5", "--log-format", "json"),
        *("--socket", "s.sock", "--alias", "x", "--alias", "y", "--parallel", "3", "--queue", "7", "--mode", "batch"),
        *("--max-memory", "4GiB", "--keep-alive", "forever", "--ctx", "512", "--kv", "q8_0"),
        *("--flash-attn", "on", "--gpu", "off", "--threads", "2", "--template", "t.jinja"),
    )
    assert result == Result(0, "", "")
    assert served.server == ServerSettings(
        host="0.0.0.0",
        port=0,
        allow_hosts=("box.local",),
        allow_origins=("https://a.example", "https://b.example"),
        api_keys=(KEY.encode(),),
        strict=True,
        tls_cert=Path("cert.pem"),
        tls_key=Path("cert.key"),
        drain_timeout_s=1.5,
        log_format="json",
        socket_path=tmp_path / "s.sock",
    )
    settings = served.supervisor
    assert settings is not None
    assert (settings.models, settings.aliases) == (("a", "b"), ("x", "y"))
    assert (settings.max_memory_bytes, settings.keep_alive_s, settings.watchdog_s) == (4 * 2**30, None, 60.0)
    config = settings.config
    assert (config.ctx, config.kv, config.flash_attn, config.gpu, config.threads) == (
        512,
        KvTypes("q8_0", "q8_0"),
        "on",
        "off",
        2,
    )
    assert (config.parallel, config.template) == (3, tmp_path / "t.jinja")
    assert (settings.runtime.max_waiting, settings.runtime.itl_target_s) == (7, 1.0)


def test_quiet_leaves_cores_to_others(cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.backends.cpu.probe import CpuFacts

    monkeypatch.setattr(CpuFacts, "default_threads", property(lambda self: 8))
    cli("serve", "--mode", "quiet")
    assert served.supervisor is not None
    assert (served.supervisor.config.threads, served.supervisor.nice > 0) == (4, True)
    cli("serve", "--mode", "quiet", "--threads", "7")
    assert served.supervisor.config.threads == 7


@pytest.mark.parametrize("code", [0, 130, 143])
def test_the_servers_exit_code_is_the_commands(cli: Cli, served: Served, code: int) -> None:
    served.code = code
    assert cli("serve").code == code


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "box.local", "", "128.0.0.1", "127.evil.example"])
def test_beyond_loopback_needs_a_key(cli: Cli, served: Served, host: str) -> None:
    result = cli("serve", "--host", host)
    assert (result.code, served.server) == (2, None)
    assert "--api-key-file" in result.err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_none(cli: Cli, served: Served, host: str) -> None:
    assert cli("serve", "--host", host).code == 0


def test_the_key_may_be_in_the_environment_and_leaves_it(
    cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
    assert cli("serve", "--host", "0.0.0.0").code == 0
    assert served.server is not None
    assert served.server.api_keys == (KEY.encode(),)
    assert "LOCALLLM_API_KEY" not in os.environ
    assert KEY not in repr(served.server)


def test_the_key_file_wins_over_the_environment(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "another-key-altogether")
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    cli("serve", "--api-key-file", str(tmp_path / "key"))
    assert served.server is not None
    assert served.server.api_keys == (KEY.encode(),)


def test_a_key_file_may_hold_several_one_a_line(cli: Cli, served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"\n{KEY}\r\n\n  another-key-altogether  \n{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    assert cli("serve", "--api-key-file", str(tmp_path / "key")) == Result(0, "", "")
    assert served.server is not None
    assert served.server.api_keys == (KEY.encode(), b"another-key-altogether")
    assert read_api_key(tmp_path / "key", Notes()) == KEY.encode()


def test_the_variable_holds_one_key(cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", f"{KEY}\nanother-key-altogether")
    assert (cli("serve").code, served.server) == (2, None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [((), "by connection"), ((KEY,), "all clients with this key share"), ((KEY, KEY[::-1]), "2 keys")],
)
def test_whom_isolation_keeps_apart_is_said_at_start(
    cli: Cli, served: Served, tmp_path: Path, keys: tuple[str, ...], words: str
) -> None:
    (tmp_path / "key").write_text("\n".join(keys))
    (tmp_path / "key").chmod(0o600)
    given = ("--api-key-file", str(tmp_path / "key")) if keys else ()
    assert cli("serve", "--no-shared-cache", *given).code == 0
    [notice] = served.notices
    assert words in notice
    assert not any(key in notice for key in keys)
    assert cli("serve", *given).code == 0
    assert list(served.notices) == []


def test_a_key_file_that_others_may_read_is_told(cli: Cli, served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o644)
    result = cli("serve", "--api-key-file", str(tmp_path / "key"))
    assert (result.code, "chmod 600" in result.err) == (0, True)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"short", b"two words in here", b"the-first-is-fine\nshort", "schlüssel-ohne-ascii".encode()],
)
def test_a_key_that_is_none_is_refused_and_never_shown(
    cli: Cli, served: Served, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    result = cli("serve", "--api-key-file", str(tmp_path / "key"))
    assert (result.code, served.server) == (2, None)
    assert not content.strip() or content.decode().strip() not in result.err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--api-key-file", "none"], "none"),
        (["--tls-cert", "c.pem"], "--tls-key"),
        (["--tls-key", "c.pem"], "--tls-cert"),
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], "none.pem"),
        (["--alias", "x"], "--alias"),
        (["--max-memory", "much"], "--max-memory"),
        (["--keep-alive", "long"], "--keep-alive"),
        (["--parallel", "0"], "--parallel"),
        (["--queue", "0"], "--queue"),
        (["--mode", "fast"], "--mode"),
        (["--port", "65536"], "--port"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--log-format", "xml"], "--log-format"),
        (["--ctx", "0"], "--ctx"),
        (["--template", "none.jinja"], "none.jinja"),
        (["--kv", "q2"], "q2"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(cli: Cli, served: Served, argv: list[str], named: str) -> None:
    result = cli("serve", *argv)
    assert (result.code, served.server) == (2, None)
    assert named in result.err
    assert "Traceback" not in result.err


def test_the_watchdogs_time_comes_from_the_environment(
    cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, seconds in (("2", 2.0), ("0.1", 0.1), ("1e3", 1000.0), ("", 60.0)):
        monkeypatch.setenv("LOCALLLM_WATCHDOG_S", text)
        assert cli("serve") == Result(0, "", "")
        assert served.supervisor is not None
        assert served.supervisor.watchdog_s == seconds
    assert cli("serve", "--watchdog", "2").code == 2


@pytest.mark.parametrize("text", ["0", "0.09", "-1", "nan", "inf", "soon", "2s", " "])
def test_a_watchdogs_time_that_makes_no_sense_is_refused(
    cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LOCALLLM_WATCHDOG_S", text)
    result = cli("serve")
    assert (result.code, served.server) == (2, None)
    assert result.err.splitlines() == [
        f"error: LOCALLLM_WATCHDOG_S takes a number of seconds from 0.1, not {text!r}.",
        "hint: unset LOCALLLM_WATCHDOG_S",
    ]


def test_settings_reach_it_from_environment_and_file(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text('port = 9999\nparallel = 2\nkeep_alive = "5m"\nallow_host = ["a", "b"]\n')
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("LOCALLLM_QUEUE", "9")
    assert cli("serve").code == 0
    assert served.server is not None
    assert served.supervisor is not None
    assert (served.server.port, served.server.allow_hosts) == (9999, ("a", "b"))
    assert (served.supervisor.keep_alive_s, served.supervisor.config.parallel) == (300.0, 2)
    assert served.supervisor.runtime.max_waiting == 9


def test_the_process_that_serves_loads_no_native_code() -> None:
    script = (
        "import sys\n"
        "from localllm.server import serving\n"
        "serving.run_server = lambda server, supervisor, notices: 0\n"
        "from localllm.cli import main\n"
        "from localllm.cli.app import run_command\n"
        "code = run_command(['serve', '--mode', 'quiet', '--threads', 'auto'], main.VERBS, main.GROUPS)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(code, *sorted({'llama_cpp', 'numpy', 'jinja2', 'typer'} & loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 typer\n", done.stderr


def test_what_is_kept_is_set_by_environment_and_file_too(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text('kv_ram = "off"\nkv_disk = "2GB"\nkv_disk_age = 3\nno_shared_cache = true\n')
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("LOCALLLM_KV_DISK_DAILY", "1GB")
    assert cli("serve").code == 0
    assert served.server is not None
    assert served.supervisor is not None
    tiers = served.supervisor.runtime.tiers
    assert (tiers.ram_bytes, tiers.disk_bytes, tiers.disk_daily_bytes) == (0, 2 * 10**9, 10**9)
    assert (tiers.disk_age_s, served.server.is_cache_shared) == (3 * 86_400, False)
    monkeypatch.setenv("LOCALLLM_PRIVATE", "1")
    assert cli("serve").code == 0
    assert served.supervisor.runtime.tiers.disk_dir == ""


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--kv-ram", "lots"), ("--kv-disk", "10XB"), ("--kv-disk-daily", "off"), ("--kv-disk-age", "-1")],
)
def test_nonsense_about_what_is_kept_is_refused_by_the_flag(cli: Cli, served: Served, flag: str, value: str) -> None:
    for verb in (("serve",), ("run", "m", "hi")):
        result = cli(*verb, flag, value)
        assert (result.code, served.supervisor) == (2, None)
        assert flag in result.err
        assert "hint: " in result.err
