"""Write `docs/families.md`: the tables of families that the package holds, for people.

    python tools/families_page.py           writes the page
    python tools/families_page.py --check   only says whether it is current

Nothing on the page is written by hand but the words around the table, so that the list cannot differ from what runs.
"""

import argparse
import sys
from pathlib import Path

from ropewalk.checkpoint import hf_families, hf_rope
from ropewalk.checkpoint.prequantized import METHODS
from ropewalk.model.families import FAMILIES, MISSING_MATHEMATICS, Family

PAGE = Path(__file__).parents[1] / "docs" / "families.md"

HEAD = """# Model families

A model is named by its file's `general.architecture`. There is one decoder; an architecture is a row of choices in
[`families.py`](../src/ropewalk/model/families.py), and this page is made from those rows by `tools/families_page.py`.

Each row has a tiny random model whose logits were computed by transformers (`tests/data/families/`). The float32
reference agrees with them to 5e-6 of the largest logit, in prefill and in decode; the CPU kernels agree with the
reference to 0.2 % (standard deviation) with float32 weights, where only the cache rounds.

| `general.architecture` | models | positions | norms | feed-forward network | besides |
|---|---|---|---|---|---|
"""

TAIL = """
Biases of any product (`attn_q.bias`, `ffn_down.bias`, ...) are used in every family when the file has them, and so are
`attn_qkv.weight` in place of three tensors, a separate or a tied output matrix, `rope_freqs.weight`, soft-caps, and the
keys `embedding_scale`, `residual_scale`, `attention.scale` and `logit_scale`. A sliding window that the file states is
used in all layers, or in those that the table says.

In a mixture of experts each token goes through the few experts that its router chooses; the pairs of token and expert
of a step are grouped by expert, and what a token gets is added up in the order of its own choices, so that its bits
do not depend on the batch. Decoding reads the weights of the chosen experts only: `ropewalk explain` counts them, and
`ropewalk plan` tells how many a token reads.

With latent attention the cache holds one vector a token for all heads, which is the key and whose end is the value: for
DeepSeek V2 Lite 1,152 bytes a token and layer in float16, where keys and values of all 16 heads would take 10,240.

## Folders in Hugging Face's layout

{folders}
## What is refused

A file that asks for anything else is refused by an error that names it, and what there is. These architectures need
mathematics that is not implemented:

"""


def positions(family: Family) -> str:
    if not family.rope_layout:
        return "learned"
    text = {"halves": "rotary, halves", "neighbours": "rotary, neighbours"}[family.rope_layout]
    if family.unrotated == "period 4":
        text += "; none in every 4th layer"
    if family.unrotated == "global":
        text += "; none in layers without a window"
    return text


def norms(family: Family) -> str:
    kind = "LayerNorm" if family.layer_norm else "RMS"
    if family.post_norms:
        return f"{kind}, {'after' if not family.attn_norm else 'before and after'} each branch"
    return kind


def feed_forward(family: Family) -> str:
    text = f"{family.activation}, {'gated' if family.gated else 'plain'}"
    if family.experts:
        text += f"; experts: {family.experts.scoring}"
        text += ", renormalised" if family.experts.normalise else ""
        text += ", gated shared expert" if family.experts.shared_gate else ""
    return text


def besides(family: Family) -> str:
    shared = set(family.ffn_norm) & set(family.attn_norm)
    branches = {"always": "parallel branches", "key": "parallel branches if the file says so"}.get(
        family.parallel
    )
    if shared and not branches:
        branches = (
            "parallel branches" if family.ffn_norm[0] in shared else "parallel branches without `ffn_norm`"
        )
    scaled = (
        [*family.needs, "embedding by the root of its width"] if family.scales_embedding else [*family.needs]
    )
    qk = {
        "": "",
        "head": "of each head",
        "each head": "of each head, own weights",
        "row": "of all heads together",
    }
    window = f"windows but in every {family.window_period}th layer".replace("2th", "2nd")
    facts = [
        branches,
        f"norms of q and k {qk[family.qk_norm]}{' if there are' if family.qk_norm_optional else ''}"
        if family.qk_norm
        else None,
        window if family.window_period > 1 else None,
        "gate and up in one tensor" if family.fused_gate_up else None,
        "attention sinks" if family.sinks else None,
        "latent attention: keys and values of all heads from one vector, which is cached"
        if family.latent
        else None,
        "scales: " + ", ".join(scaled).replace("_", " ") if scaled else None,
    ]
    return "; ".join(filter(None, facts))


def folders() -> str:
    """What `config.json` may say."""
    kinds: dict[str, list[str]] = {}
    for model_type, family in hf_families.FAMILIES.items():
        kinds.setdefault(family.architecture, []).append(f"`{model_type}`")
    rows = [f"| `{architecture}` | {', '.join(names)} |" for architecture, names in kinds.items()]
    return f"""These values of `model_type` are read, as the architectures beside them:

| `general.architecture` | `model_type` |
|---|---|
{chr(10).join(rows)}

Values of `rope_type`: `default`, {", ".join(f"`{kind}`" for kind in hf_rope.SCALINGS)}. Values of `quant_method`:
{", ".join(f"`{method}`" for method in METHODS)} ([Model files](models.md#pre-quantized-folders)).
"""


def page() -> str:
    rows = [
        f"| `{name}` | {f.models} | {positions(f)} | {norms(f)} | {feed_forward(f)} | {besides(f)} |"
        for name, f in FAMILIES.items()
    ]
    missing = [f"- `{name}`: {what}" for name, what in MISSING_MATHEMATICS.items()]
    tail = TAIL.replace("{folders}", folders())
    return HEAD + "\n".join(rows) + "\n" + tail + "\n".join(missing) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not current: run python tools/families_page.py")


if __name__ == "__main__":
    main()
