"""/v1/chat/completions: messages to a prompt, and an answer to a message with content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropewalk.api.answer import END_THINK, THINK, AnswerReader, Part
from ropewalk.api.bodies import (
    ChatChoice,
    ChatLogprobs,
    Event,
    FinishReason,
    MessageBody,
    ToolCallBody,
    dropped,
    new_id,
)
from ropewalk.api.body import checked
from ropewalk.api.chat_request import ChatRequest, ToolChoice
from ropewalk.api.choices import ChoicesTask
from ropewalk.api.errors import ApiError
from ropewalk.api.logprobs import chat_logprob, prompt_logprobs
from ropewalk.api.tasks import Find, Job, Structure, check_length, make_job, structure_of
from ropewalk.api.tools import MISTRAL, ToolFormat
from ropewalk.api.traces import of_chunk, of_completion
from ropewalk.engine.sampler import Logprob
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk
from ropewalk.text.chat import encode_chat
from ropewalk.text.grammar import After

if TYPE_CHECKING:
    from ropewalk.engine.constraint import Constraint
    from ropewalk.llm import LLM
    from ropewalk.params import SamplingParams

OURS = frozenset({"messages", "tools", "add_generation_prompt", "documents", "self"})
"""What `chat_template_kwargs` cannot set."""


class Conversation:
    """A conversation as the model gets it, and how its answers are read.

    Parameters
    ----------
    llm : LLM
    request : ChatRequest
    add_generation_prompt : bool
        End with the beginning of an answer.

    Attributes
    ----------
    text : str
        The prompt.
    tool_format : ToolFormat or None
        How calls are written; None if there are to be none.
    """

    def __init__(self, llm: LLM, request: ChatRequest, *, add_generation_prompt: bool = True) -> None:
        template = llm.chat_template
        if template is None:
            raise ApiError("this model has no chat template; use /v1/completions", param="model")
        choice = request.tool_choice or ("auto" if request.tools else "none")
        functions = [tool.function.model_dump(exclude_none=True) for tool in request.tools or ()]
        form = ToolFormat.of(template.source)
        if functions and template.tool_use and not form.explained_by_template:
            own = ToolFormat.of(template.tool_use.source)
            if own.explained_by_template:
                template, form = template.tool_use, own
        self.tool_format = form if choice != "none" else None
        self.names = [function["name"] for function in functions]
        self.required = choice != "auto"
        if isinstance(choice, ToolChoice):
            self.names = [choice.function.name]
        self._functions = [function for function in functions if function["name"] in self.names]
        self._parallel = request.parallel_tool_calls is not False and not isinstance(choice, ToolChoice)
        messages = [message.as_dict() for message in request.messages]
        tools = [{"type": "function", "function": f} for f in functions] if self.tool_format else None
        if not form.explained_by_template:
            messages, tools = form.explained(messages, functions if tools else ()), None
        variables = request.chat_template_kwargs or {}
        if wrong := OURS & variables.keys():
            raise ApiError(f"chat_template_kwargs cannot set {min(wrong)!r}", param="chat_template_kwargs")
        self.messages: Sequence[Mapping[str, Any]] = messages
        self._render: Callable[[Sequence[Mapping[str, Any]]], str] = lambda messages: template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        self._llm = llm
        self.text = self._render(messages)
        if request.truncate_prompt_tokens is None:
            check_length(llm, self.text)
        self.thinks = THINK in template.source or END_THINK in template.source
        self.thinking = self.text.rstrip().endswith(THINK)

    def job(self, params: SamplingParams, constraint: Constraint | None) -> Job:
        """Return what is to be generated; the oldest turns may have been left out."""
        return make_job(
            self._llm,
            encode_chat(self._llm.tokenizer, self.text),
            params,
            constraint,
            is_limited=params.max_tokens is not None,
            messages=self.messages,
            encode=lambda messages: encode_chat(self._llm.tokenizer, self._render(messages)),
        )

    def reader(self) -> AnswerReader:
        """Return a reader for one answer."""
        return AnswerReader(
            thinks=self.thinks, thinking=self.thinking, tools=self.tool_format, names=self.names
        )

    def constraint(self, structure: Structure | None) -> Constraint | None:
        """Return what answers must follow: a structure, the form of calls, or either of the two."""
        grammars, form = self._llm.grammars, self.tool_format
        if form is not None and self.required and structure is not None:
            raise ApiError(
                "a required call cannot be combined with a structure of the answer", param="tool_choice"
            )
        wanted = structure.constraint(grammars) if structure else None
        if form is not None:
            grammar = form.grammar(
                self._functions,
                required=self.required,
                parallel=self._parallel,
                marker_id=self._marker_id,
                answer=structure.rule if structure else None,
            )
            wanted = grammars.lark(grammar)
        if self.thinking and wanted is not None:
            return After(END_THINK, wanted, self._llm.tokenizer)
        return wanted

    @property
    def _marker_id(self) -> int | None:
        """The marker of calls as a control token, if it is one."""
        marker = self.tool_format.marker if self.tool_format else ""
        ids = self._llm.encode(marker, add_special=False) if marker else []
        return ids[0] if len(ids) == 1 and self._llm.tokenizer.is_special(ids[0]) else None

    @property
    def shows_control_tokens(self) -> bool:
        """Whether text must keep control tokens, because calls are recognised by one."""
        return self.tool_format is not None and (self._marker_id is not None or self.tool_format is MISTRAL)


class ChatTask(ChoicesTask):
    """One request to /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: dict[str, Any], find: Find) -> None:
        request = checked(ChatRequest, body)
        super().__init__(request, find)
        self._logprobs = bool(request.logprobs)
        self.conversation = conversation = Conversation(self.llm, request)
        if conversation.shows_control_tokens:
            request.skip_special_tokens = False
        params = request.sampling_params(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            adapters=self.llm.adapters,
        )
        constraint = conversation.constraint(structure_of(request, request.response_format))
        self.jobs = [conversation.job(params, constraint)]
        self._readers = [conversation.reader() for _ in range(params.n)]

    # Whole.

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer."""
        (output,) = outputs
        answer = self.whole([self._choice(completion) for completion in output.outputs], outputs)
        if (n_top := self.jobs[0].params.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output, self.llm.tokenizer, n_top)
        return answer

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        reader = self.conversation.reader()
        message = message_of(reader.push(completion.text) + reader.finish(), self._new_call_id)
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs_of(completion.logprobs or []),
            "finish_reason": finish_reason(completion, reader),
            "seed": completion.seed,
            **dropped(completion, self.jobs[0].params),  # type: ignore[typeddict-item]
            **of_completion(completion, self.llm.tokenizer),
        }

    # Streamed.

    def start(self) -> list[Event]:
        """The role of every answer."""
        first: MessageBody = {"role": "assistant", "content": "", "refusal": None}
        return [self.chunk(index, {"delta": first}) for index in range(self.jobs[0].params.n)]

    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """Deltas, each of one kind; log-probabilities go with the first one."""
        reader = self._readers[chunk.index]
        parts = reader.push(chunk.text)
        if chunk.completion is not None:
            parts += reader.finish()
        logprobs = self._logprobs_of([chunk.logprob] if chunk.logprob else [])
        deltas = [self._delta(part) for part in parts]
        trace = of_chunk(chunk, self.llm.tokenizer)
        if ((logprobs and logprobs["content"]) or trace) and not deltas:
            deltas = [{"content": ""}]
        events = []
        for delta in deltas:
            events.append(self.chunk(chunk.index, {"delta": delta}, logprobs=logprobs, more=trace))
            logprobs, trace = None, {}
        if chunk.completion is not None:
            reason = finish_reason(chunk.completion, reader)
            more = dropped(chunk.completion, self.jobs[0].params)
            seed = chunk.completion.seed
            events.append(self.chunk(chunk.index, {"delta": {}}, reason=reason, seed=seed, more=more))
        return events

    def _delta(self, part: Part) -> MessageBody:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "arguments":
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        call = new_call(part.text, self._new_call_id())
        return {"tool_calls": [{"index": part.index, **call}]}

    def _logprobs_of(self, logprobs: Sequence[Logprob]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = [chat_logprob(self.llm.tokenizer, each) for each in self.shown(logprobs)]
        return {"content": content, "refusal": None}

    def _new_call_id(self) -> str:
        """Mistral's templates want nine letters and digits."""
        fresh = new_id("")
        return fresh[:9] if self.conversation.tool_format is MISTRAL else f"call_{fresh[:24]}"


def message_of(parts: Sequence[Part], new_call_id: Any) -> MessageBody:
    """Put the parts of a whole answer together."""
    texts: dict[str, str] = {"content": "", "reasoning": ""}
    calls: list[ToolCallBody] = []
    for part in parts:
        if part.kind == "call":
            calls.append(new_call(part.text, new_call_id()))
        elif part.kind == "arguments":
            calls[part.index]["function"]["arguments"] += part.text
        else:
            texts[part.kind] += part.text
    content = texts["content"].rstrip() or None if calls else texts["content"]
    message: MessageBody = {"role": "assistant", "content": content, "refusal": None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def new_call(name: str, call_id: str) -> ToolCallBody:
    """A call without arguments yet."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def finish_reason(completion: CompletionOutput, reader: AnswerReader) -> FinishReason:
    """ "stop", "length", or "tool_calls" for an answer that ended with calls."""
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if reader.n_calls else "stop"
