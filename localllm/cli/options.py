"""The flags of the command line that more than one verb may take: spelling, variable, default and meaning.

A verb takes an `Annotated` alias for one flag, or one of the frozen groups below for many;
`command` spreads a group into flags. Each is also `LOCALLLM_<NAME>` and a key of the TOML file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import typer

from localllm.cli.completion import complete_model
from localllm.cli.failures import Manner, from_variable, told
from localllm.cli.units import check_days, gpu_layers, number_or_auto, parse_size, size_or_auto
from localllm.errors import UsageError

ENV_PREFIX = "LOCALLLM_"
_SHARED = {"show_envvar": False, "show_default": True}


def option(*spellings: str, help: str, check: Callable[[str, Any], object] | None = None, **more: Any) -> Any:
    """Return the declaration of a flag whose variable comes from its first spelling.

    `check` takes that spelling and a value, and raises UsageError where the value cannot be taken.
    """
    name = spellings[0].lstrip("-").replace("-", "_").upper()
    if check is not None:
        more["callback"] = _checking(spellings[0], check)
    return typer.Option(*spellings, help=help, envvar=ENV_PREFIX + name, **{**_SHARED, **more})


def _checking(flag: str, check: Callable[[str, Any], object]) -> Callable[..., Any]:
    """Return what has typer check a value, so that one which a variable gives is told as the variable's."""

    def callback(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        if value is None or context.resilient_parsing:
            return value
        try:
            check(flag, value)
        except UsageError as error:
            source = context.get_parameter_source(str(parameter.name))
            if source is None or source.name != "ENVIRONMENT":
                raise
            raise from_variable(str(parameter.envvar), error) from None
        return value

    return callback


def _check_kv(_: str, text: str) -> None:
    from localllm.models.kv_types import KvTypes

    if text != "auto":
        KvTypes.parse(text)


_CTX_HELP = (
    "Context in tokens, shared by what runs at once; auto: what prompt and answer need (run), 8192 (chat), 16384 "
    "(serve), or less where model or memory set the limit."
)
SEED_HELP = "Same seed, same draws. Default of run and chat: a new one each time."
_FILE_HELP = "Text to add to the prompt, or to the first question of a chat; repeatable; - is stdin (run)."

MODEL_HELP = "File, directory, hf:org/repo[@revision][:QUANT], alias, or (part of) a stored name."
_DEFAULT = "smollm2:135m"


def model_argument(help: str = MODEL_HELP, *, metavar: str = "[MODEL]") -> Any:
    """Return the declaration of an argument that names a model, which shells complete."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_model)


Model: TypeAlias = Annotated[str, model_argument(metavar="MODEL")]
ModelOrDefault: TypeAlias = Annotated[str | None, model_argument(f"{MODEL_HELP} Left out: {_DEFAULT}.")]
ModelOrPrompt: TypeAlias = Annotated[
    str | None,
    model_argument(f"{MODEL_HELP} Left out, with a prompt of several words or text on stdin: {_DEFAULT}."),
]
ModelOrVerb: TypeAlias = Annotated[
    str | None,
    model_argument(f"{MODEL_HELP} Left out: {_DEFAULT}. One called like a sub-command is written ./name."),
]
Json: TypeAlias = Annotated[bool, option("--json", help="One JSON document on stdout.")]
Verbose: TypeAlias = Annotated[
    bool, option("--verbose", "-v", help="Tell what is decided and why, and trace failures.")
]
Quiet: TypeAlias = Annotated[bool, option("--quiet", "-q", help="Nothing on stderr but errors.")]
Memory: TypeAlias = Annotated[bool, option("--memory", help="Estimate the memory it takes.")]
Ctx: TypeAlias = Annotated[str, option("--ctx", metavar="N|auto", help=_CTX_HELP, check=number_or_auto)]
Template: TypeAlias = Annotated[
    Path | None, option("--template", metavar="FILE", help="Chat template to use instead of the model's.")
]
NoServer: TypeAlias = Annotated[
    bool, option("--no-server", help="Load the model here, also where a running server holds it.")
]
ApiKeyFile: TypeAlias = Annotated[
    Path | None,
    option(
        "--api-key-file",
        metavar="FILE",
        help="File with the server's key, or with several, one a line. Default: LOCALLLM_API_KEY.",
    ),
]
Kv: TypeAlias = Annotated[
    str,
    option(
        "--kv",
        check=_check_kv,
        metavar="TYPE|K:V|auto",
        help="KV cache type: f16, q8_0 or q4_0; auto: f16, with --deterministic q8_0.",
    ),
]


@dataclass(frozen=True, slots=True)
class TalkFlags:
    """How much is said on stderr."""

    verbose: Verbose = False
    quiet: Quiet = False


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """How the model is loaded."""

    ctx: Ctx = "auto"
    kv: Kv = "auto"
    flash_attn: Annotated[
        Literal["auto", "on", "off"],
        option("--flash-attn", metavar="auto|on|off", help="Flash attention; a quantised V cache needs it."),
    ] = "auto"
    gpu: Annotated[
        str,
        option("--gpu", check=gpu_layers, metavar="auto|off|all|N", help="Layers on the GPU; auto: as many as fit."),
    ] = "auto"
    threads: Annotated[
        str,
        option(
            "--threads", check=number_or_auto, metavar="N|auto", help="Threads that compute; auto: one a fast core."
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class CacheFlags:
    """What is kept of prompts, where, and whether equal requests get equal answers to the last bit."""

    kv_ram: Annotated[
        str,
        option(
            "--kv-ram",
            check=size_or_auto,
            metavar="SIZE|auto|off",
            help="Memory in which a model keeps what it computed; auto: a quarter of what is free.",
        ),
    ] = "auto"
    kv_disk: Annotated[
        str,
        option(
            "--kv-disk",
            check=size_or_auto,
            metavar="SIZE|auto|off",
            help="Disk space in which all models keep it, also after the end; auto: a tenth of what is free.",
        ),
    ] = "auto"
    kv_disk_daily: Annotated[
        str, option("--kv-disk-daily", check=parse_size, metavar="SIZE", help="The most that is written there a day.")
    ] = "32GB"
    kv_disk_age: Annotated[
        float,
        option(
            "--kv-disk-age", check=check_days, metavar="DAYS", help="What was not used for so long is deleted there."
        ),
    ] = 7.0
    private: Annotated[bool, option("--private", help="Keep nothing of this on disk.")] = False
    deterministic: Annotated[
        bool,
        option(
            "--deterministic",
            help="Equal requests, equal answers, whatever else runs or is cached; slower, KV cache of type q8_0.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How the answer is drawn; what is not set comes from the model's own defaults."""

    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            "-n",
            min=1,
            metavar="N",
            help="Longest answer in tokens. Default: the rest of the context, at most 2048.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        option(
            "--temperature",
            "-t",
            metavar="X",
            help="0 = always the likeliest token. Default: the model's own, else 0.8.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        option("--top-p", metavar="X", help="Only the likeliest tokens that hold this share; 1 = all."),
    ] = None
    top_k: Annotated[int | None, option("--top-k", metavar="N", help="Only the N likeliest tokens; 0 = all.")] = None
    min_p: Annotated[
        float | None,
        option(
            "--min-p",
            metavar="X",
            help="Drop tokens below this share of the likeliest one. Default: the model's own, else 0.05.",
        ),
    ] = None
    repeat_penalty: Annotated[
        float | None, option("--repeat-penalty", metavar="X", help="Weaken repeated tokens; 1 = off.")
    ] = None
    seed: Annotated[int | None, option("--seed", metavar="N", help=SEED_HELP)] = None
    stop: Annotated[list[str] | None, option("--stop", metavar="TEXT", help="End before this text; repeatable.")] = None


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """What is asked, beside the prompt itself."""

    system: Annotated[str | None, option("--system", "-s", metavar="TEXT", help="System message.")] = None
    file: Annotated[list[Path] | None, option("--file", "-f", metavar="FILE", help=_FILE_HELP)] = None
    raw: Annotated[bool, option("--raw", help="Send the prompt as it is, without the chat template.")] = False
    template: Template = None


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """What is written, and when it counts as a failure."""

    json: Json = False
    jsonl: Annotated[bool, option("--jsonl", help="The events, one JSON object a line.")] = False
    extract: Annotated[bool, option("--extract", "-x", help="Only the first fenced code block.")] = False
    stats: Annotated[bool, option("--stats", help="Counts and speeds on stderr.")] = False
    strict_length: Annotated[bool, option("--strict-length", help="Exit 9 if the length limit ended it.")] = False
    timeout: Annotated[
        float | None, option("--timeout", metavar="SECONDS", help="Give up after this long; exit 124.")
    ] = None


def command(function: Callable[..., None], verb: str) -> Callable[..., None]:
    """Return `function` as a verb of that name: flag groups become one flag a field, failures become sentences."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            flat += _flags(kind)
        else:
            flat.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def call(**values: Any) -> None:
        manner = Manner(bool(values.get("json")), bool(values.get("jsonl")), bool(values.get("verbose")), verb)
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        with told(manner):
            function(**values)

    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _flags(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
