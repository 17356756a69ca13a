"""Fixtures shared by all tests: where the real models are."""

import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Where the test run was started with SIGINT ignored, as in the background of a shell, its children would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Whether a test passes depends on the code alone: every run tries the same examples, on however slow a machine.
# `--hypothesis-profile random` tries others, and so does a run of more schedules than usual.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False)
LONG = "ROPEWALK_SCHEDULES" in os.environ or "ROPEWALK_ROUNDS" in os.environ
settings.load_profile("random" if LONG else "fixed")


def pytest_collection_modifyitems(items):
    """Take the limit of time from tests that were asked to try more than usual."""
    for item in items if LONG else ():
        item.add_marker(pytest.mark.timeout(0))


MODEL_FILES = {
    "smollm2-135m": "smollm2-135m-instruct-q4_1.gguf",
    "gemma3-270m": "gemma3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}


@pytest.fixture(scope="session")
def model_path():
    """A function from a model's name to its file.

    The files are sought in the folder that ROPEWALK_TEST_MODELS names: one that is missing there fails the
    test, so that CI cannot pass by skipping. Without the variable the default model comes from the catalog,
    and a test that needs another one is skipped.
    """

    def find(name: str) -> Path:
        if folder := os.environ.get("ROPEWALK_TEST_MODELS"):
            path = Path(folder) / MODEL_FILES[name]
            if not path.exists():
                pytest.fail(f"ROPEWALK_TEST_MODELS is {folder}, which does not hold {MODEL_FILES[name]}")
            return path
        if name == "smollm2-135m":
            from ropewalk.checkpoint.hub import resolve

            return resolve(name)
        pytest.skip(f"{name} is not at hand: set ROPEWALK_TEST_MODELS to a folder with {MODEL_FILES[name]}")

    return find


@pytest.fixture(scope="session")
def smollm2(model_path) -> Path:
    """The default model, SmolLM2-135M-Instruct Q4_1."""
    return model_path("smollm2-135m")


FAMILY_FOLDER = Path(__file__).parent / "data" / "families"
FAMILY_FIXTURES = sorted(FAMILY_FOLDER.glob("*.npz"))
"""One for each family, made by `tools/fixtures/families.py`."""


class TinyModel:
    """A family's tiny model in memory, standing in for a file: float32 weights, metadata, expected logits."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            model = json.loads(str(data["model"]))
            self.ids, self.rows, self.logits = data["ids"], data["rows"], data["logits"]
        self.metadata = model["metadata"]
        self.tensors = {name: _weight(name, tuple(shape)) for name, shape in model["tensors"].items()}

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    spec = importlib.util.spec_from_file_location(
        "weights", Path(__file__).parents[1] / "tools/fixtures/weights.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.weight(name, shape)


@pytest.fixture(params=FAMILY_FIXTURES, ids=lambda path: path.stem)
def family_model(request) -> TinyModel:
    """The tiny model of each family in turn."""
    path = request.param if isinstance(request.param, Path) else FAMILY_FOLDER / f"{request.param}.npz"
    return TinyModel(path)
