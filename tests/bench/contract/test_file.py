"""Contracts are read, and every mistake in one is a sentence with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.bench.contract.file import MAX_BYTES, parse_contract, read_bytes
from localllm.bench.contract.terms import Contract
from localllm.bench.serving.spec import Cache, Load
from localllm.errors import UsageError

TEXT = """version = 1
title = "T"
[run]
rounds = 3
requests = 8
[[model]]
name = "m"
reference = "smollm2:135m"
[[candidate]]
name = "ours"
command = ["localllm", "serve", "{model}", "--port", "{port}"]
flags = ["--ctx", "4096"]
best = ["--parallel", "4"]
[[candidate]]
name = "other"
url = "http://127.0.0.1:1"
serves = "x"
[[workload]]
use = "chat:turns=2"
concurrency = [1, 4]
cache = ["cold", "warm"]
slo = "ttft_p95=500ms"
[[workload]]
use = "story"
rate = [0.5, "2:gamma=0.5"]
requests = 5
[[rule]]
measure = "ttft_p95"
candidate = "ours"
workload = "chat"
cache = "warm"
at_most = "500ms"
[[rule]]
measure = "output_throughput"
candidate = "ours (best)"
workload = "story"
load = "rate 0.5/s"
over = "other"
at_least = 0.9
[[rule]]
measure = "ready"
candidate = "ours"
at_most = "5s"
"""


def parsed(text: str) -> Contract:
    return parse_contract(text.encode(), source="c.toml", folder=Path("/nowhere"))


def refused(old: str, new: str) -> str:
    assert old in TEXT
    with pytest.raises(UsageError) as caught:
        parsed(TEXT.replace(old, new, 1))
    assert caught.value.hint
    return caught.value.message


def test_what_is_written_is_what_is_measured() -> None:
    found = parsed(TEXT)
    assert (found.title, found.rounds, found.seed, found.n_warmup, found.max_repeats) == ("T", 3, 1, 2, 2)
    ours, best, other = found.candidates
    assert ours.command == ("localllm", "serve", "{model}", "--port", "{port}", "--ctx", "4096")
    assert best.command == ("localllm", "serve", "{model}", "--port", "{port}", "--parallel", "4")
    assert (ours.is_best, best.is_best, best.name) == (False, True, "ours (best)")
    assert (other.url, other.serves, other.command) == ("http://127.0.0.1:1", "x", ())
    assert [cell.key for cell in found.cells] == [
        ("chat:turns=2", "cold", "concurrency 1"),
        ("chat:turns=2", "cold", "concurrency 4"),
        ("chat:turns=2", "warm", "concurrency 1"),
        ("chat:turns=2", "warm", "concurrency 4"),
        ("story", "cold", "rate 0.5/s"),
        ("story", "cold", "rate 2/s, gamma 0.5"),
    ]
    assert [cell.n_requests for cell in found.cells] == [8, 8, 8, 8, 5, 5]
    assert [cell.by.name for cell in found.cells] == ["goodput"] * 4 + ["ttft_p95"] * 2
    assert found.cells[5].load == Load(rate_per_s=2.0, shape=0.5)
    assert len(found.sha256) == 64
    assert found.document["candidate"][2 - 1]["name"] == "other"


def test_rules_say_what_they_ask() -> None:
    assert [rule.text for rule in parsed(TEXT).rules] == [
        "ours: ttft_p95 at most 500 ms (chat:turns=2, warm)",
        "ours (best): output_throughput at least 0.9 times that of other (story, cold, rate 0.5/s)",
        "ours: ready at most 5000 ms",
    ]
    first = parsed(TEXT).rules[0]
    assert first.cells == (("chat:turns=2", "warm", "concurrency 1"), ("chat:turns=2", "warm", "concurrency 4"))


def test_a_rule_may_name_a_workload_as_the_contract_spells_it() -> None:
    spelled = "chat:turns=2,answer=9"
    text = TEXT.replace('"chat:turns=2"', f'"{spelled}"').replace('workload = "chat"', f'workload = "{spelled}"')
    assert spelled in text
    assert {workload for workload, _, _ in parsed(text).rules[0].cells} == {"chat:answer=9,turns=2"}


def test_a_cache_may_stand_in_the_workloads_text() -> None:
    found = parsed(TEXT.replace('use = "story"', 'use = "story:cache=warm"'))
    assert found.cells[-1].cache is Cache.WARM
    assert found.cells[-1].workload.spec == "story"


def test_a_duration_stands_for_a_number_of_requests() -> None:
    found = parsed(TEXT.replace("requests = 5", "duration_s = 2.5"))
    assert (found.cells[-1].n_requests, found.cells[-1].duration_s) == (None, 2.5)


def test_a_models_file_lies_beside_the_contract() -> None:
    found = parsed(TEXT.replace('reference = "smollm2:135m"', 'file = "models/a.gguf"'))
    assert found.models[0].file == Path("/nowhere/models/a.gguf")
    assert found.models[0].place == "c.toml, line 8, model 1"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rounds = 3", "round = 3", "c.toml, line 4: there is no key 'round'; did you mean rounds?"),
        (
            'at_most = "500ms"',
            'at_mots = "1s"',
            "c.toml, line 32, rule 1: there is no key 'at_mots'; did you mean at_most?",
        ),
        ("rounds = 3", "rounds = 0", "c.toml, line 4: rounds takes a whole number of at least 1."),
        ("rounds = 3", 'rounds = "3"', "c.toml, line 4: rounds takes a whole number, not text."),
        ("version = 1", "version = 2", "c.toml, line 1: this program reads version 1 of contracts."),
        ("version = 1\n", "", "c.toml: version is missing."),
        ('title = "T"', "", "c.toml: title is missing."),
        ('title = "T"', "title = T", "c.toml is no TOML: Invalid value (at line 2, column 9)."),
        ("[run]", "[[run]]", "c.toml, line 3: run takes a table, not a list."),
        ("[run]", "run = 3\n[a]", "c.toml: run takes a table, not a whole number."),
        ("at_least = 0.9", "at_least = -1", "at_least is a ratio here, above 0, not -1.0."),
        ("at_least = 0.9", "at_least = 0", "at_least is a ratio here, above 0, not 0.0."),
        ("at_least = 0.9", "at_least = nan", "at_least is a ratio here, above 0, not nan."),
        ("at_least = 0.9", "", "a rule needs at_most or at_least."),
        ('over = "other"', 'over = "ours (best)"', "a candidate over itself is always 1."),
        ('over = "other"', 'over = "another"', "there is no candidate 'another'; there are ours, ours (best), other."),
        ('candidate = "ours"', 'candidate = "our"', "c.toml, line 29, rule 1: there is no candidate 'our'"),
        (
            'workload = "chat"',
            'workload = "rag"',
            "the workload 'rag' is not measured; measured are: chat:turns=2; story.",
        ),
        (
            'cache = "warm"',
            'cache = "restart"',
            "the cache 'restart' is not measured of chat; measured are: cold; warm.",
        ),
        ('load = "rate 0.5/s"', 'load = "rate 3/s"', "the load 'rate 3/s' is not measured of story"),
        ('"ttft_p95"', '"ttft"', "ttft needs a statistic."),
        ('"ttft_p95"', '"speed"', "'speed' is no measure."),
        ('at_most = "500ms"', 'at_most = "0ms"', "nothing keeps ttft_p95 at 0"),
        ('at_most = "500ms"', "at_most = 500", "ttft_p95: '500' is no value for it."),
        ('at_most = "500ms"', 'at_most = "1s"\nat_least = "2s"', "nothing keeps both: at_least is above at_most."),
        ('measure = "ttft_p95"', 'measure = "error"', "error: '500ms' is no value for it."),
        ('measure = "output_throughput"', 'measure = "goodput"', "goodput needs an SLO, and story has none."),
        ('at_most = "5s"', 'at_most = "5s"\ncache = "cold"', "the start is of no workload: leave out cache."),
        (
            'measure = "ready"\ncandidate = "ours"',
            'measure = "ready"\ncandidate = "other"',
            "other is given by its url",
        ),
        ('use = "chat:turns=2"', 'use = "caht"', "c.toml, line 19, workload 1: There is no workload 'caht'"),
        ('use = "chat:turns=2"', 'use = "chat:turn=2"', "The workload chat has no parameter 'turn'"),
        ('use = "story"', 'use = "chat:turns=2"\nconcurrency = 4\ncache = "warm"', "has concurrency or rate, not both"),
        ("concurrency = [1, 4]", "concurrency = [1, 1]", "chat:turns=2, cold, concurrency 1 is measured twice."),
        ("concurrency = [1, 4]", "concurrency = []", "it names no load."),
        ("concurrency = [1, 4]", "concurrency = [0]", "concurrency takes a whole number of at least 1."),
        ('rate = [0.5, "2:gamma=0.5"]', "rate = nan", "nan is no rate of requests a second."),
        ('rate = [0.5, "2:gamma=0.5"]', 'rate = "2:gamma=0"', "'2:gamma=0' is no rate of requests a second."),
        ('cache = ["cold", "warm"]', 'cache = "hot"', "cache takes cold, warm, restart, not 'hot'."),
        ('cache = ["cold", "warm"]', "cache = []", "cache is an empty list."),
        (
            'cache = ["cold", "warm"]',
            'cache = "restart"',
            "restart needs servers started here, and other is given by its url.",
        ),
        ('slo = "ttft_p95=500ms"', 'slo = "fast"', "'fast' is no limit."),
        ('slo = "ttft_p95=500ms"', 'slo = "ready=1s"', "an SLO limits latencies, errors and rates"),
        ('slo = "ttft_p95=500ms"', 'by = "goodput"', "goodput needs an SLO."),
        ('name = "other"', 'name = "ours"', "there are two candidates called 'ours'."),
        ('name = "other"', 'name = "ours (best)"', "there are two candidates called 'ours (best)'."),
        ('name = "other"', 'name = "a\\nb"', "cannot be printed as it is."),
        ('"--port", "{port}"]', '"--port", "80"]', "the command does not say where the port goes."),
        ("{model}", "{modle}", "{modle} stands for nothing; there are {port} and {model}."),
        ('"localllm", "serve"', '"local\\u0000llm"', "command holds a character that no command takes."),
        ("best = [", 'variables = { "A=B" = "" }\nbest = [', "'A=B' cannot be set in an environment."),
        ("best = [", 'variables = { A = "{prot}" }\nbest = [', "{prot} stands for nothing"),
        ("best = [", 'api = "openai"\nbest = [', "api takes openai-chat or openai-completions, not 'openai'."),
        ('serves = "x"', 'flags = ["x"]', "flags is for a command; a server given by its url runs as it is."),
        ('url = "http://127.0.0.1:1"', "", "a candidate has a command or a url; this one has neither."),
        ('url = "http://127.0.0.1:1"', 'url = "http://[::1"', "is no address"),
        ('url = "http://127.0.0.1:1"', 'url = "http://h:1?model=a"', "an address holds neither a key nor a query."),
        (
            'reference = "smollm2:135m"',
            'named = "x"\nquant = "Q4"',
            "what only a server knows by name cannot be checked",
        ),
        ('reference = "smollm2:135m"', 'file = "a"\nnamed = "x"', "this one has file and named."),
        ('reference = "smollm2:135m"', 'file = "a"\nsha256 = "12"', "sha256 takes 64 hexadecimal digits."),
        ('serves = "x"', 'model = "n"', "there is no model 'n'; there are m."),
    ],
)
def test_a_mistake_is_a_sentence_with_its_place(old: str, new: str, said: str) -> None:
    assert said in refused(old, new)


def test_a_file_that_is_not_there_or_no_text_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no contract"):
        read_bytes(tmp_path / "no.toml")
    with pytest.raises(UsageError, match="Cannot read the contract"):
        read_bytes(tmp_path)
    with pytest.raises(UsageError, match="c, line 2: not UTF-8 text"):
        parse_contract(b"a = 1\n\xff", source="c", folder=tmp_path)
    with pytest.raises(UsageError, match="too long"):
        parse_contract(b"#" * (MAX_BYTES + 1), source="c", folder=tmp_path)
    with pytest.raises(UsageError, match="nested too deeply"):
        parse_contract(b"a = " + b"[" * 100_000, source="c", folder=tmp_path)
    with pytest.raises(UsageError, match="no TOML"):
        parse_contract(b"a = " + b"9" * 10_000, source="c", folder=tmp_path)


LINES = TEXT.splitlines()
VALUES = st.sampled_from(
    (
        *("1", "-1", "0", "1e400", "nan", "inf", "true", '""', '"x"', "[]", "[[]]", "{}", "1979-05-27", "07:32:00"),
        *('"\\u0000"', '"500ms"', "99999999999999999999999", "[1, 'a']", '{ a = "{port}" }', '"replay:/dev/null"'),
    )
)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail_otherwise(data: bytes) -> None:
    _only_refused(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_change_of_a_contract_makes_it_fail_otherwise(data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        what = data.draw(st.sampled_from(["value", "drop", "swap", "key", "again"]))
        key, equals, _ = lines[at].partition(" = ")
        if what == "value" and equals:
            lines[at] = f"{key} = {data.draw(VALUES)}"
        elif what == "drop":
            lines[at] = ""
        elif what == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif what == "again":
            lines.insert(at, lines[data.draw(st.integers(0, len(lines) - 1))])
        else:
            name = data.draw(st.text(alphabet='abt_-. "[]', max_size=6))
            lines.insert(at, f"{name} = {data.draw(VALUES)}")
    _only_refused("\n".join(lines).encode())


def _only_refused(data: bytes) -> None:
    said = "a contract"
    try:
        parse_contract(data, source="c.toml", folder=Path("/nowhere"))
    except UsageError as error:
        said = error.message
    assert said
    assert "\n" not in said
