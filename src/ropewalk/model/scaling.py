"""Rotary scaling: what is done to the rotary frequencies so that a model reads further than it was trained to.

Each scheme is a frozen dataclass with the same few answers (`RopeScaling`): the frequencies as float64
[width / 2], the factor of every cosine and sine, and how far the scheme is meant to reach. `RopeScaling.from_hf`
reads the dictionary that a Hugging Face `config.json` calls `rope_scaling` or `rope_parameters`.

    linear    every angle divided by the factor: positions are squeezed into the trained range
    ntk       a larger base: the slowest pair is divided by the factor, the fastest is left alone
    dynamic   the same with a factor that grows with the sequence
    yarn      fast pairs left alone, slow ones divided, a ramp between them, and a factor of the attention
    llama3    the same idea with bounds given as wavelengths
    longrope  one divisor for each pair, from two lists: up to the trained length, and beyond it

Knows nothing of files, positions or layouts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

Float64Array = NDArray[np.float64]

DIVISORS_TENSOR = "rope_freqs.weight"
LONGROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight")
LARGEST = 1e6
"""No factor or divisor of a real checkpoint comes near it."""


def plain_frequencies(base: float, width: int) -> Float64Array:
    """Unscaled angle per position of pair i, base^(−2i / width): float64 [width / 2].

    Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2.
    """
    frequencies: Float64Array = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    return frequencies


class RopeScaling:
    """What all schemes answer. The instances are those of the classes below."""

    name: ClassVar[str]

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        """Angle per position of each pair, in radians, for a sequence of `length` tokens: float64 [width / 2]."""
        raise NotImplementedError

    @property
    def attention_scale(self) -> float:
        """Factor of every cosine and sine; the part of a score that is rotated is multiplied by its square."""
        return 1.0

    @property
    def switch(self) -> int:
        """Tokens up to which one table holds, before another one holds for everything; 0: the table is one."""
        return 0

    def effective_context(self, trained: int) -> int:
        """Tokens that the scheme is meant to reach, for a model that was trained on `trained` tokens."""
        raise NotImplementedError

    @staticmethod
    def from_hf(
        parameters: Mapping[str, Any] | None,
        *,
        context_length: int,
        original_context: int | None = None,
    ) -> RopeScaling | None:
        """Read `rope_scaling` or `rope_parameters` of a Hugging Face configuration.

        Parameters
        ----------
        parameters : mapping or None
            `{"rope_type": "yarn", "factor": 4.0, ...}`; the older key `type` and its older name `su` are known.
            `rope_theta` and `partial_rotary_factor`, which newer files keep here, are the caller's to read. Where
            a file has one dictionary a layer type, this takes one of them.
        context_length : int
            `max_position_embeddings`.
        original_context : int, optional
            `original_max_position_embeddings`, where it stands beside the dictionary and not in it.

        Returns
        -------
        RopeScaling, or None where nothing is scaled

        Raises
        ------
        UnsupportedModelError
            A scheme, or a parameter of it, that is not implemented.
        CheckpointError
            A parameter is missing, or has a value that is not allowed.
        """
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        kind = given.pop("rope_type", given.get("type", "default"))
        given.pop("type", None)
        for key in _NOT_SCALING:
            given.pop(key, None)
        if kind == "default":
            given.pop("original_max_position_embeddings", None)
            _refuse_others("default", given, ())
            return None
        kind = "longrope" if kind == "su" else kind
        if kind not in SCHEMES:
            raise UnsupportedModelError(f"rope_type = {kind!r} is not supported{suggest(kind)}")
        given.setdefault("original_max_position_embeddings", original_context)
        given.setdefault("max_position_embeddings", context_length)
        return build(kind, given)


_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "finetuned")
_HF_NAMES = {"short_factor": "short_factors", "long_factor": "long_factors"}


def build(kind: str, given: Mapping[str, Any]) -> RopeScaling:
    """Make a scheme from Hugging Face's names; `max_position_embeddings` stands in for what is not given."""
    values = dict(given)
    context = values.pop("max_position_embeddings", None)
    original = values.pop("original_max_position_embeddings", None)
    if original is None or kind == "dynamic":
        original = context
    if kind in ("yarn", "longrope") and "factor" not in values and context and original:
        values["factor"] = context / original
    named = {_HF_NAMES.get(key, key): value for key, value in values.items()}
    known = {f.name: f for f in fields(SCHEMES[kind])}  # type: ignore[arg-type]  # every scheme is a dataclass
    if "original_context" in known and original is not None:
        named["original_context"] = original
    _refuse_others(kind, named, known)
    for name, f in known.items():
        if name not in named and f.default is MISSING:
            raise CheckpointError(f"rope scaling {kind!r} lacks {name!r}")
        if isinstance(named.get(name), list):
            named[name] = tuple(named[name])
    try:
        return SCHEMES[kind](**named)
    except InvalidParameterError as error:
        raise CheckpointError(str(error)) from None


def _refuse_others(kind: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            raise UnsupportedModelError(
                f"rope scaling {kind!r} with {key} = {given[key]!r} is not implemented"
            )


def suggest(kind: object) -> str:
    """What may be meant, and what there is, for the end of a message."""
    near = difflib.get_close_matches(str(kind).lower(), SCHEMES, 1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" supported: default, {', '.join(SCHEMES)}"


def _check_number(scheme: str, name: str, value: object, low: float, high: float = LARGEST) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidParameterError(
            f"rope scaling {scheme!r}: {name} is {value!r}; allowed: a number from {low:g} to {high:g}"
        )


def _check_context(scheme: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value < 2**31:
        raise InvalidParameterError(
            f"rope scaling {scheme!r}: original_context is {value!r}; allowed: an integer from 2 to {2**31 - 1}"
        )


@dataclass(frozen=True)
class Linear(RopeScaling):
    """Positions divided by `factor` (Chen et al. 2023, "Positional Interpolation", arXiv:2306.15595)."""

    name: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        return plain_frequencies(base, width) / self.factor

    def effective_context(self, trained: int) -> int:
        return round(self.factor * trained)


@dataclass(frozen=True)
class NTKAware(RopeScaling):
    """A base larger by factor^(width / (width − 2)), so that exactly the slowest pair is divided by `factor`.

    bloc97 2023, "NTK-aware scaled RoPE"; derived in appendix A.1 of the YaRN paper, arXiv:2309.00071.
    """

    name: ClassVar[str] = "ntk"
    factor: float

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        return plain_frequencies(_ntk_base(base, width, self.factor), width)

    def effective_context(self, trained: int) -> int:
        return round(self.factor * trained)


def _ntk_base(base: float, width: int, stretch: float) -> float:
    if width < 4:
        return base  # a single pair, whose frequency is 1 whatever the base
    return float(base * stretch ** (width / (width - 2)))


@dataclass(frozen=True)
class DynamicNTK(RopeScaling):
    """NTK-aware with the factor that a sequence of n tokens needs: factor · n / original − (factor − 1).

    Up to `original_context` tokens nothing is scaled; after that *every further token changes every frequency*
    (emozilla 2023, "Dynamically scaled RoPE"; the form with a factor is that of transformers).
    """

    name: ClassVar[str] = "dynamic"
    factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)
        _check_context(self.name, self.original_context)

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        length = max(length, self.original_context)
        stretch = self.factor * length / self.original_context - (self.factor - 1)
        return plain_frequencies(_ntk_base(base, width, stretch), width)

    def effective_context(self, trained: int) -> int:
        return round(self.factor * self.original_context)


@dataclass(frozen=True)
class YaRN(RopeScaling):
    """Pairs that turn often within the trained context stay, those that hardly turn are divided by `factor`.

    Peng et al. 2023, arXiv:2309.00071, section 3.2; between `beta_fast` and `beta_slow` turns a linear ramp over
    the pairs' numbers joins the two. Section 3.3 also divides the scores' temperature, here by a factor of the
    cosines and sines: 0.1 · ln(factor) + 1.

    Attributes
    ----------
    attention_factor
        In place of that factor.
    mscale, mscale_all_dim
        Where both are given and not 0, the factor is the quotient of 0.1 · m · ln(factor) + 1 for each
        (DeepSeek-V2, arXiv:2405.04434).
    truncate
        Whether the ends of the ramp are rounded outwards to whole pairs.
    """

    name: ClassVar[str] = "yarn"
    factor: float
    original_context: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)
        _check_context(self.name, self.original_context)
        _check_number(self.name, "beta_slow", self.beta_slow, 1e-6)
        _check_number(self.name, "beta_fast", self.beta_fast, self.beta_slow)
        _check_number(self.name, "mscale", self.mscale, 0)
        _check_number(self.name, "mscale_all_dim", self.mscale_all_dim, 0)
        if self.attention_factor is not None:
            _check_number(self.name, "attention_factor", self.attention_factor, 1e-6)
        if not isinstance(self.truncate, bool):
            raise InvalidParameterError(
                f"rope scaling 'yarn': truncate is {self.truncate!r}; allowed: a bool"
            )

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        plain = plain_frequencies(base, width)
        low, high = (self._pair_of(turns, base, width) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high = high if high != low else high + 0.001
        divided = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        frequencies: Float64Array = plain / self.factor * divided + plain * (1 - divided)
        return frequencies

    def _pair_of(self, turns: float, base: float, width: int) -> float:
        """The pair, as a real number, that turns so often within the trained context."""
        return width * math.log(self.original_context / (2 * math.pi * turns)) / (2 * math.log(base))

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def effective_context(self, trained: int) -> int:
        return round(self.factor * self.original_context)


def score_scale(scaling: RopeScaling | None) -> float:
    """What YaRN makes of a score's scale in latent attention (DeepSeek-V2, arXiv:2405.04434, equation 11)."""
    if isinstance(scaling, YaRN) and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return 1.0


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1 (YaRN, arXiv:2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Llama3(RopeScaling):
    """Pairs of short wavelength stay, those of long wavelength are divided by `factor`, the rest is blended.

    Short is below original / high_freq_factor tokens, long above original / low_freq_factor; between them the two
    are mixed by how often the pair turns within the original context ("The Llama 3 Herd of Models",
    arXiv:2407.21783, and Meta's published `apply_scaling`).
    """

    name: ClassVar[str] = "llama3"
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)
        _check_context(self.name, self.original_context)
        _check_number(self.name, "low_freq_factor", self.low_freq_factor, 1e-6)
        _check_number(self.name, "high_freq_factor", self.high_freq_factor, self.low_freq_factor)
        if self.high_freq_factor == self.low_freq_factor:
            raise InvalidParameterError(
                f"rope scaling 'llama3': high_freq_factor is {self.high_freq_factor!r}; "
                f"allowed: more than low_freq_factor"
            )

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        plain = plain_frequencies(base, width)
        turns = self.original_context * plain / (2 * np.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        frequencies: Float64Array = plain * kept + plain / self.factor * (1 - kept)
        return frequencies

    def effective_context(self, trained: int) -> int:
        return round(self.factor * self.original_context)


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """One divisor for each pair: `short_factors` up to `original_context` tokens, `long_factors` beyond.

    Ding et al. 2024, arXiv:2402.13753. The list follows the length of the *sequence*: when it grows beyond the
    limit, all its keys are those of the long list. The factor of the attention is the same for both.

    Attributes
    ----------
    factor
        The extended context over the original one.
    short_factors, long_factors
        [width / 2] each; empty where they are tensors of the file, to be put in by `with_factors`.
    attention_factor
        Factor of cosines and sines; by default √(1 + ln(factor) / ln(original_context)).
    """

    name: ClassVar[str] = "longrope"
    factor: float
    original_context: int
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_number(self.name, "factor", self.factor, 1)
        _check_context(self.name, self.original_context)
        for list_name in ("short_factors", "long_factors"):
            values = getattr(self, list_name)
            if not isinstance(values, tuple):
                raise InvalidParameterError(
                    f"rope scaling 'longrope': {list_name} is {values!r}; allowed: a list"
                )
            for value in values:
                _check_number(self.name, f"one of {list_name}", value, 1e-6)
        if len(self.short_factors) != len(self.long_factors):
            raise InvalidParameterError(
                f"rope scaling 'longrope' has {len(self.short_factors)} short_factors and "
                f"{len(self.long_factors)} long_factors; allowed: equally many"
            )
        if self.attention_factor is not None:
            _check_number(self.name, "attention_factor", self.attention_factor, 1e-6)

    def with_factors(self, short: Sequence[float], long: Sequence[float]) -> LongRope:
        """The same with these divisors."""
        return replace(self, short_factors=tuple(map(float, short)), long_factors=tuple(map(float, long)))

    def frequencies(self, base: float, width: int, length: int = 0) -> Float64Array:
        divisors = self.long_factors if length > self.original_context else self.short_factors
        if len(divisors) != width // 2:
            raise CheckpointError(
                f"rope scaling 'longrope' has {len(divisors)} factors in a list; a rotated width of {width} "
                f"needs {width // 2}"
            )
        frequencies: Float64Array = plain_frequencies(base, width) / np.array(divisors)
        return frequencies

    @property
    def attention_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))

    @property
    def switch(self) -> int:
        return self.original_context

    def effective_context(self, trained: int) -> int:
        return round(self.factor * self.original_context)


SCHEMES: Mapping[str, type[RopeScaling]] = {
    scheme.name: scheme for scheme in (Linear, NTKAware, DynamicNTK, YaRN, Llama3, LongRope)
}
"""Every scheme, by the name that configurations give it."""
