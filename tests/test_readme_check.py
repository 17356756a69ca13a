"""The check of the README's commands: which blocks it runs, and that it fails when they do."""

import importlib.util
import sys
from pathlib import Path

import pytest

PAGE = """
```sh
echo one
```

```text
one
```

<!-- not run: no network -->
```sh
exit 1
```

```text
belongs to no block that was run
```

```python
print(1 + 1)
```

Words in between.

```text
shown, not compared
```

<!-- not run: no network either -->
```sh
exit 2
```
"""


@pytest.fixture(scope="module")
def readme_check():
    spec = importlib.util.spec_from_file_location(
        "readme_check", Path(__file__).parent.parent / "tools" / "readme_check.py"
    )
    module = sys.modules["readme_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["readme_check"]


def test_which_blocks_are_run(readme_check):
    first, second = readme_check.examples(PAGE)
    assert (first.line, first.kind, first.body, first.expected) == (2, "sh", "echo one\n", "one\n")
    assert (second.kind, second.body, second.expected) == ("python", "print(1 + 1)\n", None)


@pytest.mark.parametrize(
    ("kind", "body", "expected", "fault"),
    [
        ("sh", "echo one", "one", None),
        ("sh", "echo two", "one", "printed\ntwo"),
        ("sh", "false\necho on", None, "status 1"),
        ("sh", "false | true", None, "status 1"),
        ("python", "print(1)", "1", None),
        ("python", "raise SystemExit(3)", None, "status 3"),
    ],
)
def test_a_block_that_fails_or_prints_something_else_is_a_fault(readme_check, kind, body, expected, fault):
    found = readme_check.run(readme_check.Example(1, kind, body, expected))
    assert found is None if fault is None else fault in found
