"""Run what the README and the docs tell people to type, in the environment that `make` installed.

Every block marked `sh` or `python` is run, in order, from the top of the repository. A block marked `text`
that follows one directly is what it must print. `<!-- not run: REASON -->` on the line above a block leaves
it out.

What depends on the machine is marked `<!-- measured: within a factor of N -->` on the line above a `text` block. Its
words must be the same then, and so must counts, which are the numbers with a comma between thousands; every other
number may be off by that factor, and a line that ends in "..." may go on in any way. A picture of `docs/figures` that
such commands write (its path stands in the block, and it follows the block on the page) must say the same as the one
that is there, numbers aside where the block's are measured; the file is put back afterwards.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from xml.etree import ElementTree

TOP = Path(__file__).parent.parent
LIMIT_S = 1800
MARKS = r"(?P<skip><!-- not run: [^\n]+ -->\n)?(?:<!-- measured: within a factor of (?P<factor>\d+) -->\n)?"
BLOCK = re.compile(MARKS + r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
PICTURE = re.compile(r"!\[[^\]]*\]\((figures/[\w.-]+\.svg)\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")


@dataclass
class Example:
    line: int
    kind: str
    body: str
    expected: str | None = None
    factor: int | None = None
    pictures: list[str] = field(default_factory=list)


def examples(readme: str) -> list[Example]:
    """The blocks to run, each with the output that the README shows for it."""
    found: list[Example] = []
    end_of_last = -1
    for match in BLOCK.finditer(readme):
        between = readme[end_of_last : match.start()]
        if match["kind"] == "text" and found and end_of_last >= 0 and not between.strip():
            found[-1].expected = match["body"]
            found[-1].factor = int(match["factor"]) if match["factor"] else None
        elif match["kind"] in ("sh", "python") and not match["skip"]:
            found.append(Example(readme.count("\n", 0, match.start()) + 1, match["kind"], match["body"]))
            end_of_last = match.end()
            continue
        end_of_last = -1
    for example, follows in zip_longest(found, found[1:]):
        lines = readme.splitlines()[example.line - 1 : follows.line - 1 if follows else None]
        shown = (f"docs/{path}" for path in PICTURE.findall("\n".join(lines)))
        example.pictures = [path for path in shown if path in example.body]
    return found


def run(example: Example) -> str | None:
    """Run one block; what is wrong with it, or None. Pictures that it writes are put back."""
    before = {TOP / path: (TOP / path).read_bytes() for path in example.pictures}
    try:
        fault = run_block(example)
        for path, shown in before.items():
            fault = fault or compare_pictures(shown, path.read_bytes(), example.factor is not None)
        return fault
    finally:
        for path, shown in before.items():
            path.write_bytes(shown)


def run_block(example: Example) -> str | None:
    """Run one block; what is wrong with it, or None."""
    binaries = Path(sys.executable).parent
    command = ["bash", "-euo", "pipefail", "-c"] if example.kind == "sh" else [sys.executable, "-c"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        [*command, example.body],
        cwd=TOP,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if result.returncode:
        return f"ended with status {result.returncode}\n{result.stdout}{result.stderr}"
    if example.expected is None:
        return None
    if example.factor is not None:
        return compare_measured(example.expected, result.stdout, example.factor)
    if result.stdout.strip() != example.expected.strip():
        return f"printed\n{result.stdout}\nbut the page shows\n{example.expected}"
    return None


def compare_measured(expected: str, printed: str, factor: int) -> str | None:
    """The first line that has other words, or a number that is too far off; None if there is none."""
    shown, found = expected.strip().splitlines(), printed.strip().splitlines()
    if len(shown) != len(found):
        return f"printed {len(found)} lines\n{printed}\nbut the page shows {len(shown)}"
    for a, b in zip(shown, found, strict=True):
        if a.endswith("..."):
            a, b = a[:-3], b[: len(a) - 3]
        if words_of(a) != words_of(b):
            return f"printed the line\n{b}\nbut the page shows\n{a}"
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
            if not are_near(x, y, factor):
                return f"printed {y} in the line\n{b}\nwhich is not within a factor of {factor} of\n{a}"
    return None


def words_of(line: str) -> list[str]:
    """A line with each number replaced by #, whatever the space between."""
    return NUMBER.sub("#", line).split()


def are_near(x: str, y: str, factor: int) -> bool:
    """Whether one is at most `factor` times the other (0.00 counts as its last digit); counts must be equal."""
    if "," in x + y:
        return x == y
    decimals = min(len(n.partition(".")[2]) for n in (x, y))
    low, high = sorted(map(float, (x, y)))
    return high <= factor * max(low, 10.0**-decimals)


def compare_pictures(shown: bytes, found: bytes, measured: bool) -> str | None:
    """What two SVG files say differently, or None."""
    a, b = texts_of(shown, measured), texts_of(found, measured)
    return None if a == b else f"drew a picture that says\n{b}\nbut the page's says\n{a}"


def texts_of(svg: bytes, measured: bool) -> list[str]:
    """The texts of an SVG file; of a measured one without numbers, ticks, and what names the machine."""
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    texts = [" ".join("".join(element.itertext()).split()) for element in elements]
    if not measured:
        return texts
    masked = {NUMBER.sub("#", text) for text in texts if not text.startswith("measured on ")}
    return sorted(text for text in masked if text != "#")


def check(page: str, example: Example) -> None:
    """Run one block and say so, or end the program with what is wrong."""
    start = time.monotonic()
    fault = run(example)
    where = f"{page}:{example.line}"
    if fault:
        raise SystemExit(f"{where}: the {example.kind} block {fault}")
    checked = " and prints what it shows" if example.expected is not None else ""
    print(f"{where}: the {example.kind} block runs{checked} ({time.monotonic() - start:.1f} s)", flush=True)


def main() -> None:
    for page in ("README.md", *sorted(f"docs/{path.name}" for path in (TOP / "docs").glob("*.md"))):
        found = examples((TOP / page).read_text())
        if not found and page == "README.md":
            raise SystemExit("README.md has no block to run")
        for example in found:
            check(page, example)


if __name__ == "__main__":
    main()
