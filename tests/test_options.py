"""The options of `LLM`: keywords for type checkers and for `help`, and the values themselves, agree."""

import dataclasses
import inspect

import pytest

from ropewalk import LLM
from ropewalk.cli.batch import WITHOUT_EFFECT
from ropewalk.options import (
    NAMES_ELSEWHERE,
    EngineKeywords,
    EngineOptions,
    LLMKeywords,
    LLMOptions,
    options_of,
)


@pytest.mark.parametrize(
    ("keywords", "options"), [(EngineKeywords, EngineOptions), (LLMKeywords, LLMOptions)]
)
def test_type_checkers_see_the_types_of_the_fields(keywords, options):
    told = {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()}
    assert told == {field.name: field.type for field in dataclasses.fields(options)}


def test_help_shows_names_and_defaults():
    shown = {p.name: (p.kind, p.default) for p in inspect.signature(LLM).parameters.values()}
    assert shown.pop("model") == (inspect.Parameter.POSITIONAL_OR_KEYWORD, "smollm2-135m")
    assert shown == {
        f.name: (inspect.Parameter.KEYWORD_ONLY, f.default) for f in dataclasses.fields(LLMOptions)
    }
    assert shown["max_batch"] == (inspect.Parameter.KEYWORD_ONLY, 16)


def test_every_option_is_documented():
    for field in dataclasses.fields(LLMOptions):
        assert f"    {field.name} : " in LLM.__doc__


def test_an_option_that_there_is_not():
    with pytest.raises(
        TypeError, match=r"^LLM has no option 'contxt_length'; did you mean 'context_length'\?$"
    ):
        LLM("no-such-model", contxt_length=3)
    with pytest.raises(TypeError, match=r"^LLM has no option 'seed'$"):
        LLM("no-such-model", seed=1)


def test_an_option_of_another_engine():
    with pytest.raises(TypeError, match=r"^LLM has no option 'max_model_len'; here it is 'context_length'$"):
        LLM("no-such-model", max_model_len=3)
    with pytest.raises(TypeError, match=r"^LLM has no option 'quantization'$"):
        options_of(EngineOptions, {"quantization": "q4"})
    assert set(NAMES_ELSEWHERE.values()) <= {field.name for field in dataclasses.fields(LLMOptions)}


def test_options_that_change_what_a_batch_answers_are_known():
    """A batch that is resumed compares these; whoever adds an option decides on which side it is."""
    every = {field.name for field in dataclasses.fields(LLMOptions)}
    assert every > WITHOUT_EFFECT
    assert every - WITHOUT_EFFECT == {
        *("context_length", "cache_dtype", "quantize", "adapters", "rope_scaling", "rope_base")
    }
