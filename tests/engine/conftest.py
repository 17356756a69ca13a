"""The toy model as a fixture, because test folders are not packages."""

import runpy
from pathlib import Path

import pytest

ToyBackend = runpy.run_path(str(Path(__file__).with_name("toy.py")))["ToyBackend"]


@pytest.fixture(scope="session")
def toy():
    """The class `ToyBackend`."""
    return ToyBackend
