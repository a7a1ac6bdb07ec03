"""docs/server.md is true of the server: routes, flags, codes, headers and examples."""

from __future__ import annotations

import configparser
import http.client
import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from localllm.cli import main
from localllm.cli.app import build_app
from localllm.cli.serve import WATCHDOG_VARIABLE
from tests.conftest import PROJECT
from tests.server.fakes import serving

TEXT = (PROJECT / "docs" / "server.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for path in Path(PROJECT / "localllm").rglob("*.py") if "cli" not in path.parts
)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


def table(title: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with `title`, without its two first lines."""
    (rows,) = re.findall(rf"^\| {title} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def test_the_routes_are_those_of_the_server() -> None:
    cells = " ".join(row[0] for row in table("route"))
    named = {path.replace("{id}", "{model}") for path in re.findall(r"(/[\w/{}.-]+)", cells)}
    with serving() as running:
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/openapi.json")
        published = set(json.loads(connection.getresponse().read())["paths"])
        connection.close()
    assert named - {"/openapi.json"} == published - {"/openapi.json"}


def test_every_flag_exists() -> None:
    root = get_command(build_app(main.VERBS, main.GROUPS))
    known = {spelling for verb in vars(root)["commands"].values() for p in verb.params for spelling in p.opts}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT))
    assert named - {"--user", "--now", "--model"} <= known  # of systemctl and aider


def test_every_code_and_header_is_one_of_the_servers() -> None:
    codes = {code for row in table("status") for code in re.findall(r"`([a-z_]+)`", row[1])}
    headers = set(re.findall(r"`(x-[a-z-]+)", TEXT))
    assert len(codes) > 10
    assert [name for name in sorted(codes | headers) if f'"{name}"' not in SOURCES] == []


def test_the_watchdogs_variable_is_the_one_that_is_read() -> None:
    assert f"`{WATCHDOG_VARIABLE}`" in TEXT


def test_the_clients_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    with serving() as running:
        code = example.replace("http://127.0.0.1:8080", running.url).replace('"smollm2:135m"', '"fake"')
        exec(compile(code, "server.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_the_variables_reach_the_official_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from openai import OpenAI

    with serving() as running:
        for name, value in re.findall(r"(OPENAI_[A-Z_]+)=([^\s`]+)", table("client")[0][1]):
            monkeypatch.setenv(name, value.replace("http://127.0.0.1:8080", running.url))
        with OpenAI() as client:
            assert [model.id for model in client.models.list()] == ["fake"]


def test_the_unit_has_what_systemd_needs() -> None:
    (text,) = blocks("ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(text)
    assert unit["Service"]["ExecStart"].split()[1:] == ["serve", "smollm2:135m"]
    assert unit["Service"]["SuccessExitStatus"] == "143"
