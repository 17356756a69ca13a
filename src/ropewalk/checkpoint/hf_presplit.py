"""How `tokenizer.json` cuts text into words before merging, as GGUF metadata.

A rule is a sequence of regular expressions, written as tokenizer files write them, and most go by a name in GGUF
(`tokenizer.ggml.pre`). Where the rule of a file is none that has a name, its expressions themselves are put under keys
of ours (`tokenizer.ropewalk.…`). This module does not know vocabularies.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ropewalk.checkpoint.cursor import show
from ropewalk.errors import UnsupportedModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4(digits: str) -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(endings: str, digits: str) -> str:
    lead, upper, lower = (
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    )
    return (
        rf"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

RULE_NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_gpt4(r"\p{N}{1,3}"),), True): "llama-bpe",
    ((_gpt4(r"\p{N}{1,3}"),), False): "glm4",
    ((_gpt4(r"\p{N}"),), False): "qwen2",
    ((_cased("", r"\p{N}"),), True): "tekken",
    ((_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),), False): "gpt-4o",
    (_DEEPSEEK_V3, False): "deepseek-v3",
}
"""GGUF's names of pre-split rules, by the expressions in the order of use and whether whole words come first."""


def pre_split(steps: Sequence[Mapping[str, Any]], label: str, *, whole_words: bool) -> dict[str, object]:
    """The rule of some steps by its name, or else in full.

    Parameters
    ----------
    steps : steps of the pre-tokenizer, sequences opened.
    label : the file, for errors.
    whole_words : whether words that are tokens are not merged.

    Raises
    ------
    UnsupportedModelError
        One of the steps is not implemented.
    """
    patterns = [pattern for step in steps for pattern in _patterns(step, label)]
    # Files may hold the characters themselves.
    escaped = tuple(p.replace("\r", r"\r").replace("\n", r"\n") for p in patterns)
    if name := RULE_NAMES.get((escaped, whole_words)):
        return {"tokenizer.ggml.pre": name}
    return {
        "tokenizer.ggml.pre": "ropewalk-own",
        "tokenizer.ropewalk.pre_split": patterns,
        "tokenizer.ropewalk.ignore_merges": whole_words,
    }


def _patterns(step: Mapping[str, Any], label: str) -> list[str]:
    """What one step of cutting text into words is as regular expressions whose matches are words."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", False):
        return [_GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if kind == "Punctuation" and step.get("behavior", "Isolated") in ("Isolated", "Contiguous"):
        one = r"[\p{P}$+<=>^`|~]"
        return [one + "+" if step.get("behavior") == "Contiguous" else one]
    if kind == "Split" and isinstance(pattern := step.get("pattern"), dict):
        isolated = step.get("behavior") == "Isolated" and not step.get("invert")
        inverted = step.get("behavior") == "Removed" and step.get("invert")
        if isolated or inverted:
            if isinstance(pattern.get("Regex"), str):
                return [pattern["Regex"]]
            if isinstance(pattern.get("String"), str):
                return [re.escape(pattern["String"])]
    raise UnsupportedModelError(f"{label}: the step {show(step)} of cutting text into words is not supported")


def steps_of(step: object, inside: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a pipeline, sequences of steps opened."""
    if isinstance(step, Mapping):
        if step.get("type") == "Sequence":
            steps = step.get(inside)
            for each in steps if isinstance(steps, list) else ():
                yield from steps_of(each, inside)
        else:
            yield step
