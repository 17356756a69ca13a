"""What the command line says by itself, in its own words."""

import re

import pytest
import typer

from ropewalk.cli import words
from ropewalk.cli.app import build


def every_verb(command=None, path=()):
    command = command or typer.main.get_command(build())
    if not hasattr(command, "commands"):
        yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from every_verb(each, (*path, name))


def test_help_has_no_types_of_python_and_lists_whole_sentences(ropewalk, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    verbs = list(every_verb())
    assert ("run",) in verbs
    assert ("figure", "cache") in verbs
    for path in verbs:
        text = ropewalk(*path, "--help").output
        assert not re.search(r"<\w+( range)?>|\[\[|list\[", text), path
        assert "default: None" not in text
    for listing in ((), ("figure",), ("verify",)):
        assert "...\n" not in ropewalk(*listing, "--help").output.split("Commands:")[1]


def test_an_argument_that_must_be_given_has_no_default(ropewalk):
    for verb in ("embed", "perplexity", "kl"):
        arguments = ropewalk(verb, "--help").output.split("Options:")[0]
        assert "[required]" in arguments
        assert "Default: smollm2" not in arguments
    assert ropewalk("chat", "--help").output.count("smollm2-135m") == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("n_threads is 0; allowed: at least 1", "--threads is 0; allowed: at least 1"),
        (
            "kv_memory is 1; allowed: as context_length, which is 2",
            "--kv-memory is 1; allowed: as --context, which is 2",
        ),
        ("cache_dtype is 'a'; allowed: b", "--cache-type is 'a'; allowed: b"),
        ("top_p is 2; allowed: 1", "top_p is 2; allowed: 1"),
        ("--kv-memory is 1; my_kv_memory is 2", "--kv-memory is 1; my_kv_memory is 2"),
        ("keep_tokens is None; allowed: an integer, or None", "keep_tokens is None; allowed: an integer"),
    ],
)
def test_errors_speak_of_the_options_that_a_verb_has(message, told):
    assert words.as_options(message, ["threads", "context", "cache_type", "kv_memory"]) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-c", "9999"), "--context is 9999; allowed: 2 ... 8192, the model's"),
        (("-t", "99999"), "--threads is 99999; allowed: 1 ..."),
        (("--cache-type", "int4"), "--cache-type is 'int4'; allowed: float16, int8"),
    ],
)
def test_what_the_model_refuses_is_told_of_options(ropewalk, smollm2, options, told):
    """What only the opened model knows is said as what the command line itself refuses."""
    result = ropewalk("run", smollm2, "hi", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"ropewalk: {told}")


@pytest.mark.parametrize(
    ("kind", "low", "high", "text", "number"),
    [
        (int, None, None, "-3", -3),
        (int, 1, 63, "63", 63),
        (float, 0, None, "1e3", 1000.0),
        (int, None, None, 8, 8),
    ],
)
def test_numbers(kind, low, high, text, number):
    got = words.number_reader(kind, low, high)(text)
    assert got == number
    assert type(got) is kind


@pytest.mark.parametrize(
    ("kind", "low", "high", "text", "told"),
    [
        (int, None, None, "1.5", "1.5; allowed: a whole number"),
        (int, 1, None, "0", "0; allowed: a whole number of at least 1"),
        (int, 1, 63, "64", "64; allowed: a whole number in 1 ... 63"),
        (float, None, None, "hot", "hot; allowed: a number"),
        (float, 0, None, "nan", "nan; allowed: a number of at least 0"),
    ],
)
def test_what_is_no_such_number_is_told_with_what_is(kind, low, high, text, told):
    with pytest.raises(typer.BadParameter) as error:
        words.number_reader(kind, low, high)(text)
    assert error.value.message == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "m", "hi", "-n", "many"), "'--max-tokens' / '-n': many; allowed: a whole number"),
        (
            ("run", "--model", "m"),
            "No such option: --model; the model stands without an option: ropewalk run MODEL",
        ),
        (("serve", "m", "--max-model-len", "9"), "here it is --context"),
        (("run", "m", "three", "words", "here"), "text with spaces needs quotes around it"),
        (("generate", "m"), "No such command 'generate'; here it is ropewalk run"),
        (("run", "m", "hi", "--temprature", "1"), "--temperature"),
    ],
)
def test_names_from_elsewhere_are_told_as_ours(ropewalk, arguments, told):
    result = ropewalk(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_hints_name_no_option_that_is_ours(ropewalk):
    """And the options that they name are there."""
    texts = {path: ropewalk(*path, "--help").output for path in (("run",), ("serve",), ("batch",))}
    together = "".join(texts.values())
    for foreign, hint in words.OPTIONS_ELSEWHERE.items():
        assert not re.search(rf"(?<![\w-]){foreign}(?![\w-])", texts["run",]), foreign
        for option in re.findall(r"here it is (--[\w-]+)", hint):
            assert option in together
    verbs = {path[0] for path in every_verb()}
    for foreign, here in words.VERBS_ELSEWHERE.items():
        assert foreign not in verbs
        assert here in verbs or here.startswith("--")


def test_names_that_users_of_other_programs_know(ropewalk, llm):
    ropewalk("run", "m", "Hi", "--temp", "0", "--repeat-penalty", "1.5", "--typical", "0.5", "-s", "4")
    params = llm.asked[0][2]
    assert (params.temperature, params.repetition_penalty, params.typical_p, params.seed) == (0, 1.5, 0.5, 4)
