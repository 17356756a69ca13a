"""K3: loading a model never holds it twice."""

import subprocess
import sys

import gguf
import numpy as np
import pytest

HIDDEN, FFN, VOCAB, LAYERS = 2048, 8192, 32000, 5


@pytest.fixture(scope="module")
def big_model(tmp_path_factory):
    """A synthetic Q8_0 model of about 500 MB, with an output matrix of its own."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(16)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)

    def matrix(name, rows, columns):
        raw = np.ones((rows, columns // 32, 34), np.uint8)
        raw[:, :, :2] = np.array([0.01], np.float16).view(np.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def norm(name):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{layer}.{name}.weight")
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (512, HIDDEN), "attn_v": (512, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN)}
        for name, shape in (shapes | {"ffn_down": (HIDDEN, FFN)}).items():
            matrix(f"blk.{layer}.{name}.weight", *shape)
    norm("output_norm.weight")
    matrix("output.weight", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield path
    path.unlink()


CODE = """
import sys
from pathlib import Path
from ropewalk.backend.cpu import CpuBackend
from ropewalk.checkpoint.gguf import open_gguf
from ropewalk.model.config import ModelConfig

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def load(backend_of=CpuBackend):
    file = open_gguf(sys.argv[1])
    return file, backend_of(file, ModelConfig.from_gguf(file.metadata, file.tensors), n_threads=2)

from ropewalk.backend.compile import compile_parts, parts_of_model
file = open_gguf(sys.argv[1])
compile_parts(parts_of_model(file, ModelConfig.from_gguf(file.metadata, file.tensors)))
before = memory("VmRSS")
file, backend = load()
print(memory("VmHWM") - before, backend.weights.n_bytes, Path(sys.argv[1]).stat().st_size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_k3_peak_memory_is_the_packed_model(big_model):
    """Not even one tensor is in memory twice: the largest of this file has 74 MB."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(big_model)], capture_output=True, text=True, timeout=1500
    )
    assert run.returncode == 0, run.stderr
    peak, packed, file_size = map(int, run.stdout.splitlines()[-1].split())
    assert peak <= packed + (48 << 20)
    assert packed <= 1.05 * file_size  # never expanded to float32
