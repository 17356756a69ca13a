"""Draw the README's chart, docs/speed.svg, from real runs: --json outputs of compare.py, one a model.

    python benchmarks/chart.py RESULT.json [RESULT.json ...] --output docs/speed.svg

Left: decode, as the share of the machine's read bandwidth that was measured in the same run (0 to 100 %, the
bound that no engine can pass while it reads every weight for every token). Right: prefill, in tokens per
second of each model's own scale. Nothing is left out or rescaled: a bar twice as long is twice the number.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

ROW, BAR, TOP, LEFT, PANEL, GAP = 58, 17, 78, 270, 250, 130
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.title { font-weight: 600 } .ropewalk { fill: #0f766e } .peer { fill: #a8b1bb } .line { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 }
.ropewalk { fill: #2dd4bf } .peer { fill: #656c76 } .line { stroke: #3d444d } }
"""


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def bar(x: float, y: float, share: float, kind: str, label: str) -> str:
    width = PANEL * share
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" rx="2" class="{kind}"/>' + text(
        x + width + 6, y + 13, label, "small"
    )


def group(result: dict, y: float) -> list[str]:
    """The bars of one model: two engines, decode and prefill."""
    decode, prefill = result["decode"], result["prefill"]
    most = max(prefill["ropewalk_tokens_per_s"], prefill["llama_cpp_tokens_per_s"])
    parts = [text(LEFT - 12, y + 22, result["label"], anchor="end")]
    for row, (engine, kind) in enumerate((("ropewalk", "ropewalk"), ("llama_cpp", "peer"))):
        at = y + row * (BAR + 3)
        speed = decode[f"{engine}_tokens_per_s"]
        share = decode[f"{engine}_bandwidth_share"]
        parts.append(bar(LEFT, at, share, kind, f"{speed:.0f} tok/s, {share:.0%}"))
        speed = prefill[f"{engine}_tokens_per_s"]
        parts.append(bar(LEFT + PANEL + GAP, at, speed / most, kind, f"{speed:.0f} tok/s"))
    return parts


def draw(results: list[dict]) -> str:
    """The whole chart as SVG."""
    first = results[0]
    bottom = TOP + ROW * len(results)
    width, height = LEFT + 2 * PANEL + GAP + 90, bottom + 44
    right = LEFT + PANEL + GAP
    parts = [
        text(LEFT, 22, "Decode: share of the memory's read bandwidth", "title"),
        text(right, 22, f"Prefill of {first['prefill_tokens']} tokens", "title"),
        f'<rect x="{LEFT}" y="36" width="12" height="12" rx="2" class="ropewalk"/>'
        + text(LEFT + 18, 46, "Ropewalk"),
        f'<rect x="{LEFT + 100}" y="36" width="12" height="12" rx="2" class="peer"/>'
        + text(LEFT + 118, 46, "llama.cpp"),
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + PANEL * share
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{bottom - 6}" class="line"/>')
        parts.append(text(x, TOP - 15, f"{share:.0%}", "small", "middle"))
    for number, result in enumerate(results):
        parts += group(result, TOP + ROW * number)
    bandwidth = sum(r["read_bandwidth_bytes_per_s"] for r in results) / len(results) / 1e9
    parts.append(
        text(
            LEFT,
            height - 22,
            f"{first['cpu']}, {first['threads']} threads, {bandwidth:.0f} GB/s. Same file, one run "
            "that alternates both;",
            "small",
        )
    )
    parts.append(
        text(
            LEFT,
            height - 7,
            f"medians of {first['repeats']} rounds. {first['versions'][1]}, with its better flash-attention "
            "setting.",
            "small",
        )
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Speed of Ropewalk and llama.cpp">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", nargs="+", type=Path, help="LABEL=FILE or FILE, output of compare.py --json"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/speed.svg"))
    options = parser.parse_args()
    results = []
    for argument in options.results:
        label, _, path = str(argument).rpartition("=")
        result = json.loads(Path(path).read_text())
        results.append(result | {"label": label or Path(path).stem})
    options.output.write_text(draw(results))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
