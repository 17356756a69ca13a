"""How byte-level BPE files cut a text into words before any merge, as data.

A GGUF file names its rule in `tokenizer.ggml.pre`. A rule is a list of regular expressions, applied one
after the other: each cuts every piece left by the one before into its matches and the gaps between them.
Merges never cross a cut, so a wrong rule gives wrong ids without any other sign; a name that is not here is
refused.

The patterns are those of the models' own tokenizers, but for one thing that llama.cpp does likewise: apostrophe
endings are matched in ASCII letters of both cases only, so that U+017F (long s) does not count as an s. Where
llama.cpp has a simpler pattern than the model (letters by case, in GPT-4o's and Tekken's rules: it counts no letters
beyond ASCII as upper or lower, and leaves out marks, without which Hindi falls apart), the model's is here.
This module knows nothing of vocabularies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ropewalk.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class PreSplit:
    """One rule.

    Attributes
    ----------
    patterns : regular expressions in Oniguruma's syntax, applied in order.
    ignore_merges : a word that is itself a token is taken whole, even where merges would not build it.
    add_bos : whether files that use the rule start a text with the BOS token unless they say otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_ENDINGS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4(digits: str) -> str:
    """The rule of GPT-4 and its many descendants, which differ in how many digits make a word."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


# Letters by case; what has none is of both.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(endings: str, digits: str, but: str = "", breaks: str = r"\r\n/") -> str:
    """The rule of GPT-4o, of Mistral's Tekken and of Kimi, which also cuts where the case of letters changes.

    `but` takes letters out, `breaks` are what may end a word of signs.
    """
    upper, lower, lead = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{breaks}]*|{_SPACES}"


_DEFAULT = PreSplit((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_FALCON = PreSplit((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_WORDS = PreSplit((_GPT2,))
_DIGIT_WORDS = PreSplit((r"\p{N}", _GPT2))
_LLAMA3 = PreSplit((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_TRIPLES = PreSplit((_gpt4(r"\p{N}{1,3}"),))
_QWEN2 = PreSplit((_gpt4(r"\p{N}"),))
_TEKKEN = PreSplit((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True)
_GPT4O = PreSplit((_cased(f"(?:{_ENDINGS})?", r"\p{N}{1,3}"),))
_DEEPSEEK_CODER = PreSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{D7FF}]+", r"\p{N}"))
# Letters with case that DeepSeek's first vocabulary lists: those of Unicode, less some blocks.
_LISTED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16EFF}"
    r"\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
_DEEPSEEK_LLM = PreSplit(
    (
        r"[\r\n]",
        rf"\s?{_LISTED}+",
        r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-\x{D7FF}]+",
        r"\p{N}",
    )
)
_DEEPSEEK_V3 = PreSplit(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_SEED = PreSplit((rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",))
_KIMI = PreSplit((r"\p{Han}+|" + _cased(f"(?:{_ENDINGS})?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"\r\n"),))

RULES: dict[str, PreSplit] = {
    "default": _DEFAULT,
    "falcon": _FALCON,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "modern-bert"), _WORDS),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "granite-docling"), _WORDS),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGIT_WORDS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _TRIPLES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2"), _QWEN2),
    **dict.fromkeys(("kormo", "solar-open"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "seed-coder": _SEED,
    "kimi-k2": _KIMI,
}


OWN = "ropewalk-own"
"""The name that stands for expressions in the metadata themselves: `tokenizer.json` has no names of rules."""


def pre_split(name: str, metadata: Mapping[str, object] = MappingProxyType({})) -> PreSplit:
    """Return the rule of a `tokenizer.ggml.pre` name.

    Raises
    ------
    UnsupportedModelError
        The name is unknown.
    CheckpointError
        The metadata is to have the expressions itself (`OWN`), and has none that can be used.
    """
    if name == OWN:
        return _own_rule(metadata)
    try:
        return RULES[name]
    except KeyError:
        known = ", ".join(sorted(RULES))
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}: no such pre-split rule is known; known are {known}"
        ) from None


def _own_rule(metadata: Mapping[str, object]) -> PreSplit:
    key = "tokenizer.ropewalk.pre_split"
    patterns = metadata.get(key)
    if isinstance(patterns, str) or not isinstance(patterns, Sequence) or not all(map(_is_pattern, patterns)):
        raise CheckpointError(f"{key} is not an array of regular expressions")
    return PreSplit(tuple(patterns), metadata.get("tokenizer.ropewalk.ignore_merges") is True)


def _is_pattern(text: object) -> bool:
    """Whether Oniguruma, the library behind `tokenizers`, accepts an expression."""
    from tokenizers import Regex

    try:
        return isinstance(text, str) and len(text) < 1 << 14 and Regex(text) is not None
    except Exception:
        return False
