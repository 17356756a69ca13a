"""AMX products have the bits of the vector kernels, whether the tiles are real or emulated; and who may use them.

A machine without AMX runs the compiled code as it is, in child processes whose SIGILL handler is `amx_emulator`.
"""

import ctypes
import errno
import json
import mmap
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest

from ropewalk.errors import InvalidParameterError
from ropewalk.kernels import amx_check, cpu
from ropewalk.kernels import formats as F
from ropewalk.kernels.cache import cache_folder
from ropewalk.kernels.matmul import matmul_worker, max_tile, tile_for

HERE = Path(__file__).parent
SHARED = runpy.run_path(str(HERE / "test_matmul.py"))
call_worker, packed_panels, quantized_tile, random_blocks = (
    SHARED[name] for name in ("call_worker", "packed_panels", "quantized_tile", "random_blocks")
)

on_x86_linux = pytest.mark.skipif(
    (sys.platform, os.uname().machine) != ("linux", "x86_64")
    or not {"avx512vnni", "avx512bw", "f16c"} <= cpu.cpu_features(),
    reason="the code around the tiles is for AVX-512 VNNI on Linux",
)

CASES = [(n, fine) for n in F.PACKED for fine in (0, 1) if not (fine and F.PACKED[n].kind in F.FLOAT_KINDS)]
BATCHES = (16, 17, 32, 512)


# ---- products


@cache
def panels_of(name: str) -> np.ndarray:
    """40 rows of 40 groups, or 35 where blocks allow it: more than one chunk, and an odd number."""
    return packed_panels(name, random_blocks(name, 40, columns_of(name)), columns_of(name))


def columns_of(name: str) -> int:
    return 1280 if F.PACKED[name].blocked else 1120


@cache
def tile_bytes(columns: int, fine: int, is_float: bool, first: int, tile: int) -> np.ndarray:
    x = np.random.default_rng(4).standard_normal((512, columns)).astype(np.float32)[first : first + tile]
    x = np.concatenate([x, np.full((tile - len(x), columns), 7, np.float32)])
    if is_float:
        return np.ascontiguousarray(x.reshape(tile, -1, 32).transpose(1, 0, 2)).view(np.uint8)
    return quantized_tile(x, fine)[0]


def product(name: str, fine: int, n_tokens: int, add: int = 0) -> np.ndarray:
    """The first tokens' product, cut into tiles as `kernels.products` does it; float32 [n_tokens, 48]."""
    packed, panels, columns = F.PACKED[name], panels_of(name), columns_of(name)
    y = np.random.default_rng(5).standard_normal((n_tokens + 1, 48)).astype(np.float32)
    beyond = y[-1].copy()
    for token in range(0, n_tokens, max_tile()):
        rest = min(n_tokens - token, max_tile())
        tile = tile_for(rest)
        data = tile_bytes(columns, fine, packed.kind in F.FLOAT_KINDS, token, tile)
        x = (data.ctypes.data, y[token:].ctypes.data, y.strides[0], rest, add)
        where = (panels.ctypes.data, len(panels), panels.shape[1], columns // 32)
        call_worker(matmul_worker(packed.kind, tile, fine), (*where, *x))
    assert np.array_equal(y[-1], beyond)
    return y[:-1]


def save_products(path: str) -> None:
    """In a child: all products of this process's rung."""
    results = {}
    for name, fine in CASES:
        for n in BATCHES:
            results[f"{name} {fine} {n}"] = product(name, fine, n)
        results[f"{name} {fine} add"] = product(name, fine, 17, add=1)
    np.savez(path, **results)


# ---- children


EMULATE = (
    f"import sys; sys.path.insert(0, {str(HERE)!r}); import amx_emulator as emulator; emulator.install()\n"
)
TRUST = (  # the features are there, and this process may use them
    "from ropewalk.kernels import amx_check; amx_check.amx_refusal = lambda: None\n"
)


PLAIN = {"NUMBA_CPU_FEATURES": llvm.get_host_cpu_features().flatten(), "ROPEWALK_RUNG": "vnni"}
"""The environment of one for which it does not."""


@cache
def environment() -> dict[str, str]:
    """The environment of a process for which LLVM compiles instructions of AMX."""
    features = runpy.run_path(str(HERE / "amx_emulator.py"))["features_with_amx"]()
    return os.environ | {"NUMBA_CPU_FEATURES": features}


def run_child(code: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment() | changes, capture_output=True, text=True, timeout=1500, check=False
    )


@pytest.fixture(scope="module")
def emulated_products(tmp_path_factory):
    path = tmp_path_factory.mktemp("amx") / "products.npz"
    code = (
        "import test_amx as t; assert t.cpu.choose_rung().name == 'amx'\n"
        "assert t.max_tile() == 64; t.save_products(sys.argv[1])\n"
        "print(emulator.COUNTS[1] > 10_000, emulator.configured_threads())"
    )
    child = run_child(EMULATE + TRUST + code, str(path), ROPEWALK_RUNG="amx")
    assert (child.returncode, child.stdout.strip()) == (0, "True 0"), child.stderr
    with np.load(path) as results:
        yield dict(results)


@on_x86_linux
@pytest.mark.parametrize(("name", "fine"), CASES)
def test_emulated_tiles_give_the_bits_of_this_rung(emulated_products, name, fine):
    expected = product(name, fine, 512)
    for n in BATCHES:
        assert emulated_products[f"{name} {fine} {n}"].tobytes() == expected[:n].tobytes(), n
    assert emulated_products[f"{name} {fine} add"].tobytes() == product(name, fine, 17, add=1).tobytes()


# ---- the emulator itself, and the self-check under it


def results_of_the_emulator() -> dict[str, object]:
    """In a child: what each of the tests below looks at."""
    import amx_emulator as emulator

    results = {sort: differs(sort) for sort in VARIANTS}
    results["deaths"] = {name: death(lambda case=case: execute(*case)) for name, case in FORBIDDEN.items()}
    results["checks"] = {name: check() for name, check in amx_check.CHECKS.items()}
    emulator.COUNTS[2] = 1
    results["checks that are spoilt"] = {name: check() for name, check in amx_check.CHECKS.items()}

    def without():
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        amx_check.CHECKS["bytes"]()

    results["without the emulator"] = death(without)
    return results


def death(function) -> int:
    """The signal that ends a fork of this process which calls a function; 0 if none."""
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def execute(code: str, configuration: bytes, a=None, b=None, c=None) -> None:
    """Run machine code that finds addresses in rdi (configuration), rsi (a), rcx (b), r9 (c), strides in rdx and r8."""
    content = bytes.fromhex(code) + b"\xc3"
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(content)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    a, b, c = (np.zeros((16, 64), np.uint8) if x is None else x for x in (a, b, c))
    configuration = np.frombuffer(configuration, np.uint8)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(address)
    function(configuration.ctypes.data, a.ctypes.data, a.strides[0], b.ctypes.data, 64, c.ctypes.data)


def shapes(*tiles: tuple[int, int], palette: int = 1, reserved: int = 0) -> bytes:
    """A configuration of tiles with so many rows and so many bytes a row."""
    wide = b"".join(columns.to_bytes(2, "little") for _, columns in tiles).ljust(16, b"\0")
    return (
        bytes([palette, 0, reserved]).ljust(16, b"\0")
        + wide.ljust(32, b"\0")
        + bytes(rows for rows, _ in tiles).ljust(16, b"\0")
    )


# Encoded by hand from the manual, so that the emulator and LLVM do not share a mistake.
CONFIGURE, RELEASE, ZERO = "c4e2784907", "c4e27849c0", "c4e27b49c0"
LOAD_A = "c4e27b4b4c16f0"  # tileloadd tmm1, [rsi + rdx - 16]
LOAD_B, LOAD_C = "c4a27b4b1401", "c4827b4b0401"  # tileloadd tmm2, [rcx + r8]; tileloadd tmm0, [r9 + r8]
STORE_C = "c4827a4b0401"
VARIANTS = {  # tdpb..d tmm0, tmm1, tmm2, and the types of a and b
    "ss": ("c4e26b5ec1", np.int8, np.int8),
    "su": ("c4e26a5ec1", np.int8, np.uint8),
    "us": ("c4e2695ec1", np.uint8, np.int8),
    "uu": ("c4e2685ec1", np.uint8, np.uint8),
}
GOOD = shapes((5, 24), (5, 12), (3, 24))
FORBIDDEN = {
    "ud2": ("0f0b", GOOD),
    "no configuration": (ZERO, GOOD),
    "released": (CONFIGURE + RELEASE + ZERO, GOOD),
    "a tile without rows": (CONFIGURE + ZERO, shapes((0, 0), (5, 12))),
    "one tile twice": (CONFIGURE + "c4e2735ec1", GOOD),
    "b has other rows": (CONFIGURE + VARIANTS["ss"][0], shapes((5, 24), (5, 12), (4, 24))),
    "b has other columns": (CONFIGURE + VARIANTS["ss"][0], shapes((5, 24), (5, 12), (3, 20))),
    "a has other rows": (CONFIGURE + VARIANTS["ss"][0], shapes((5, 24), (6, 12), (3, 24))),
    "a row of 65 bytes": (CONFIGURE, shapes((5, 65))),
    "17 rows": (CONFIGURE, shapes((17, 64))),
    "rows of no bytes": (CONFIGURE, shapes((5, 0))),
    "palette 2": (CONFIGURE, shapes((5, 24), palette=2)),
    "a reserved byte": (CONFIGURE, shapes((5, 24), reserved=1)),
    "W1": (CONFIGURE + "c4e2eb5ec1", GOOD),
}


def differs(sort: str) -> int:
    """How many bytes of a small product, with odd shapes, are not those of NumPy."""
    code, type_a, type_b = VARIANTS[sort]
    rng = np.random.default_rng(6)
    a = rng.integers(0, 256, (5, 100)).astype(np.uint8)
    b = rng.integers(0, 256, (16, 64)).astype(np.uint8)
    c = rng.integers(-(2**31), 2**31, (16, 16)).astype(np.int32)
    rows = a[:, :12].copy().view(type_a).astype(np.int64)
    columns = b[:3, :24].reshape(3, 6, 4).transpose(1, 0, 2).reshape(6, 12).view(type_b).astype(np.int64)
    expected = c.copy()
    expected[:5, :6] = (c[:5, :6] + rows @ columns.T).astype(np.int32)
    every = CONFIGURE + LOAD_A + LOAD_B + LOAD_C + code + STORE_C + RELEASE
    execute(every, GOOD, a[:, 16:], b, c)
    return int((c.view(np.uint8) != expected.view(np.uint8)).sum())


@pytest.fixture(scope="module")
def emulation():
    code = "import test_amx as t, json; print(json.dumps(t.results_of_the_emulator()))"
    child = run_child(EMULATE + code, ROPEWALK_RUNG="vnni")
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@on_x86_linux
def test_the_emulator_multiplies_as_numpy_does(emulation):
    assert {sort: emulation[sort] for sort in VARIANTS} == dict.fromkeys(VARIANTS, 0)


@on_x86_linux
def test_what_amx_would_refuse_and_other_illegal_instructions_end_the_process(emulation):
    assert emulation["deaths"] == dict.fromkeys(FORBIDDEN, signal.SIGILL)


@on_x86_linux
def test_the_self_check_passes_fails_or_ends_by_sigill_as_the_tiles_are_right_wrong_or_absent(emulation):
    assert emulation["checks"] == dict.fromkeys(amx_check.CHECKS, True)
    assert emulation["checks that are spoilt"] == dict.fromkeys(amx_check.CHECKS, False)
    assert emulation["without the emulator"] == (0 if amx_check.host_has_amx() else signal.SIGILL)


# ---- a whole model

LOGITS = (
    f"import sys, hashlib; sys.path.insert(0, {str(HERE.parent / 'backend')!r}); import test_cpu as t\n"
    "file = t.open_gguf(sys.argv[1])\n"
    "backend = t.CpuBackend(file, t.ModelConfig.from_gguf(file.metadata, file.tensors), n_threads=2)\n"
    "cache, n = backend.new_cache(40), int(sys.argv[2])\n"
    "logits = t.run(backend, cache, t.TOKENS[:n], rows=[0, n - 1])\n"
    "print(t.cpu_module.choose_rung().name, hashlib.sha256(logits.tobytes()).hexdigest())\n"
)


def logits_of(child: subprocess.CompletedProcess) -> list[str]:
    """Rung and hash of the logits."""
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


@on_x86_linux
def test_a_model_on_emulated_tiles_has_the_logits_of_the_vector_kernels(smollm2):
    """20 tokens: a tile of 32, half a million tile products, by two threads."""
    after = "assert emulator.COUNTS[1] > 400_000 and emulator.configured_threads() == 0\n"
    emulated = logits_of(run_child(EMULATE + TRUST + LOGITS + after, str(smollm2), "20"))
    vectors = logits_of(run_child(LOGITS, str(smollm2), "20", **PLAIN))
    assert (emulated[0], vectors[0]) == ("amx", "vnni")
    assert emulated[1] == vectors[1]


def test_a_model_on_real_tiles_has_the_logits_of_the_vector_kernels(smollm2):
    if refused := cpu.refusal("amx"):
        pytest.skip(f"no AMX to try: {refused}")
    tiles, vectors = (
        logits_of(run_child(LOGITS, str(smollm2), "100", ROPEWALK_RUNG=rung)) for rung in ("amx", "vnni")
    )
    assert (tiles[0], vectors[0]) == ("amx", "vnni")
    assert tiles[1] == vectors[1]


# ---- who may use them


@pytest.fixture
def announced(monkeypatch, tmp_path):
    """A CPU that has AMX, a system that allows it, and an empty home; the child is each test's own."""
    features = cpu.cpu_features() | {"amx-tile", "amx-int8", "avx512vnni", "avx512bw", "f16c"}
    monkeypatch.setattr(cpu, "cpu_features", lambda: features)
    monkeypatch.setattr(amx_check, "host_has_amx", lambda: True)
    monkeypatch.setattr(amx_check, "permission_refusal", lambda: None)
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    monkeypatch.delenv("ROPEWALK_RUNG", raising=False)
    forget()
    yield monkeypatch
    forget()


def forget():
    for function in (cpu.choose_rung, amx_check.amx_refusal, cache_folder):
        function.cache_clear()


def child_of(code: str):
    return lambda: [sys.executable, "-c", code]


def nobody():
    raise AssertionError("a child was asked")


CHILDREN = {
    "import os, signal; os.kill(os.getpid(), signal.SIGILL)": "its self-check was ended by SIGILL",
    "print('wrong sums of bytes'); raise SystemExit(1)": "its self-check failed: wrong sums of bytes",
    "": "its self-check failed: exit status 0",
    "import time; time.sleep(60)": "its self-check had not ended after 0.5 s",
}


@pytest.mark.parametrize(("code", "why"), CHILDREN.items(), ids=CHILDREN.values())
def test_a_self_check_that_does_not_pass_leaves_the_vector_kernels_and_one_line(announced, caplog, code, why):
    announced.setattr(amx_check, "_command", child_of(code))
    announced.setattr(amx_check, "TIMEOUT_S", 0.5 if "sleep" in code else 100)
    rung = cpu.choose_rung()
    assert rung.name == "vnni"
    assert rung.reason.endswith(f"without AMX: {why}")
    line = f"AMX tiles are not used: {why} (ROPEWALK_RUNG=vnni stops asking)"
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", line)]


def test_a_child_that_cannot_be_started_is_no_error(announced):
    announced.setattr(amx_check, "_command", lambda: ["/nowhere/python"])
    assert "could not be started" in cpu.choose_rung().reason


def test_a_good_verdict_is_kept_beside_the_kernels_and_a_bad_one_for_a_day(announced):
    announced.setattr(amx_check, "_command", child_of("raise SystemExit('too busy')"))
    assert cpu.choose_rung().name == "vnni"
    forget()
    announced.setattr(amx_check, "_command", nobody)
    assert cpu.choose_rung().reason.endswith("too busy")
    verdict = cache_folder("amx") / "amx-check.txt"
    os.utime(verdict, (time.time() - 25 * 3600,) * 2)
    forget()
    announced.setattr(amx_check, "_command", child_of(f"print({amx_check.PASSED!r})"))
    assert cpu.choose_rung().name == "amx"
    assert cpu.choose_rung().vectors == "vnni"
    assert cache_folder() == verdict.parent
    os.utime(verdict, (0, 0))
    forget()
    announced.setattr(amx_check, "_command", nobody)
    assert cpu.choose_rung().name == "amx"


def test_without_permission_nobody_is_asked(announced):
    announced.setattr(
        amx_check, "permission_refusal", lambda: "Linux refuses the tiles' state (Invalid argument)"
    )
    announced.setattr(amx_check, "_command", nobody)
    rung = cpu.choose_rung()
    assert (rung.name, "Invalid argument" in rung.reason) == ("vnni", True)


def test_forcing_amx_where_it_cannot_be_is_an_error_that_says_why(announced):
    announced.setattr(amx_check, "host_has_amx", lambda: False)
    announced.setenv("ROPEWALK_RUNG", "amx")
    with pytest.raises(
        InvalidParameterError, match="'amx', which cannot be used: this machine's CPU has no AMX; usable"
    ):
        cpu.choose_rung()


def test_forcing_amx_is_no_way_around_the_self_check(announced):
    announced.setattr(amx_check, "_command", child_of("raise SystemExit(1)"))
    announced.setenv("ROPEWALK_RUNG", "amx")
    with pytest.raises(InvalidParameterError, match="its self-check failed: exit status 1"):
        cpu.choose_rung()


def test_forcing_the_vector_kernels_asks_nobody(announced):
    announced.setattr(amx_check, "_command", nobody)
    announced.setenv("ROPEWALK_RUNG", "vnni")
    assert cpu.choose_rung().name == "vnni"


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="asks x86-64 Linux")
@pytest.mark.parametrize("error", [0, errno.EINVAL, errno.ENOSPC])
def test_permission_is_asked_of_linux(monkeypatch, error):
    """ENOSPC: a thread's signal stack is too small for the tiles."""
    asked = []

    def syscall(*arguments):
        asked.append(arguments)
        ctypes.set_errno(error)
        return -1 if error else 0

    monkeypatch.setattr(amx_check.ctypes, "CDLL", lambda *a, **k: SimpleNamespace(syscall=syscall))
    refused = amx_check.permission_refusal()
    assert asked == [(158, 0x1023, 18)]
    assert refused == (f"Linux refuses the tiles' state ({os.strerror(error)})" if error else None)


def test_names_of_cpus_are_not_believed_about_this_one(announced):
    """NUMBA_CPU_NAME=sapphirerapids on another CPU: LLVM would emit what the machine cannot run."""
    announced.undo()
    announced.setenv("NUMBA_CPU_NAME", "sapphirerapids")
    assert cpu.cpu_features() >= {"amx-tile", "amx-int8", "avx512vnni"}
    announced.setattr(amx_check, "host_has_amx", lambda: False)
    forget()
    rung = cpu.choose_rung()
    assert (rung.name, rung.reason.endswith("this machine's CPU has no AMX")) == ("vnni", True)
