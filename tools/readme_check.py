"""Run what the README and the docs tell people to type, in the environment that `make` installed.

Every block marked `sh` or `python` is run, in order, from the top of the repository. A block marked `text`
that follows one directly is what it must print. `<!-- not run: REASON -->` on the line above a block leaves
it out.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parent.parent
LIMIT_S = 300
BLOCK = re.compile(r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)


@dataclass
class Example:
    line: int
    kind: str
    body: str
    expected: str | None = None


def examples(readme: str) -> list[Example]:
    """The blocks to run, each with the output that the README shows for it."""
    found: list[Example] = []
    end_of_last = -1
    for match in BLOCK.finditer(readme):
        between = readme[end_of_last : match.start()]
        if match["kind"] == "text" and found and end_of_last >= 0 and not between.strip():
            found[-1].expected = match["body"]
        elif match["kind"] in ("sh", "python") and not match["skip"]:
            found.append(Example(readme.count("\n", 0, match.start()) + 1, match["kind"], match["body"]))
            end_of_last = match.end()
            continue
        end_of_last = -1
    return found


def run(example: Example) -> str | None:
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
    if example.expected is not None and result.stdout.strip() != example.expected.strip():
        return f"printed\n{result.stdout}\nbut the page shows\n{example.expected}"
    return None


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
