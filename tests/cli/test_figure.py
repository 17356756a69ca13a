"""`ropewalk figure`: a file, and its numbers on stdout."""

import pytest


def run(ropewalk, tmp_path, *arguments):
    result = ropewalk("figure", *arguments, "-o", tmp_path / "figure.svg")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
    assert "figure.svg" in result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_cache(ropewalk, tmp_path):
    _, mha, gqa, weights = run(ropewalk, tmp_path, "cache")
    assert mha[-8:] == ["524,288", "2.00", "GiB", "16.00", "GiB", "32.00", "GiB", "25,749"]
    assert gqa[-8:] == ["131,072", "0.50", "GiB", "4.00", "GiB", "8.00", "GiB", "102,996"]
    assert weights[1:3] == ["13.50", "GB"]


def test_cache_of_a_model(ropewalk, tmp_path, smollm2):
    rows = run(ropewalk, tmp_path, "cache", smollm2, "--cache-type", "float16,int8")
    assert [row[5 + 2 * ("int8" in row)] for row in rows[1:5]] == ["69,120", "23,040", "36,720", "12,240"]


def test_rope(ropewalk, tmp_path):
    rows = run(ropewalk, tmp_path, "rope")
    assert [row[0] for row in rows[1:5]] == ["0", "4", "16", "64"]
    assert rows[2][2:] == ["below", "1e-13"]
    assert rows[-1] == ["wavelengths", "of", "32", "pairs:", "6.28", "to", "47,117", "tokens"]


def test_rope_of_a_model(ropewalk, tmp_path, smollm2):
    """64 wide, base 100,000."""
    assert run(ropewalk, tmp_path, "rope", smollm2)[-1][-2] == f"{6.283185307 * 1e5 ** (31 / 32):,.0f}"


def test_sampling(ropewalk, tmp_path):
    rows = run(ropewalk, tmp_path, "sampling")
    assert [row[-5:] for row in rows[1:]] == [
        ["0.27", "2.56", "20", "of", "20"],
        ["0.63", "1.50", "20", "of", "20"],
        ["0.30", "2.28", "13", "of", "20"],
    ]


def test_sampling_of_a_model(ropewalk, tmp_path, smollm2):
    rows = run(ropewalk, tmp_path, "sampling", smollm2, "The capital of France is")
    assert rows[1][-3:] == ["49152", "of", "49152"]
    assert "␣Paris" in (tmp_path / "figure.svg").read_text()


def test_loop(ropewalk, tmp_path, smollm2):
    rows = run(ropewalk, tmp_path, "loop", smollm2, "--tokens", "4")
    assert [row[0] for row in rows[1:]] == ["1", "2", "3", "4"]
    assert [row[-4:-1] for row in rows[1:]] == [
        [n, ":", p] for n, p in zip("1234", ["1", "3", "6", "10"], strict=True)
    ]


def test_roofline(ropewalk, tmp_path, smollm2):
    rows = run(ropewalk, tmp_path, "roofline", smollm2, "--batch", "1,2", "--prompt", "8", "--repeats", "1")
    assert [row[:2] for row in rows[1:4]] == [["prefill", "8"], ["decode", "1"], ["decode", "2"]]
    assert rows[-1][:2] == ["read", "bandwidth:"]


def test_the_default_file_is_named_after_the_figure(ropewalk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ropewalk("figure", "sampling").exit_code == 0
    assert "prefers-color-scheme" in (tmp_path / "sampling.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("cache", "-o", "a.pdf"), 2, "allowed: a name that ends in .svg or .png"),
        (("cache", "--theme", "red"), 2, "theme is 'red'; allowed: auto, light, dark"),
        (("cache", "--cache-type", "int9"), 2, "cache type is 'int9'"),
        (("cache", "smollm2-135n"), 1, "smollm2-135m"),
        (("sampling", "--temperature", "0"), 2, "temperature is 0.0; allowed: at least 1e-5"),
        (("sampling", "--top-p", "2"), 2, "--top-p is 2.0; allowed: in 0 ... 1"),
        (("sampling", "smollm2-135m"), 2, "a model needs a prompt after it"),
        (("roofline", "--batch", "x"), 2, "expected whole numbers"),
        (("loop", "--tokens", "1"), 2, "1; allowed: a whole number of at least 2"),
        (("pie",), 2, "No such command 'pie'"),
    ],
)
def test_what_cannot_be_drawn(ropewalk, tmp_path, monkeypatch, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    result = ropewalk("figure", *arguments)
    assert result.exit_code == status, result.stderr
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())
