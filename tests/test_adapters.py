"""Adapters by name in an `LLM`: each request with its own, alone or in a batch, and never another's pages."""

import numpy as np
import pytest

from ropewalk import LLM, SamplingParams
from ropewalk.errors import InvalidParameterError
from ropewalk.passes import log_softmax

gguf = pytest.importorskip("gguf")  # a development dependency
PROMPT = "A rope is made of fibres that are twisted together, and it was first made by hand, in long walks."


def write_adapter(path, model, seed):
    from ropewalk.checkpoint.gguf import open_gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    with open_gguf(model) as file:
        for name, info in file.tensors.items():
            if name.endswith(("attn_q.weight", "attn_v.weight", "ffn_down.weight")):
                rows, columns = info.shape
                a = rng.standard_normal((4, columns)).astype(np.float32) / np.sqrt(columns)
                b = 0.4 * rng.standard_normal((rows, 4)).astype(np.float32)
                writer.add_tensor(name + ".lora_a", a.astype(np.float32))
                writer.add_tensor(name + ".lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def files(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / f"{name}.gguf", smollm2, i) for i, name in enumerate(("red", "blue"))
    }


def tokens(llm, *adapters, prompt=PROMPT):
    params = [
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, adapter=a) for a in adapters
    ]
    return [output.token_ids for output in llm.generate([prompt] * len(adapters), params)]


def test_each_request_has_its_own_adapter_whatever_runs_beside_it(smollm2, files):
    with LLM(smollm2, context_length=128, kv_tokens=1024) as llm:
        plain = tokens(llm, None)[0]
    with LLM(smollm2, context_length=128, kv_tokens=1024, adapters=files) as llm:
        names = [None, "red", "blue"]
        together = tokens(llm, *names)
        assert together[0] == plain and together[1] != plain and together[2] not in together[:2]
        for name, expected in zip(names, together, strict=True):
            assert tokens(llm, name)[0] == expected
        cached = [
            o.timings.cached_tokens for o in llm.generate(PROMPT, SamplingParams(adapter="red", max_tokens=1))
        ]
        assert cached[0] > 0, "its own pages are found again"
        other = PROMPT + " Then"
        (first,) = llm.generate(other, SamplingParams(adapter="blue", max_tokens=1))
        assert first.timings.cached_tokens > 0
    with LLM(smollm2, context_length=128, kv_tokens=1024, adapters=files, prefix_cache=False) as llm:
        assert tokens(llm, *names) == together


def test_pages_on_disk_are_those_of_the_adapters_content(smollm2, files, tmp_path):
    options = {"context_length": 128, "kv_tokens": 256, "cache_dir": tmp_path / "pages"}
    with LLM(smollm2, adapters={"it": files["red"]}, **options) as llm:
        red = tokens(llm, "it")[0]
    with LLM(smollm2, adapters={"it": files["blue"]}, **options) as llm:
        (output,) = llm.generate(
            PROMPT, SamplingParams(adapter="it", max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
        )
        assert output.timings.cached_tokens == 0 and output.token_ids != red
    with LLM(smollm2, adapters={"other": files["red"]}, **options) as llm:
        (output,) = llm.generate(
            PROMPT, SamplingParams(adapter="other", max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
        )
        assert output.timings.cached_tokens > 0 and output.token_ids == red


@pytest.mark.parametrize("known", [True, False])
def test_names_that_are_not_known(smollm2, files, known):
    allowed = "'red', 'blue'" if known else "None, since the model was opened without adapters"
    with LLM(smollm2, context_length=128, kv_tokens=128, adapters=files if known else None) as llm:
        for use in (llm.generate, llm.stream):
            with pytest.raises(InvalidParameterError, match=f"adapter is 'green'; allowed: {allowed}"):
                use("a", SamplingParams(adapter="green"))
    with pytest.raises(InvalidParameterError, match="adapter is 3; allowed: a name, or None"):
        SamplingParams(adapter=3)


def test_scores_and_vectors_through_an_adapter(smollm2, files):
    with LLM(smollm2, context_length=128, kv_tokens=128, adapters=files) as llm:
        logits = [llm.logits([5, 6, 7], adapter=name) for name in (None, "red", "blue")]
        assert not np.array_equal(logits[0], logits[1]) and not np.array_equal(logits[1], logits[2])
        for name, rows in zip((None, "red", "blue"), logits, strict=True):
            (score,) = llm.score([5], [[6, 7]], adapter=name)
            picked = [log_softmax(rows)[i, token] for i, token in enumerate((6, 7))]
            assert score.logprobs.tolist() == picked
        vectors = [llm.embed([5, 6, 7], adapter=name) for name in (None, "red", "blue")]
        assert len({v.tobytes() for v in vectors}) == 3
        for use in (llm.embed, llm.logits):
            with pytest.raises(InvalidParameterError, match="adapter is 'green'"):
                use([5], adapter="green")
