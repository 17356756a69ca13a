"""Every error that Ropewalk raises on purpose.

Each message names the thing, the value and what is allowed. The command line prints the message of a
`RopewalkError` and exits with status 1; anything else is a fault in Ropewalk itself.
"""

import sys
import warnings


class RopewalkError(Exception):
    """Base class: catch this to catch every error that Ropewalk raises on purpose."""


class CheckpointError(RopewalkError, ValueError):
    """A model file is malformed, truncated, or lies about its own contents."""


class UnsupportedModelError(RopewalkError, ValueError):
    """The file is sound, but describes a model that Ropewalk does not implement."""


class ModelNotFoundError(RopewalkError, LookupError):
    """No file, catalog entry or hub repository answers to the given model name."""


class DownloadError(RopewalkError, OSError):
    """A model could not be fetched, or what came does not have the expected SHA-256."""


class InvalidParameterError(RopewalkError, ValueError):
    """A parameter has a value that is not allowed."""


class PromptError(RopewalkError, ValueError):
    """A prompt cannot be used: empty, too long for the context, or with token ids outside the vocabulary."""


class TruncationWarning(UserWarning):
    """A prompt was cut, as `truncate_prompt_tokens` allowed."""


class TemplateError(RopewalkError, ValueError):
    """A chat template refused its messages, did something forbidden, or exceeded its limits."""


class GenerationError(RopewalkError, RuntimeError):
    """A request could not be continued, for example because all its logits are NaN."""


class BatchError(RopewalkError, ValueError):
    """The input or output file of a batch cannot be used."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning that shows the line of the caller's own code that led to it, however deep in ours we are."""
    frame, level = sys._getframe(1), 3
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").startswith("ropewalk."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
