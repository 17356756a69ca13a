"""What may be imported when: a start that pays only for what it uses."""

import subprocess
import sys

import pytest

HEAVY = ("numba", "llvmlite", "tokenizers", "jinja2", "huggingface_hub")

PROBE = """
import sys
{code}
print(*[name for name in {heavy!r} if name in sys.modules])
"""


def heavy_modules_after(code: str) -> list[str]:
    probe = PROBE.format(code=code, heavy=(*HEAVY, "numpy", "prompt_toolkit"))
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1].split()


def test_import_ropewalk_loads_nothing_heavy():
    assert heavy_modules_after("import ropewalk; ropewalk.__version__") == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["chat", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    code = f"""
import ropewalk.cli
sys.argv = ["ropewalk", *{arguments!r}]
try:
    ropewalk.cli.main()
except SystemExit as exit_:
    assert exit_.code in (None, 0), exit_.code
"""
    assert heavy_modules_after(code) == []


def test_the_probe_sees_a_heavy_module():
    assert heavy_modules_after("import jinja2") == ["jinja2"]
