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


MEASURED = """
```sh
ropewalk figure a -o docs/figures/a.svg
```

<!-- measured: within a factor of 20 -->
```text
12 ms at 3.5 GB/s
machine ...
```

![A](figures/a.svg)
![B](figures/b.svg)

```sh
echo one
```

```text
one
```

![A](figures/a.svg)
"""


def test_what_is_measured_and_which_pictures_are_written(readme_check):
    first, second = readme_check.examples(MEASURED)
    assert (first.factor, first.expected) == (20, "12 ms at 3.5 GB/s\nmachine ...\n")
    assert first.pictures == ["docs/figures/a.svg"]
    assert (second.factor, second.pictures) == (None, [])


@pytest.mark.parametrize(
    ("printed", "fault"),
    [
        ("12 ms at 3.5 GB/s\nmachine A, 4 threads", None),
        ("240 ms at 0.2 GB/s\nmachine", None),
        ("241 ms at 3.5 GB/s\nmachine", "printed 241"),
        ("12 ms at 71 GB/s\nmachine", "printed 71"),
        ("12 s at 3.5 GB/s\nmachine", "printed the line\n12 s"),
        ("12 ms at 3.5 GB/s", "printed 1 lines"),
        ("12 ms at 3.5 GB/s\nMachine", "printed the line\nMachine"),
    ],
)
def test_measured_output_may_differ_by_the_factor(readme_check, printed, fault):
    found = readme_check.compare_measured("12 ms at 3.5 GB/s\nmachine ...\n", printed, 20)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize(
    ("x", "y", "near"),
    [
        ("0.00", "0.20", True),
        ("0.00", "0.21", False),
        ("0", "20", True),
        ("1000", "50", True),
        ("1000", "49", False),
        ("1,000", "1,000", True),
        ("1,000", "1,001", False),
    ],
)
def test_a_rounded_zero_counts_as_its_last_digit(readme_check, x, y, near):
    assert readme_check.are_near(x, y, 20) is near
    assert readme_check.are_near(y, x, 20) is near


def svg(*texts):
    inside = "".join(f"<text>{text}</text>" for text in texts)
    return f'<svg xmlns="http://www.w3.org/2000/svg">{inside}</svg>'.encode()


def test_pictures_say_the_same(readme_check):
    compare = readme_check.compare_pictures
    assert compare(svg("a 1", "2"), svg("a 1", "2"), measured=False) is None
    assert "says" in compare(svg("a 1"), svg("a 2"), measured=False)
    assert compare(svg("a 1", "2", "measured on x"), svg("30", "a 2"), measured=True) is None
    assert "says" in compare(svg("a 1"), svg("b 1"), measured=True)


def test_a_picture_is_put_back(readme_check, tmp_path, monkeypatch):
    monkeypatch.setattr(readme_check, "TOP", tmp_path)
    picture = tmp_path / "a.svg"
    picture.write_bytes(svg("page"))
    example = readme_check.Example(1, "sh", "cp b.svg a.svg", pictures=["a.svg"])
    (tmp_path / "b.svg").write_bytes(svg("new"))
    assert "drew a picture" in readme_check.run(example)
    assert picture.read_bytes() == svg("page")
    (tmp_path / "b.svg").write_bytes(svg("page").replace(b"><text", b"> <text"))
    assert readme_check.run(example) is None
    assert picture.read_bytes() == svg("page")
