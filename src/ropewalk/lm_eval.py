"""Our models in EleutherAI's evaluation harness (the package `lm_eval`), under the name "ropewalk".

The harness (0.4.13) takes models from a table of its own and has no way to find those of other packages: no entry
points, no option, no variable. So this module is imported before it starts: `ropewalk lm-eval ...` does so and takes
the harness's own arguments. In Python, import it before `simple_evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ropewalk.errors import TemplateError
from ropewalk.llm import LLM
from ropewalk.params import SamplingParams

MAX_GEN_TOKS = 256


@register_model("ropewalk")
class RopewalkLM(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """A model for the harness.

    Parameters
    ----------
    model : str
        As for `LLM`, and so are all options besides.
    batch_size : int or "auto"
        Requests that generate at once. What is scored is batched by its tokens.
    max_batch_size : int, optional
        Most that "auto" may choose.
    device : str, optional
        Has no effect: the harness names "cuda:0" unless told otherwise, and this is the CPU.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = max_batch_size or 16 if str(batch_size).startswith("auto") else int(batch_size)
        self._name = str(model)
        self.llm = LLM(model, max_batch=size, **options)

    @property
    def eot_token_id(self) -> int:
        """The token before a text that stands alone: the model's BOS token, otherwise one that ends its output."""
        bos = self.llm.tokenizer.bos_id
        return min(self.llm.tokenizer.eos_ids) if bos is None else bos

    @property
    def max_length(self) -> int:
        """Most tokens of a request."""
        return self.llm.context_length

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its cache of tokenized requests by."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the model's chat template; it has no others by name."""
        template = self.llm.chat_template
        return "" if template is None or not chat_template else template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat template's text for some messages.

        Raises
        ------
        TemplateError
            If the model has none, or it refuses the messages.
        """
        if self.llm.chat_template is None:
            raise TemplateError(
                f"{self._name} has no chat template; allowed: to leave out --apply_chat_template"
            )
        return self.llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids of a text; a BOS token is put first if the model wants one and the text does not begin with it."""
        ids = self.llm.encode(string, add_special=add_special_tokens is not False)
        bos = self.llm.tokenizer.bos_id
        return ids[1:] if add_special_tokens is None and ids[:2] == [bos, bos] else ids

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; those of one context that follow each other share its computation."""
        found = []
        for _, group in groupby(requests, key=lambda request: request[1]):
            pairs = [self._cut(context, rest) for _, context, rest in group]
            for context, same in groupby(pairs, key=lambda pair: pair[0]):
                found += self.llm.score(context, [rest for _, rest in same])
        return [(score.total, score.is_greedy) for score in found]

    def _cut(self, context: list[int], rest: list[int]) -> tuple[list[int], list[int]]:
        """What fits of a context, from its end: the harness's own models do the same."""
        return context[-max(self.max_length - len(rest), 1) :], rest

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows as long as the context."""
        totals = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until one of their stop strings."""
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            params.append(_params(dict(options)))
            room = self.max_length - (params[-1].max_tokens or 0)
            prompts.append(self.tok_encode(context)[-max(room, 1) :])
        return [output.text for output in self.llm.generate(prompts, params)]


def _params(options: dict[str, Any]) -> SamplingParams:
    """The harness's generation options, which are those of transformers."""
    until = options.pop("until", None) or ()
    most = options.pop("max_gen_toks", options.pop("max_new_tokens", MAX_GEN_TOKS))
    samples = options.pop("do_sample", options.get("temperature", 0) > 0)
    temperature = options.pop("temperature", 1.0)
    return SamplingParams(
        max_tokens=most,
        stop=(until,) if isinstance(until, str) else tuple(until),
        temperature=temperature if samples else 0.0,
        **options,
    )
