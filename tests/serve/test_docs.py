"""The snippets of docs/serve.md, against a real server."""

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text()
BLOCKS = re.findall(r"<!-- not run: tests/serve/test_docs.py runs it -->\n```(\w+)\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def here(smol):
    """A function that turns the page's address and model into those of the server."""
    return lambda text: text.replace("http://127.0.0.1:8000", smol.url).replace('"smollm2-135m"', '"smol"')


def test_all_kinds_are_there():
    assert [kind for kind, _ in BLOCKS] == ["python", "python", "sh"]


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_python(here, code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(here(code), "docs/serve.md", "exec"), {"__name__": "snippet"})
    assert len(out.getvalue()) > 40
    if "parse(" in code:
        person, call, word = out.getvalue().splitlines()[-3:]
        assert person.startswith("name=")
        assert "get_weather" in call
        assert word in ("Yes.", "No.")


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "sh"])
def test_shell(here, code):
    done = subprocess.run(["bash", "-euc", here(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    chat, embeddings, tokens = map(json.loads, done.stdout.replace("}{", "}\n{").splitlines())
    assert chat["choices"][0]["message"]["content"].startswith("Hello")
    assert len(embeddings["data"][0]["embedding"]) == 576
    assert tokens["count"] == len(tokens["tokens"]) > 1
