"""The kernel is compiled once and kept; whatever goes wrong, there is a way without it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hookline.stats import compiled, open_log
from hookline.stats.compiled import KINDS, Library

SOURCE = Path(compiled.__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    compiled.find_compiler() is None, reason="there is no C compiler"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Forget what was compiled and keep what comes in a folder of the test."""
    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOOKLINE_COMPILE", raising=False)
    # What is tested here is where the result goes, so the quickest will do.
    quick = [flag for flag in compiled._FLAGS if not flag.startswith("-O")]
    monkeypatch.setattr(compiled, "_FLAGS", ("-O0", *quick))
    return tmp_path / "hookline"


def write_compiler(path: Path, script: str) -> str:
    """Make a program that stands for a compiler."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def measure(library: Library, x: torch.Tensor, threads: int = 1) -> np.ndarray:
    row = np.empty(8)
    pointer, kind = x.data_ptr(), KINDS[x.dtype]
    assert library.measure(pointer, x.numel(), kind, threads, row.ctypes.data, None) == 0
    return row


def assert_measures_without() -> None:
    """See that a log opened now measures, without compiled code."""
    log = open_log("cpu")
    assert compiled.load() is None
    log.add(torch.tensor([1.0, 3.0]))
    assert log.take().wait().rows.tolist() == [[2, 0, 0, 0, 1, 3, 2, 2]]


@needs_compiler
def test_kernel_is_compiled_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.load() is not None
    kept = list(fresh.iterdir())
    assert len(kept) == 1
    assert compiled.status() == f"compiled: {kept[0]}"
    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.setattr(compiled, "_build", None)  # a second compilation would fail
    assert compiled.load() is not None


@needs_compiler
def test_a_kernel_cut_short_is_made_anew(fresh: Path) -> None:
    kept = fresh / f"kernel-{compiled._fingerprint(compiled.find_compiler() or [])}.so"
    fresh.mkdir()
    kept.write_bytes(b"\x7fELF")
    assert compiled.load() is not None
    assert compiled.status() == f"compiled: {kept}"
    assert kept.stat().st_size > 1000


@needs_compiler
def test_many_may_compile_at_once(fresh: Path) -> None:
    """As ranks do that start together; none may see half of what another writes."""
    command = compiled.find_compiler() or []
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(compiled._load_or_build(command)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (kept,) = fresh.iterdir()
    assert [status for _, status in answers] == [f"compiled: {kept}"] * 4


def test_without_a_compiler_torch_measures(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_measures_without()
    assert compiled.status().startswith("not compiled: there is no C compiler")


def test_with_a_failing_compiler_torch_measures(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = write_compiler(tmp_path / "cc", "echo 'fatal: no headers' >&2; exit 1")
    monkeypatch.setenv("CC", compiler)
    assert_measures_without()
    assert compiled.status() == f"not compiled: `{compiler}` failed: fatal: no headers"
    assert list(fresh.iterdir()) == []


def test_a_compiler_that_makes_something_else_is_not_trusted(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", write_compiler(tmp_path / "cc", "exit 0"))
    assert_measures_without()
    assert compiled.status().startswith("not compiled: ")


def test_compiling_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_COMPILE", "0")
    assert_measures_without()
    assert compiled.status() == "not compiled: HOOKLINE_COMPILE=0"


@needs_compiler
def test_where_the_cache_cannot_be_written_the_kernel_is_made_for_the_process(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A file in place of the folder refuses even root.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library = compiled.load()
    assert library is not None
    assert compiled.status().startswith("compiled for this process alone: ")
    assert measure(library, torch.tensor([1.0, 3.0])).tolist() == [2, 0, 0, 0, 1, 3, 2, 2]


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor_gets_by(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plain instruction set computes the same, so vectors of any width are tested."""
    (real,) = compiled.find_compiler() or [""]
    refuse = f'case "$*" in *-march=native*) exit 1;; esac; exec {real} "$@"'
    monkeypatch.setenv("CC", write_compiler(tmp_path / "cc", refuse))
    library = compiled.load()
    assert library is not None
    for dtype in KINDS:
        x = (torch.randn(5000) * 50).to(dtype)
        wide = x.double()
        row = measure(library, x)
        expected = [5000, 0, 0, 0, wide.min(), wide.max(), wide.mean()]
        np.testing.assert_allclose(row[:7], expected, rtol=1e-12, atol=1e-12)
        assert row[7] == pytest.approx((wide - wide.mean()).square().sum().item(), rel=1e-12)
    sketch, row = np.empty(64, dtype=np.float32), np.empty(8)
    x = torch.randn(5000)
    library.measure(x.data_ptr(), 5000, 0, 1, row.ctypes.data, sketch.ctypes.data)
    from hookline.stats import reference

    np.testing.assert_allclose(sketch, reference.sketch(x).numpy(), atol=1e-5)


def test_flags_that_change_arithmetic_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("CC", "ccache gcc -Ofast -ffast-math -m64 -funsafe-math-optimizations")
    assert compiled.find_compiler() == ["ccache", "gcc", "-m64"]
    assert not set(compiled._FLAGS) & set(compiled._FORBIDDEN)


SUBNORMALS = """
import threading
import numpy as np, torch
torch.set_num_threads(1)

def halves():
    tiny, least = torch.tensor([2.0**-126, 2.0**-149]), np.array([2.0**-126, 2.0**-149], "f4")
    wide = np.array([2.0**-1022, 2.0**-1074])
    return [(tiny * 0.5)[0].item(), (tiny + 0)[1].item(), float((least * np.float32(0.5))[0]),
            float((least + np.float32(0))[1]), float((wide * 0.5)[0]), float((wide + 0)[1]),
            float(torch.randn(64, 64).mul(1e-42).sum() != 0)]

before = halves()
from hookline.stats import compiled, open_log
log = open_log("cpu")
log.add(torch.full((3_000_000,), 1e-42))
results = [halves()]
other = threading.Thread(target=lambda: results.append(halves()))
other.start()
other.join()
assert before[0] == 2.0**-127 and all(before), before
assert results == [before, before], (before, results)
assert log.take().wait().rows[0][4] > 0
print(compiled.status())
"""


def test_loading_the_kernel_leaves_subnormal_arithmetic_as_it_was() -> None:
    """A library linked with fast-math flags would switch subnormals off for all of torch."""
    done = subprocess.run(
        [sys.executable, "-c", SUBNORMALS],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("compiled") or compiled.find_compiler() is None


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    library = compiled.load()
    if library is None:
        pytest.skip(compiled.status())
    x = torch.randn(3_000_000) * 5 + 2
    x[1_234_567] = torch.nan
    alone = measure(library, x)
    for threads in (2, 3, 8, 1000):
        assert measure(library, x, threads).tolist() == alone.tolist()


def test_loading_in_many_threads_compiles_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    real = compiled._try

    def count() -> tuple[Library | None, str]:
        tries.append(1)
        return real()

    monkeypatch.setattr(compiled, "_try", count)
    monkeypatch.setenv("HOOKLINE_COMPILE", "0")
    threads = [threading.Thread(target=compiled.load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tries) == 1
