"""Every failure a user can see: a sentence, the next command to type, and its codes.

One subclass per kind; the exit code, HTTP status and wire code stand on the class, so a
raise site says only what happened and what to do about it.
"""

from __future__ import annotations


def pasteable(*words: str) -> str:
    """Return a command for a hint, quoted so that pasting it into a shell runs these words and nothing else."""
    import shlex

    return shlex.join(words)


class LocalLLMError(Exception):
    """A failure told to the user as one sentence and, where there is one, the next step.

    `message` never holds prompt text; `details` are the numbers behind it (for `--json` and HTTP).
    """

    exit_code = 1
    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, hint: str = "", **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class UsageError(LocalLLMError):
    """A flag, field or combination that cannot be honoured."""

    exit_code, http_status, code = 2, 400, "invalid_request"


class TemplateError(LocalLLMError):
    """The chat template is missing, unusable, or refuses this conversation in its own words."""

    exit_code, http_status, code = 2, 400, "template_error"


class ModelNotFound(LocalLLMError):
    """No model answers to this reference."""

    exit_code, http_status, code = 3, 404, "model_not_found"


class ModelRefused(LocalLLMError):
    """The file is there, but is malformed, unsupported or unfit for what was asked of it."""

    exit_code, http_status, code = 3, 422, "model_refused"


class NotEnoughMemory(LocalLLMError):
    """The estimate exceeds what this machine has free; nothing was loaded."""

    exit_code, http_status, code = 4, 503, "not_enough_memory"


class ContextOverflow(LocalLLMError):
    """The prompt (and its answer's reserve) can never fit the context."""

    exit_code, http_status, code = 5, 400, "context_length_exceeded"


class ServerUnreachable(LocalLLMError):
    """Nothing usable answers at the given address."""

    exit_code, http_status, code = 6, 502, "server_unreachable"


class BadConstraint(LocalLLMError):
    """A schema, regex or grammar that cannot be enforced."""

    exit_code, http_status, code = 7, 400, "invalid_schema"


class HashMismatch(LocalLLMError):
    """The bytes are not the ones that were promised."""

    exit_code, http_status, code = 8, 502, "hash_mismatch"


class StoppedByLength(LocalLLMError):
    """`--strict-length`: the answer hit its length limit."""

    exit_code, http_status, code = 9, 200, "stopped_by_length"


class DownloadFailed(LocalLLMError):
    """The source could not be reached, or broke off; what arrived is kept for a resume."""

    exit_code, http_status, code = 1, 502, "download_failed"


class QueueFull(LocalLLMError):
    """The waiting queue is at its limit; try again later."""

    exit_code, http_status, code = 1, 429, "queue_full"


class Unavailable(LocalLLMError):
    """Loading, draining or dead: not now. `code` says which, where it is known."""

    exit_code, http_status, code = 1, 503, "unavailable"

    def __init__(self, message: str, hint: str = "", *, code: str = code, **details: object) -> None:
        super().__init__(message, hint, **details)
        self.code = code


class WorkerDied(LocalLLMError):
    """The process that held the model died with this request in it; it is being started again."""

    exit_code, http_status, code = 1, 503, "worker_died"


class Poisoned(LocalLLMError):
    """This request, alone at work, took the model's process down; it is not tried again for a while."""

    exit_code, http_status, code = 1, 422, "request_crashes_engine"


class EngineError(LocalLLMError):
    """A forward failed: the slots of its batch are undefined and are cleared."""

    exit_code, http_status, code = 1, 500, "engine_error"


class TimedOut(LocalLLMError):
    """`--timeout` passed."""

    exit_code, http_status, code = 124, 504, "timeout"


class RuleFailed(LocalLLMError):
    """What `bench` was told to hold does not: a rule of a contract, a bound of `--fail-on`, a golden answer."""

    exit_code, http_status, code = 10, 500, "rule_failed"
