"""What holds for the package as a whole: layers, cycles, names, docstrings, a light import.

The package is imported inside the tests that need it, so that one that does not import at all,
because of a cycle say, still gets the reason from the others.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "hookline"

# Lowest first. A name may import its own layer and those before it.
LAYERS: list[set[str]] = [
    {"_errors", "_trees", "_tables", "_torch", "_compiler", "_functions", "_ranks", "_tracing"},
    {"sources"},
    {"addresses"},
    {"stats"},
    {"runs"},
    {"stores"},
    {"rules"},
    {"diffs"},
    {"views"},
    {"hooks"},
    {"captures"},
    {"edits"},
    {"surveys"},
    {"replays"},
    {"watchers"},
    {"recordings"},
    {"extractions"},
    {"comparisons"},
    {"scripts"},
    {"integrations"},
    {"pytest_plugin", "testing"},
    {"_door"},
    {"__init__"},
    {"demo", "cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

MOST_LINES = 500

# A file is named after what it holds; these say nothing about that.
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "base", "manager", "managers"}

# Spelled without the leading slash, so that this file does not match itself.
MACHINE_PATHS = [f"/{rest}".encode() for rest in ("work/", "root/", "tmp/dev", "home/")]

PUBLIC = {
    "KEEP",
    "MISSING",
    "AddFeatures",
    "AddressError",
    "AmbiguousRead",
    "At",
    "BadTraining",
    "Captured",
    "Checkup",
    "CorruptShard",
    "Difference",
    "EditError",
    "Extraction",
    "Finding",
    "GradientError",
    "Handle",
    "HooklineError",
    "HooklineWarning",
    "NewerRun",
    "NoSuchRun",
    "NoSuchSite",
    "NotCaptured",
    "NotComparable",
    "NotRecorded",
    "OutOfBudget",
    "OutOfMemory",
    "Overwritten",
    "RayCluster",
    "Recording",
    "Rule",
    "Run",
    "RunExists",
    "RunWriteError",
    "Series",
    "SessionError",
    "Store",
    "StoreError",
    "StoreWriter",
    "UnsupportedModel",
    "UnsupportedTensor",
    "Watch",
    "add",
    "capture",
    "check",
    "clip",
    "diff",
    "edit",
    "extract",
    "hook",
    "inventory",
    "load",
    "mask",
    "noise",
    "open_run",
    "open_store",
    "patch",
    "port",
    "record",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_hook",
    "register_rule",
    "scale",
    "set",
    "sites",
    "skip",
    "source",
    "swap_rows",
    "testing",
    "watch",
    "zero",
}

# Runs in a process of its own, because this one has long imported everything.
IMPORT_PROBE = """
import json, sys
import torch

def state():
    return [
        dict(vars(torch.nn.Module)),
        dict(vars(torch.Tensor)),
        torch.nn.Module.__call__,
        torch.Tensor.backward,
        torch.nn.modules.module._has_any_global_hook(),
    ]

modules, before = set(sys.modules), state()
import hookline
hookline.sites  # the first name loads the rest
print(json.dumps({"new": sorted(set(sys.modules) - modules), "unchanged": state() == before}))
"""


@cache
def parse_modules() -> dict[str, tuple[Path, ast.Module]]:
    """Parse every file of the package, by dotted name; a package is named as its `__init__`."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = (path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return modules


def is_type_checking(test: ast.expr) -> bool:
    """Tell whether a condition is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    return ast.unparse(test).split(".")[-1] == "TYPE_CHECKING"


def walk_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs while a module is imported: no function bodies, no `TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for otherwise in child.orelse:
                yield from walk_at_import(otherwise)
            continue
        yield from walk_at_import(child)


def imported_modules(name: str, nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """Name each module of this package that the nodes import, and the line."""
    modules = parse_modules()
    path, _ = modules[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                start = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import name` means the module of that name, or else the package.
            whole = [f"{start}.{alias.name}" for alias in node.names]
            targets = [target if target in modules else start for target in whole]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "hookline":
                yield target, node.lineno


def layer_name(module: str) -> str:
    """Give the name that places a module: `hooks` for `hookline.hooks.tensors`."""
    return [*module.split("."), "__init__"][1]


def test_every_top_level_name_has_a_layer() -> None:
    unplaced = {layer_name(name) for name in parse_modules()} - set(LEVEL)
    assert not unplaced, f"place these in LAYERS: {sorted(unplaced)}"


def test_imports_point_down() -> None:
    """Also inside functions and under TYPE_CHECKING: a layer does not know those above it."""
    upward = []
    for name, (_, tree) in parse_modules().items():
        for target, line in imported_modules(name, ast.walk(tree)):
            own, other = layer_name(name), layer_name(target)
            if LEVEL.get(other, len(LAYERS)) > LEVEL.get(own, -1):
                upward.append(f"{name}:{line} imports {target}")
    assert upward == []


def test_imports_have_no_cycle() -> None:
    graph = {
        name: {target for target, _ in imported_modules(name, walk_at_import(tree))}
        for name, (_, tree) in parse_modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path, _ in parse_modules().values()
    }
    assert {path: count for path, count in lengths.items() if count > MOST_LINES} == {}


def test_file_names_say_what_they_hold() -> None:
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.suffix != ".pyc"]
    empty = [str(path) for path in paths if EMPTY_NAMES & set(re.split(r"[_.]", path.name))]
    assert empty == []


def test_modules_have_docstrings() -> None:
    modules = parse_modules()
    assert modules, f"no files under {PACKAGE}"
    assert [name for name, (_, tree) in modules.items() if not ast.get_docstring(tree)] == []


def test_public_names_are_these() -> None:
    import hookline

    assert len(hookline.__all__) == len(set(hookline.__all__))
    assert set(hookline.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_has_docstring(name: str) -> None:
    import hookline

    value = getattr(hookline, name)
    # What dataclasses write for a class without a docstring says nothing: `At(path: str, ...)`.
    is_generated = inspect.isclass(value) and (value.__doc__ or "").startswith(f"{name}(")
    assert value.__doc__, f"hookline.{name} has no docstring"
    assert not is_generated, f"hookline.{name} has only the docstring dataclass gave it"


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, object]:
    """Import hookline in a fresh process; say what came with it and whether torch changed."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_import_pulls_in_nothing_else(fresh_import: dict[str, list[str]]) -> None:
    allowed = {"hookline", *sys.stdlib_module_names}
    assert [name for name in fresh_import["new"] if name.split(".")[0] not in allowed] == []


def test_import_leaves_torch_unchanged(fresh_import: dict[str, bool]) -> None:
    assert fresh_import["unchanged"]


def test_files_name_no_machine_paths() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    files = [path for name in names if name and (path := ROOT / name.decode()).is_file()]
    assert files
    found = [
        f"{path.relative_to(ROOT)}: {pattern.decode()}"
        for path in files
        for pattern in MACHINE_PATHS
        if pattern in path.read_bytes()
    ]
    assert found == []
