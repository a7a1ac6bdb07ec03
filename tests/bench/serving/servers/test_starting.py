from __future__ import annotations

import os
import sys

from localllm.bench.serving.servers.starting import Starting, is_secret


def test_placeholders_are_filled_in_words_and_variables() -> None:
    command, variables = ("s", "-m={model}", "{port}", '{"a":1}'), {"HOST": "h:{port}"}
    starting = Starting("x", command, model="/m", variables=variables, environment={"A": "{port}"})
    assert starting.words(5) == ["s", "-m=/m", "5", '{"a":1}']
    assert starting.whole_environment(5) == {"A": "{port}", "HOST": "h:5"}
    assert Starting("x", command).whole_environment(5) == dict(os.environ)
    assert Starting("x", ("localllm", "serve")).words(5) == [sys.executable, "-m", "localllm", "serve"]


def test_names_tell_which_values_are_not_shown() -> None:
    assert all(map(is_secret, ("HF_TOKEN", "OPENAI_API_KEY", "Db_Password", "client_secret", "PGPASSWD")))
    assert not any(map(is_secret, ("PATH", "HOME", "LOCALLLM_HOME", "OMP_NUM_THREADS")))
