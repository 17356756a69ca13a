"""Convert a Hugging Face folder for OpenVINO GenAI, with 8-bit or 4-bit weights, for `peers.py`.

    /path/to/python benchmarks/export_openvino.py HF_FOLDER OUT_FOLDER [--bits 8]

Runs in an environment of its own (openvino-genai, openvino-tokenizers, optimum-intel, nncf); knows nothing of
Ropewalk. `export_hf.py` makes such a folder of a GGUF file. The settings are optimum-intel's defaults for that number
of bits: 8, one scale for a row; 4, groups of 128 (64 where that does not divide a row), and 8 for the embedding.
"""

import argparse
import json
from pathlib import Path

from openvino import save_model
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import PreTrainedTokenizerFast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    options = parser.parse_args()
    hidden = json.loads((options.source / "config.json").read_text())["hidden_size"]
    groups = {"group_size": 64 if hidden % 128 else 128} if options.bits == 4 else {}
    how = OVWeightQuantizationConfig(bits=options.bits, **groups)
    model = OVModelForCausalLM.from_pretrained(options.source, export=True, quantization_config=how)
    model.save_pretrained(options.target)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(options.source / "tokenizer.json"))
    for name, part in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        save_model(part, options.target / f"openvino_{name}.xml")


if __name__ == "__main__":
    main()
