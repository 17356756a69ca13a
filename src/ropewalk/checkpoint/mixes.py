"""Which format each tensor of a quantized model gets: the mixes that people know by names such as Q4_K_M, as data.

A mix has a format for most matrices and rules for those where errors cost more: the first rule that fits a tensor
decides. Mixes, their names and `general.file_type` numbers are llama.cpp's, so that a name means here what it means
there. Where rows do not fill whole blocks of 256, a format of 32 takes the place.

This module does not know weights or kernels.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ropewalk.checkpoint.header import TensorInfo
from ropewalk.checkpoint.quants import FORMATS, BlockFormat
from ropewalk.errors import InvalidParameterError

FALLBACKS: Mapping[str, str] = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What stands in for formats with blocks of 256 where rows have other lengths; F16 where 32 does not divide them."""

KEPT = ("ffn_gate_inp", "position_embd", "attn_sinks", "ffn_gate_inp_shexp")
"""Matrices that are never quantized: small, and much depends on them."""


@dataclass(frozen=True)
class Place:
    """Where a matrix is in its model.

    Attributes
    ----------
    role : the name without `blk.N.` and `.weight`, such as "attn_v".
    layer, n_layers : from 0; -1 outside the layers.
    n_heads_per_kv : heads that share one of keys and values.
    n_experts : 0 where there are none.
    """

    role: str
    layer: int
    n_layers: int
    n_heads_per_kv: int
    n_experts: int

    @property
    def more_bits(self) -> bool:
        """The layers that are worth more: the first and last eighths, and every third between."""
        eighth = self.n_layers // 8
        return self.layer < eighth or self.layer >= 7 * self.n_layers // 8 or (self.layer - eighth) % 3 == 2


Condition = Callable[[Place], bool]


def _always(place: Place) -> bool:
    return True


def _more(place: Place) -> bool:
    return place.more_bits


def _first_eighth(place: Place) -> bool:
    return place.layer < place.n_layers // 8


def _first_sixteenth(place: Place) -> bool:
    return place.layer < place.n_layers // 16


def _first_two(place: Place) -> bool:
    return place.layer < 2


def _first_four(place: Place) -> bool:
    return place.layer < 4


def _shared(place: Place) -> bool:
    return place.n_heads_per_kv >= 4


def _eighty_layers(place: Place) -> bool:
    return place.n_layers == 80 and place.n_heads_per_kv > 1


def _eight_experts(place: Place) -> bool:
    return place.n_experts == 8


@dataclass(frozen=True)
class Mix:
    """A mix: the format of most matrices, exceptions `(role, condition, format)`, and its number in files."""

    name: str
    base: str
    file_type: int
    rules: tuple[tuple[str, Condition, str], ...] = ()


_Rule = tuple[str, Condition, str]


def _values(*rules: tuple[Condition, str]) -> tuple[_Rule, ...]:
    """Rules for the matrix of values, alone or in one tensor with queries and keys."""
    return tuple((role, *rule) for role in ("attn_v", "attn_qkv") for rule in rules)


_EXPERTS = (("attn_v", _eight_experts, "Q8_0"), ("attn_k", _eight_experts, "Q8_0"))
_OUTPUT = (("output", _always, "Q6_K"),)
_DOWN = "ffn_down"

_PLAIN = (*_OUTPUT, *_EXPERTS)

_MIXES = (
    Mix("F32", "F32", 0),
    Mix("F16", "F16", 1),
    Mix("BF16", "BF16", 32),
    Mix("Q8_0", "Q8_0", 7),
    Mix("Q4_0", "Q4_0", 2, _PLAIN),
    Mix("Q4_1", "Q4_1", 3, _PLAIN),
    Mix("Q5_0", "Q5_0", 8, _PLAIN),
    Mix("Q5_1", "Q5_1", 9, _PLAIN),
    Mix(
        "IQ4_NL",
        "IQ4_NL",
        25,
        (
            *_PLAIN,
            *_values((_shared, "Q5_K")),
            (_DOWN, _first_eighth, "Q5_K"),
            ("attn_output", _eight_experts, "Q5_K"),
        ),
    ),
    Mix(
        "Q2_K",
        "Q2_K",
        10,
        (
            *_PLAIN,
            *_values((_eighty_layers, "Q5_K"), (_shared, "Q4_K"), (_always, "Q3_K")),
            (_DOWN, _always, "Q3_K"),
            ("attn_output", _eight_experts, "Q5_K"),
            ("attn_output", _always, "Q3_K"),
        ),
    ),
    Mix(
        "Q3_K_S",
        "Q3_K",
        11,
        (*_PLAIN, *_values((_eighty_layers, "Q5_K")), ("attn_output", _eight_experts, "Q5_K")),
    ),
    Mix(
        "Q3_K_M",
        "Q3_K",
        12,
        (
            *_PLAIN,
            *_values((_eighty_layers, "Q5_K"), (_first_two, "Q5_K"), (_always, "Q4_K")),
            (_DOWN, _first_sixteenth, "Q5_K"),
            (_DOWN, _always, "Q4_K"),
            ("attn_output", _eight_experts, "Q5_K"),
            ("attn_output", _always, "Q4_K"),
        ),
    ),
    Mix(
        "Q3_K_L",
        "Q3_K",
        13,
        (
            *_PLAIN,
            *_values((_always, "Q5_K")),
            (_DOWN, _always, "Q5_K"),
            ("attn_output", _eight_experts, "Q3_K"),
            ("attn_output", _always, "Q5_K"),
        ),
    ),
    Mix(
        "Q4_K_S",
        "Q4_K",
        14,
        (
            *_PLAIN,
            *_values((_eighty_layers, "Q5_K"), (_first_four, "Q5_K")),
            (_DOWN, _first_eighth, "Q5_K"),
            ("attn_output", _eight_experts, "Q5_K"),
        ),
    ),
    Mix(
        "Q4_K_M",
        "Q4_K",
        15,
        (
            *_PLAIN,
            *_values((_more, "Q6_K"), (_eighty_layers, "Q5_K")),
            (_DOWN, _more, "Q6_K"),
            ("attn_output", _eight_experts, "Q5_K"),
        ),
    ),
    Mix("Q5_K_S", "Q5_K", 16, _PLAIN),
    Mix(
        "Q5_K_M",
        "Q5_K",
        17,
        (
            *_PLAIN,
            *_values((_more, "Q6_K")),
            (_DOWN, _more, "Q6_K"),
        ),
    ),
    Mix("Q6_K", "Q6_K", 18, _EXPERTS),
)

MIXES: Mapping[str, Mix] = {mix.name: mix for mix in _MIXES}
"""Every mix by name."""

ON_LOADING: Mapping[str, str] = {"q8": "Q8_0", "q6": "Q6_K", "q5": "Q5_K_M", "q4": "Q4_K_M"}
"""The mixes of `--quantize`, by the short names there."""


def mix_named(name: str) -> Mix:
    """The mix of that name in upper or lower case, or of that short name; raises InvalidParameterError."""
    wanted = ON_LOADING.get(name.lower(), name.upper())
    if found := MIXES.get(wanted):
        return found
    near = difflib.get_close_matches(wanted, MIXES, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise InvalidParameterError(f"there is no quantization {name!r}{hint}; allowed: {', '.join(MIXES)}")


def place_of(name: str, metadata: Mapping[str, object], tied: bool) -> Place:
    """Where the tensor of that name is; of a model with tied output the embedding counts as the output matrix."""
    architecture = metadata.get("general.architecture")

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    role, layer = name.removesuffix(".weight"), -1
    if role.startswith("blk."):
        _, index, role = role.split(".", 2)
        layer = int(index) if index.isdigit() else -1
    if tied and role == "token_embd":
        role = "output"
    heads, kv = number("attention.head_count", 1), number("attention.head_count_kv", 0)
    return Place(
        role.removesuffix("_exps").removesuffix("_shexp"),
        layer,
        number("block_count", 1),
        heads // kv if kv else 1,
        number("expert_count", 0),
    )


def is_quantized(info: TensorInfo) -> bool:
    """Whether mixes change this tensor: matrices of weights, unless they are among `KEPT`."""
    role = info.name.removesuffix(".weight").rpartition(".")[2]
    matrix = len(info.shape) > 1 and info.name.endswith(".weight")
    return matrix and role not in KEPT and "norm" not in role and not role.startswith("rope_")


def format_for(mix: Mix, info: TensorInfo, place: Place) -> BlockFormat:
    """The format that a tensor gets: its own, if the mix does not change it."""
    if not is_quantized(info):
        return info.format
    chosen = next((f for role, fits, f in mix.rules if role == place.role and fits(place)), mix.base)
    columns = info.shape[-1]
    if columns % FORMATS[chosen].block_size:
        chosen = FALLBACKS.get(chosen, "F16")
    if columns % FORMATS[chosen].block_size:
        chosen = "F16"
    return FORMATS[chosen]
