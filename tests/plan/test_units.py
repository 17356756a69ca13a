"""Numbers with units are read strictly and written with their label."""

import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.plan.units import (
    both,
    duration,
    in_gb,
    in_gib,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_rate,
    per_second,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1,024 B", 1024),
        ("2kB", 2000),
        ("2KiB", 2048),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["24", "24G", "24Gi", "24 Gb/s", "-1GB", "0GB", "GB", "", "1e400GB", "nan GB", "24GB GB", "0x10GB"],
)
def test_a_size_without_its_unit_is_refused(text):
    with pytest.raises(InvalidParameterError, match=r"--memory is .*allowed"):
        parse_bytes(text, "--memory")


def test_bandwidths():
    assert parse_bandwidth("1TB/s") == 1e12
    assert parse_bandwidth("936.2 GB/s") == 936.2e9
    assert parse_bandwidth("80GiB/s") == 80 * 2**30
    for text in ("1TB", "1T/s", "1TB/h", "-1TB/s", "0GB/s", "fast", "/s"):
        with pytest.raises(InvalidParameterError, match="--bandwidth is"):
            parse_bandwidth(text, "--bandwidth")


def test_rates_and_counts():
    assert (
        parse_rate("312T")
        == parse_rate("312 TFLOP/s")
        == parse_rate("312TFLOPS")
        == parse_rate("312 top/s")
        == 312e12
    )
    assert parse_rate("1.2P") == 1.2e15
    assert parse_count("6.74e9") == parse_count("6.74B") == 6_740_000_000
    assert parse_count("6,738,415,616") == 6_738_415_616
    assert parse_count("135M") == 135_000_000
    for parse, text in (
        (parse_rate, "312"),
        (parse_rate, "312GB"),
        (parse_count, "7GB"),
        (parse_count, "-7B"),
    ):
        with pytest.raises(InvalidParameterError, match="allowed"):
            parse(text)


def test_gib_and_gb_are_different_and_labelled():
    assert in_gib(2 * 2**30) == "2.00 GiB"
    assert in_gb(2 * 2**30) == "2.15 GB"
    assert both(2 * 2**30) == "2.00 GiB (2.15 GB)"
    assert both(64) == "64 B"
    assert in_gib(524288) == "512 KiB"
    assert per_second(2e12, "B") == "2.00 TB/s"
    assert [duration(s) for s in (5.4e-4, 6.75e-3, 0.1, 4.2, 600)] == [
        "540 µs",
        "6.75 ms",
        "100 ms",
        "4.20 s",
        "10.0 min",
    ]
