"""A rewritten function is the original in everything but its taps."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest
from recording_taps import RecordingTaps, add_hundred

from hookline.sources import definitions, read, rewrite, unwrap

FACTOR = 2


def documented(x: int, *, scale: int = 3) -> int:
    """Say what it is."""
    y = x * scale
    return y


documented.note = ["kept"]  # type: ignore[attr-defined]


def make_scaled(scale):
    def scaled(x):
        y = x * scale
        return y

    def rescale(new):
        nonlocal scale
        scale = new

    return scaled, rescale


def use_global(x):
    y = x * FACTOR
    return y


def fails(x):
    y = x
    return y / 0


def make_inner(x):
    y = x

    def inner():
        class Local:
            def method(self):
                return y

        return Local

    return inner


class Base:
    size = 1

    def __init__(self):
        self.__secret = 2

    def forward(self, x):
        h = x + self.size
        return h


class Child(Base):
    def __init__(self):
        super().__init__()
        self.__secret = 3

    def forward(self, x):
        h = super().forward(x)
        y = h * self.__secret
        return y

    def forward_as_of_old(self, x):
        y = super().forward(x)
        return y

    def forward_inside(self, x):
        def inner(this):
            z = super().forward(x)
            return z

        def class_of_mine():
            w = __class__
            return w

        return inner(self), class_of_mine()

    def forward_cell(self, x):
        def size():
            return self.size

        y = super().forward(x) + size()
        return y

    def mangled(self, x):
        __t = x * 2
        self.__kept = __t
        return __t + self.__kept

    def any_arguments(*args):
        y = args[1]
        return y

    @staticmethod
    def static(x):
        y = x
        return y

    @classmethod
    def made(cls, x):
        y = cls.size + x
        return y

    def with_generator(self, x):
        return sum(y for y in [x, self.size])


def test_copy_has_all_attributes_of_the_function():
    copy = RecordingTaps(documented, {"y"}).function

    assert isinstance(copy, FunctionType)
    assert copy is not documented
    for name in ("name", "qualname", "doc", "module", "defaults", "kwdefaults", "annotations"):
        assert getattr(copy, f"__{name}__") == getattr(documented, f"__{name}__")
    assert vars(copy) == vars(documented)
    assert vars(copy) is not vars(documented)
    assert copy.note is documented.note
    assert copy.__globals__ is documented.__globals__
    code, original = copy.__code__, documented.__code__
    assert (code.co_flags, code.co_qualname) == (original.co_flags, original.co_qualname)
    assert (code.co_filename, code.co_firstlineno) == (__file__, original.co_firstlineno)
    assert code.co_freevars == ("__hl_taps__",)


def test_copy_shares_the_closure_cells():
    scaled, rescale = make_scaled(2)
    taps = RecordingTaps(scaled, {"y"})

    assert taps(5) == 10
    rescale(3)
    assert taps(5) == scaled(5) == 15
    assert any(cell is scaled.__closure__[0] for cell in taps.function.__closure__)


def test_copy_sees_later_changes_of_globals(monkeypatch):
    taps = RecordingTaps(use_global, {"y"})
    monkeypatch.setitem(globals(), "FACTOR", 7)

    assert taps(2) == 14


def test_one_code_object_serves_two_functions_of_the_same_code():
    one, other = make_scaled(2)[0], make_scaled(3)[0]
    first, second = RecordingTaps(one, {"y"}), RecordingTaps(other, {"y"})

    assert first.function.__code__ is second.function.__code__
    assert (first(1), second(1)) == (2, 3)


def test_errors_show_the_line_of_the_file():
    with pytest.raises(ZeroDivisionError) as caught:
        RecordingTaps(fails, {"y"})(1)

    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "fails", "return y / 0")


def test_nested_functions_and_classes_keep_their_qualified_names():
    plain, tapped = make_inner(1), RecordingTaps(make_inner, {"y"})(1)

    assert tapped.__qualname__ == plain.__qualname__ == "make_inner.<locals>.inner"
    assert tapped().__qualname__ == plain().__qualname__
    assert tapped().method.__qualname__ == plain().method.__qualname__


def test_nothing_wanted_gives_a_copy_that_only_opens_a_scope():
    taps = RecordingTaps(documented, set())

    assert (taps(2), taps.table, taps.seen, taps.opened) == (6, (), [], ["enter"])


def test_table_holds_each_name_once():
    def twice(x):
        y = x
        y = y + 1
        return y

    taps = RecordingTaps(twice, {"y", "x", "return", "absent"})

    assert sorted(taps.table) == ["return", "x", "y"]
    assert taps(1) == 2
    assert [name for name, _ in taps.seen] == ["x", "y", "y", "return"]


def test_source_of_a_copy_is_not_read_again():
    with pytest.raises(Exception, match="its file was changed since it was imported"):
        read(RecordingTaps(documented, {"y"}).function)


@pytest.mark.parametrize(
    ("method", "name", "values"),
    [
        ("forward", "h", [5]),
        ("forward", "y", [15]),
        ("forward_as_of_old", "y", [5]),
        ("forward_inside", "inner.z", [5]),
        ("forward_inside", "class_of_mine.w", [Child]),
        ("forward_cell", "y", [6]),
        ("mangled", "__t", [8]),
        ("mangled", "self.__kept", [8]),
        ("with_generator", "y", [4, 1]),
    ],
)
def test_method_sees_its_class(method, name, values):
    function, child = vars(Child)[method], Child()
    taps = RecordingTaps(function, {name})

    assert taps(child, 4) == function(child, 4)
    assert taps.values(name) == values
    assert (taps.opened, taps.owners) == (["begin"], [child])


@pytest.mark.parametrize(("method", "result"), [("forward", 24), ("forward_cell", 12)])
def test_method_works_on_the_object_that_begin_gives(method, result):
    """As for a replica of a module, which is another object than the one that was tapped."""
    child, other = Child(), Child()
    other.size = 4
    taps = RecordingTaps(vars(Child)[method], {"y"})
    taps.exchange[id(child)] = other

    assert taps(child, 4) == vars(Child)[method](other, 4) == result


def test_method_without_a_first_argument_opens_like_a_function():
    taps = RecordingTaps(Child.any_arguments, {"y"})

    assert (taps(None, 3), taps.opened) == (3, ["enter"])


def test_static_method_opens_like_a_function():
    taps = RecordingTaps(vars(Child)["static"], {"y", "x"})

    assert isinstance(taps.function, staticmethod)
    assert taps.function.__func__(3) == 3
    assert taps.opened == ["enter"]
    assert [name for name, _ in taps.seen] == ["x", "y"]


def test_class_method_opens_with_its_class():
    taps = RecordingTaps(vars(Child)["made"], {"y"})

    assert taps.function.__get__(None, Child)(3) == 4
    assert taps.owners == [Child]


def test_function_given_as_method_opens_like_one():
    def patched(self, x):
        y = self + x
        return y

    taps = RecordingTaps(patched, {"y"}, is_method=True)

    assert (taps(1, 2), taps.opened, taps.owners) == (3, ["begin"], [1])


def test_bound_method_stays_bound():
    child = Child()
    taps = RecordingTaps(child.forward, {"y"}, add_hundred)

    assert taps.function.__self__ is child
    assert taps(4) == 115


def test_generator_opens_its_scope_when_it_starts():
    def count(x):
        y = x
        yield y

    taps = RecordingTaps(count, {"y"})
    generator = taps(1)

    assert taps.opened == []
    assert (list(generator), taps.opened) == ([1], ["enter"])


def test_default_objects_are_shared():
    kept: list[int] = []

    def collect(x, into=kept):
        y = x
        into.append(y)
        return into

    assert RecordingTaps(collect, {"y"})(1) is kept


def test_functions_of_equal_code_in_two_files_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("same_one", "same_two"):
        (tmp_path / f"{name}.py").write_text("def f(x):\n    y = x\n    return y\n")
    import same_one
    import same_two

    assert same_one.f.__code__ == same_two.f.__code__
    assert read(same_one.f).file == same_one.__file__
    assert read(same_two.f).file == same_two.__file__
    copies = [RecordingTaps(module.f, {"y"}).function for module in (same_one, same_two)]
    assert [copy.__code__.co_filename for copy in copies] == [same_one.__file__, same_two.__file__]


def test_reading_goes_with_the_code():
    space: dict[str, object] = {}
    before = len(definitions._sources)
    text = "def f(x):\n    y = x\n    return y\n"
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
    exec(compile(text, "<cell>", "exec"), space)
    read(space["f"])  # type: ignore[arg-type]
    assert len(definitions._sources) == before + 1
    space.clear()
    linecache.cache.pop("<cell>")
    assert len(definitions._sources) == before


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in Python 3.12")
def test_function_with_type_parameters():
    text = (
        "class Box[T]:\n"
        "    def get[S](self, x: S) -> tuple[S, T]:\n"
        "        y = (x, S, T)\n"
        "        return y\n"
        "def f[T](x: T) -> T:\n"
        "    def inner[U](a: U) -> U:\n"
        "        z = (a, T, U)\n"
        "        return z\n"
        "    return inner(x)\n"
    )
    linecache.cache["<generic>"] = (len(text), None, text.splitlines(True), "<generic>")
    space: dict[str, object] = {}
    exec(compile(text, "<generic>", "exec"), space)
    box, f = space["Box"], space["f"]
    taps = RecordingTaps(box.get, {"y"})  # type: ignore[attr-defined]
    assert taps(box(), 1) == box().get(1)  # type: ignore[operator]
    assert taps.function.__type_params__ == box.get.__type_params__  # type: ignore[attr-defined]
    taps = RecordingTaps(f, {"inner.z"})  # type: ignore[arg-type]
    assert taps(1)[0] == 1
    assert len(taps.seen) == 1


def test_definition_that_was_read_is_not_changed():
    reading = read(Child.forward)
    before = ast.dump(reading.node, include_attributes=True)
    RecordingTaps(Child.forward, {"h", "y", "x", "return", "forward.h"})

    assert read(Child.forward).node is reading.node
    assert ast.dump(reading.node, include_attributes=True) == before


def test_threads_can_rewrite_and_run_at_once():
    def count(x):
        total = 0
        for i in range(x):
            total += i
        return total

    def run(_):
        taps = RecordingTaps(count, {"total", "i"})
        return taps(50), len(taps.seen)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(40))) == {(1225, 101)}


def test_partial_of_a_function_is_copied():
    def add(x, z):
        y = x + z
        return y

    partial = functools.partial(add, 1)
    taps = RecordingTaps(partial, {"y"}, add_hundred)

    assert (taps(2), partial(2)) == (103, 3)
    assert unwrap(partial) == [partial, add]


def test_unknown_names_are_left_to_the_caller():
    assert rewrite(documented, frozenset({"nowhere"}), None)[1] == ()
