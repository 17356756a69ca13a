"""The shared options: what they default to, what they become, and how a bad one is refused."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from ropewalk.cli import options
from ropewalk.errors import InvalidParameterError
from ropewalk.params import SamplingParams


@pytest.fixture
def parse():
    """A function from arguments to (SamplingParams, Machine), or to (status, output) on failure."""

    def run(*arguments: str):
        got = []
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

        @app.command()
        @options.takes(params=options.sampling, machine=options.drafting_machine)
        def probe(*, params: SamplingParams, machine: options.Machine) -> None:
            got.append((params, machine))

        result = CliRunner().invoke(app, arguments)
        if result.exit_code:
            return result.exit_code, result.output
        return got[0]

    return run


def test_defaults(parse):
    params, machine = parse()
    assert params == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, max_tokens=512)
    assert machine == options.Machine(n_threads=None, context_length=None, cache_dtype="float16")


def test_every_sampling_option_arrives(parse):
    line = (
        "--temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0.1 --typical-p 0.9 --repetition-penalty 1.1 "
        "--frequency-penalty 0.2 --presence-penalty 0.3 --logit-bias 5:-1.5 --logit-bias 7:2 --seed 9 "
        "--max-tokens 20 --min-tokens 2 --stop A --stop B --stop-token-id 3 --stop-token-id 4 --ignore-eos "
        "--truncate-prompt-tokens -1 --slide --keep-tokens 7 --cache-dir here --cache-dir-size 25% "
        "--show-stop --show-special --threads 2 --context 99 --cache-type float32 --kv-memory 2GiB"
    )
    params, machine = parse(*shlex.split(line))
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={5: -1.5, 7: 2.0},
        seed=9,
        max_tokens=20,
        min_tokens=2,
        stop=("A", "B"),
        stop_token_ids=(3, 4),
        truncate_prompt_tokens=-1,
        slide=True,
        keep_tokens=7,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert machine == options.Machine(
        n_threads=2,
        context_length=99,
        cache_dtype="float32",
        kv_memory="2GiB",
        cache_dir="here",
        cache_dir_size="25%",
    )
    assert not parse("--no-prefix-cache")[1].prefix_cache


def test_no_limit_of_tokens(parse):
    assert parse("-n", "-1")[0].max_tokens is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--temperature", "-1"), "--temperature is -1.0; allowed: a finite number of at least 0"),
        (("--top-p", "1.5"), "--top-p is 1.5; allowed"),
        (("--logit-bias", "x"), "ID:BIAS"),
        (("--max-tokens", "0"), "--max-tokens is 0; allowed: at least 1, or -1 for no limit"),
        (("--threads", "0"), "--threads"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--kv-memory", "lots"), "--kv-memory is 'lots'"),
        (("--cache-dir", "x", "--cache-dir-size", "lots"), "--cache-dir-size is 'lots'"),
        (("--cache-dir-size", "1GB"), "--cache-dir-size needs --cache-dir"),
        (("--cache-dir", "x", "--no-prefix-cache"), "--cache-dir keeps what --no-prefix-cache turns off"),
        (
            ("--truncate-prompt-tokens", "0"),
            "--truncate-prompt-tokens is 0; allowed: an integer of at least 1, or -1",
        ),
        (("--slide", "--max-tokens", "-1"), "--max-tokens is -1; allowed: with slide, a number"),
        (("--temprature", "1"), "--temprature"),
    ],
)
def test_a_bad_option_is_wrong_usage(parse, arguments, named):
    status, output = parse(*arguments)
    assert status == 2
    assert named in output


@pytest.mark.parametrize(
    ("line", "draft", "draft_tokens"),
    [
        ("--draft-model small.gguf", "small.gguf", None),
        ("--draft-model small.gguf --draft-max 3", "small.gguf", 3),
        ("--prompt-lookup --draft-max 8", "lookup", 8),
        ("--draft-model lookup", "./lookup", None),  # a file of that name
    ],
)
def test_drafts(parse, line, draft, draft_tokens):
    _, machine = parse(*shlex.split(line))
    assert (machine.draft, machine.draft_tokens) == (draft, draft_tokens)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--draft-model a --prompt-lookup", "allowed: one of them"),
        ("--draft-max 3", "--draft-max needs --draft-model or --prompt-lookup"),
        ("--prompt-lookup --draft-max 64", "--draft-max"),
    ],
)
def test_drafts_that_make_no_sense_are_wrong_usage(parse, line, named):
    status, output = parse(*shlex.split(line))
    assert status == 2
    assert named in " ".join(output.split())


def test_verbs_that_do_not_generate_take_no_drafts(ropewalk):
    for verb in ("embed", "perplexity"):
        assert "--draft-model" not in ropewalk(verb, "--help").output
    for verb in ("run", "chat", "serve", "batch", "explain"):
        assert "--draft-model" in ropewalk(verb, "--help").output


@pytest.mark.parametrize("text", ["", "5", ":1", "a:1", "-1:1", "5:x", "5:"])
def test_parse_bias_refuses(text):
    with pytest.raises(InvalidParameterError, match="ID:BIAS"):
        options.parse_bias(text)


def test_rotary_options_arrive(parse):
    _, machine = parse(
        *shlex.split("--rope-scaling yarn --rope-factor 4 --rope-original-context 4096 --rope-base 5e5")
    )
    assert machine.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    assert machine.rope_base == 5e5
    assert parse("--rope-scaling", "none")[1].rope_scaling == {"rope_type": "none"}


@pytest.mark.parametrize("option", ["--rope-factor", "--rope-original-context"])
def test_rotary_options_without_a_scheme_are_refused(parse, option):
    status, output = parse(option, "4")
    assert status == 2
    assert f"{option} needs --rope-scaling" in " ".join(output.split())


def test_a_scheme_that_there_is_not_is_refused(parse):
    status, output = parse("--rope-scaling", "yarm")
    assert status == 2
    assert "--rope-scaling is 'yarm'; did you mean 'yarn'?" in " ".join(output.split())


def test_a_pooling_that_there_is_not_is_refused_before_the_model_is_opened(ropewalk):
    result = ropewalk("embed", "no-such-model", "hi", "--pooling", "sum")
    assert (result.exit_code, result.stderr) == (
        2,
        "ropewalk: --pooling is 'sum'; allowed: mean, cls, last\n",
    )


def test_adapters_by_name():
    assert options.read_adapters(["a/b.gguf", "x=c", "m=y=d"]) == {"b": "a/b.gguf", "x": "c", "m=y": "d"}
    for texts in (["x="], ["=c"], ["x=c", "x=d"]):
        with pytest.raises(InvalidParameterError, match="--lora"):
            options.read_adapters(texts)
