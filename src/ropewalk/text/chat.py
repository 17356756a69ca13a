"""Chat templates: a list of messages becomes the text, and the ids, that a model was trained on.

The template comes with the model file, in the Jinja language; `sandbox` runs it. This module checks and
completes the messages beforehand and turns whatever goes wrong into a `TemplateError`. It knows nothing of
generation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ropewalk.errors import TemplateError

if TYPE_CHECKING:
    import jinja2

    from ropewalk.text.sandbox import ChatEnvironment

Message = Mapping[str, Any]


class _Encoder(Protocol):
    add_bos: bool
    bos_id: int | None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


@cache
def _environment() -> "ChatEnvironment":
    """The only Jinja environment there is; made when the first template is compiled."""
    from ropewalk.text.sandbox import ChatEnvironment

    return ChatEnvironment()


class ChatTemplate:
    """One chat template; compiled when it is first used.

    Parameters
    ----------
    source : the template in the Jinja language.
    bos_token, eos_token : texts that the template may write at the beginning and the end.
    tool_use : the source of the template for conversations with tools, if the model has one of its own.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", tool_use: str | None = None
    ) -> None:
        self.source = source
        self.tool_use: ChatTemplate | None = None
        if tool_use is not None:
            self.tool_use = ChatTemplate(tool_use, bos_token=bos_token, eos_token=eos_token)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "ChatTemplate | None":
        """Return the template in GGUF metadata, or None where there is none, as in a base model."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise TemplateError(f"tokenizer.chat_template is a {type(source).__name__}, not a text")
        other = metadata.get("tokenizer.chat_template.tool_use")
        return cls(
            source,
            bos_token=_token(metadata, "bos"),
            eos_token=_token(metadata, "eos"),
            tool_use=other if isinstance(other, str) else None,
        )

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        try:
            return _environment().compile_chat(self.source)
        except Exception as error:
            raise TemplateError(f"the chat template cannot be compiled: {_reason(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Parameters
        ----------
        messages : mappings with "role" and "content". Arguments of tool calls may be JSON text, as OpenAI's
            clients send them; a template gets the object.
        add_generation_prompt : end with the beginning of the assistant's answer.
        tools : descriptions of functions that the model may call.
        variables : anything else that the template knows, such as `enable_thinking`.

        Raises
        ------
        TemplateError : there are no messages, one is malformed, the template refuses them (in its own words),
            does something forbidden, or exceeds its limits.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable) or not messages:
            raise TemplateError("messages must be a list with at least one message")
        checked = [_checked(i, message) for i, message in enumerate(messages)]
        values = {"documents": None, **self._tokens, **variables}
        values |= {"messages": checked, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._run(values)

    def _run(self, values: Mapping[str, Any]) -> str:
        template = self._compiled
        from ropewalk.text.budget import fresh_budget
        from ropewalk.text.sandbox import RaisedByTemplateError

        try:
            with fresh_budget():
                return template.render(values)
        except RaisedByTemplateError as error:
            raise TemplateError(str(error)) from error
        except Exception as error:  # an untrusted program: any failure in it is the template's
            raise TemplateError(f"the chat template failed: {_reason(error)}") from error


def encode_chat(tokenizer: _Encoder, text: str) -> list[int]:
    """Return the ids of a rendered conversation, with its special tokens read.

    The BOS token comes first exactly once where the model wants one, whether or not the template wrote it;
    where the model wants none, the text is left as the template wrote it.
    """
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


def _token(metadata: Mapping[str, object], name: str) -> str:
    """Text of the BOS or EOS token, "" where the file names none; `tokenizer` checks the ids."""
    i, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    known = isinstance(i, int) and isinstance(tokens, Sequence) and 0 <= i < len(tokens)
    return str(tokens[i]) if known else ""  # type: ignore[index]


def _checked(i: int, message: object) -> dict[str, Any]:
    """Copy one message, with the arguments of its tool calls as objects."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {i} is {message!r}, not a mapping with role and content")
    if not isinstance(message.get("role"), str):
        raise TemplateError(f"message {i} has the role {message.get('role')!r}; it must be a text")
    copy = dict(message)
    calls = copy.get("tool_calls")
    if calls:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise TemplateError(f"message {i} has tool_calls {calls!r}; they must be a list")
        copy["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    copy["content"] = _text_of(i, copy.get("content"), may_be_none=bool(calls))
    return copy


def _text_of(i: int, content: object, *, may_be_none: bool) -> str:
    """The text of a message: OpenAI's clients may send a list of its parts."""
    if content is None and may_be_none:
        return ""
    if content is None:
        raise TemplateError(f"message {i} has no content")
    parts = [content] if isinstance(content, str) else content
    if isinstance(parts, Sequence) and not isinstance(parts, bytes):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise TemplateError(
        f"message {i} has the content {content!r}; allowed: a text, or a list of parts with text"
    )


def _with_parsed_arguments(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    copy = dict(call)
    if isinstance(copy.get("function"), Mapping):
        copy["function"] = _with_parsed_arguments(copy["function"])
    if isinstance(copy.get("arguments"), str):
        try:
            arguments = json.loads(copy["arguments"])
        except (ValueError, RecursionError):
            return copy
        if isinstance(arguments, dict):
            copy["arguments"] = arguments
    return copy
