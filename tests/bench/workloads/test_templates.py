"""Every workload goes through the chat templates of real models, or they refuse it in their own words."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from localllm.bench.workloads.ask import Ask
from localllm.bench.workloads.parse import parse_workload
from localllm.errors import TemplateError
from localllm.models.chat_template import ChatTemplate, Rendered
from tests.bench.workloads.asking import CHATS, common
from tests.models import templates

MAX_CHARS = 1_000_000

# Templates that do not take a workload at all, and their words.
REFUSED = {
    **{("google-gemma-2-2b-it", name): "System role not supported" for name in CHATS if name != "story"},
    ("Kimi-K2-Instruct", "agent"): "access to attribute 'append'",
}
# Templates that leave a message out: tool results; the system prompt where the last message is no user's.
LEAVES_OUT = {("microsoft-Phi-3.5-mini-instruct", "agent"), ("mistralai-Mistral-Nemo-Instruct-2407", "agent")}


def template(shared: Path, name: str) -> ChatTemplate:
    source = templates.source(shared, name)
    return ChatTemplate(source, specials=templates.spellings(source), bos=templates.BOS, eos=templates.EOS)


def rendered(of: ChatTemplate, ask: Ask) -> Rendered:
    return of.render(ask.messages, tools=ask.tools, max_chars=MAX_CHARS)


@pytest.mark.parametrize("workload", CHATS)
@pytest.mark.parametrize("name", templates.NAMES)
def test_a_workload_renders_whole_with_siblings_and_salts(shared: Path, name: str, workload: str) -> None:
    of = template(shared, name)
    for ask in next(parse_workload(workload).sessions(2)):
        if (name, workload) in REFUSED and len(ask.messages) > 2 - (name == "google-gemma-2-2b-it"):
            with pytest.raises(TemplateError, match=REFUSED[name, workload]):
                rendered(of, ask)
            continue
        for one in (ask, ask.sibling(), ask.salted("salt")):
            prompt = rendered(of, one)
            assert prompt.n_neutralised == 0
            assert not prompt.unseen or (name, workload) in LEAVES_OUT
            assert one.messages[-1]["content"][-20:] in prompt.plain or (name, workload) in LEAVES_OUT


@pytest.mark.parametrize("workload", CHATS)
@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen3.5-4B", "meta-llama-Llama-3.2-3B-Instruct"])
def test_siblings_share_and_salts_do_not_in_the_rendered_prompt(shared: Path, name: str, workload: str) -> None:
    of = template(shared, name)
    first, second = islice(parse_workload(workload).sessions(3), 2)
    asks = (*first, *second)
    # What the template writes before the first message, its own system prompt where there is none.
    roles = ("system", "user") if asks[0].messages[0]["role"] == "system" else ("user",)
    empty = rendered(of, Ask("none", 1, messages=tuple({"role": role, "content": "!"} for role in roles)))
    for ask in asks:
        whole, sibling = rendered(of, ask).plain, rendered(of, ask.sibling()).plain
        n_shared = len(common(whole, sibling))
        last = str(ask.messages[-1]["content"])
        assert n_shared >= whole.rindex(last[:30])
        assert n_shared < whole.rindex(last[:30]) + 6
    preamble = 700 if asks[0].tools else len(empty.plain)
    for at, ask in enumerate(asks[1:], 1):
        pair = rendered(of, asks[0].salted("0 first")).plain, rendered(of, ask.salted(f"{at} other")).plain
        assert len(common(*pair)) < preamble
