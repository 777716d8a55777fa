"""The text of an address: each row of the grammar, each error with its position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline._errors import AddressError
from hookline.addresses import Address, format_leaf, parse, parse_leaf
from hookline.addresses.pattern import escape, read_exact

PORTS = "the ports are `input`, `output`, `grad` and `local_grad`."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Address("")),
        ("layers.3.mlp", Address("layers.3.mlp")),
        ("layers.3.mlp:input", Address("layers.3.mlp", "input")),
        ("layers.3.mlp:output", Address("layers.3.mlp", "output")),
        (":input", Address("", "input")),
        (":output.grad", Address("", "output", (), True)),
        ("a:input.mask", Address("a", "input", ("mask",))),
        ("a:output[0]", Address("a", "output", (0,))),
        ("a:output[-1]", Address("a", "output", (-1,))),
        ('a:output["any key"]', Address("a", "output", ("any key",))),
        ("a:output['any key']", Address("a", "output", ("any key",))),
        (r'a:output["q\"q\\"]', Address("a", "output", ('q"q\\',))),
        ('a:output.x[0]["a.b:c"].y', Address("a", "output", ("x", 0, "a.b:c", "y"))),
        ("a:output.grad", Address("a", "output", (), True)),
        ("a:input.grad", Address("a", "input", (), True)),
        ("a:input.mask.grad", Address("a", "input", ("mask",), True)),
        ("a:output[0].grad", Address("a", "output", (0,), True)),
        ('a:output["grad"]', Address("a", "output", ("grad",))),
        ('a:output["grad"].grad', Address("a", "output", ("grad",), True)),
        ("a:output.gradient", Address("a", "output", ("gradient",))),
        ("a.weight:grad", Address("a.weight", "grad", (), True)),
        (":grad", Address("", "grad", (), True)),
        ("a.weight:local_grad", Address("a.weight", "local_grad", (), True)),
        ("layers.*.mlp:input", Address("layers.*.mlp", "input")),
        (r"a\:b\*:input", Address(r"a\:b\*", "input")),
        (r"a\@b\/c", Address(r"a\@b\/c")),
        (r"a\ ", Address(r"a\ ")),
        ("a b.c", Address("a b.c")),
        ("[:@/].x:input", Address("[:@/].x", "input")),
        (r"re:h\.\d+", Address(r"re:h\.\d+")),
        (r"re:h\.\d+:input.x[0].grad", Address(r"re:h\.\d+", "input", ("x", 0), True)),
        (r"re:(?:a|b):output", Address("re:(?:a|b)", "output")),
        (r"re:(?:output)", Address("re:(?:output)")),
        ("re:a:", Address("re:a:")),
        (r"re:.*weight:grad", Address("re:.*weight", "grad", (), True)),
        (r"re:.*weight:local_grad", Address("re:.*weight", "local_grad", (), True)),
    ],
)
def test_address_parses_into_parts(text: str, expected: Address) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a:outputs", 2, f"unknown port `outputs`; {PORTS} Nearest: `output`."),
        ("a:weight", 2, f"unknown port `weight`; {PORTS}"),
        ("a:", 1, "a port follows `:`, one of `input`, `output`, `grad` and `local_grad`"),
        ("a:.x", 2, "a port follows `:`, one of `input`, `output`, `grad` and `local_grad`"),
        ("a..b", 2, "a segment of the path is empty"),
        ("a.b.", 3, "a path does not end with a dot"),
        ("a.:input", 2, "a path does not end with a dot"),
        (".a", 0, "a path does not start with a dot"),
        (".", 0, "a path does not start with a dot"),
        (" a", 0, "an address does not start with whitespace"),
        ("a ", 1, "an address does not end with whitespace"),
        ("a\\\\ ", 3, "an address does not end with whitespace"),
        ("a\\", 1, "a backslash must be followed by a character"),
        ("a.[0", 2, "`[` is not closed"),
        ("a.[0\\]", 2, "`[` is not closed"),
        ("a.[]", 2, "the brackets are empty"),
        ("a.[!]", 2, "the brackets are empty"),
        ("a.0]", 3, r"`]` closes nothing; a name that holds it has `\]`"),
        ("a.[5-3]", 2, "the range `5-3` is empty: write `3-5`, both ends included"),
        ("a.[z-b]", 2, "the range `z-b` is empty"),
        ("a.[1,,2]", 2, "an empty alternative is not supported inside brackets"),
        ("a.[x*,y]", 2, "the wildcard in `x*` is not supported inside brackets"),
        ("a.[!x,yy]", 2, "`!` excludes characters or numbers, not words"),
        ("a.1[!2-3]", 3, "`!` with numbers stands for a whole number"),
        ("a**.b", 1, "`**` must be a whole segment, as in `a.**.b`"),
        ("a.**b", 2, "`**` must be a whole segment, as in `a.**.b`"),
        (
            "layers[3].mlp",
            6,
            "a module in a list is a path segment: write `layers.3` "
            "(item 3 of its output is `layers:output[3]`)",
        ),
        (
            "a.layers[-1]",
            8,
            "a module in a list is a path segment: count from the front, as in `layers.11` "
            "(item -1 of its output is `a.layers:output[-1]`)",
        ),
        (
            "layers[2:5]",
            6,
            "slices are not supported; a range with both ends is written `[3-5]`",
        ),
        ('a["x"]', 1, 'a key follows a port: write `a:output["x"]`'),
        (
            "a.attn@",
            6,
            "the name of a variable follows `@`, as in `attn@scores` or `attn/softmax`; "
            r"if `@` is part of a module's name, write `\@`",
        ),
        (
            "/",
            0,
            "the name of an operation follows `/`, as in `attn@scores` or `attn/softmax`; "
            r"if `/` is part of a module's name, write `\/`",
        ),
        ("a/softmax.x", 2, "an operation has one name, without dots, as in `attn/softmax`"),
        ("a@3", 2, "`3` is no name; a module is written before `@`"),
        (
            "a@x[y]",
            3,
            "brackets after the name of a variable hold which one it is: `[0]`, `[-1]`; "
            "an item of its value is written `:output[0]`",
        ),
        (
            "a@x:input",
            3,
            "a variable has no input; the arguments of an operation are `/name:input`",
        ),
        ("a@x y", 3, "after the name comes which one (`[0]`), a port (`:output`) or `:grad`"),
        ("a:grad.x", 6, "nothing follows `:grad`, the gradient of the whole"),
        ("a:grad.grad", 6, "nothing follows `:grad`, the gradient of the whole"),
        ("a:local_grad[0]", 12, "nothing follows `:local_grad`, the gradient of the whole"),
        ("a@x:local_grad", 3, "`:local_grad` is of parameters alone; write `:grad`"),
        (
            "a:output.grad.x",
            8,
            '`.grad` comes last and once; a leaf called grad is written `["grad"]`',
        ),
        (
            "a:output.grad.grad",
            8,
            '`.grad` comes last and once; a leaf called grad is written `["grad"]`',
        ),
        ("a:output[0", 8, "`[` is not closed"),
        ("a:output[x]", 8, 'brackets hold an index or a quoted key: `[0]`, `["name"]`'),
        ('a:output["x]', 8, 'brackets hold an index or a quoted key: `[0]`, `["name"]`'),
        ("a:output.0", 8, 'a name follows the dot; any other key is written `["key"]`'),
        ("a:output.", 8, 'a name follows the dot; any other key is written `["key"]`'),
        ("a:output@x", 8, 'a leaf is written `.name`, `[0]` or `["key"]`'),
        ("re:a(b", 4, "the regular expression is wrong: missing ), unterminated subpattern"),
        ("re:a(b:input", 4, "the regular expression is wrong: missing ), unterminated subpattern"),
    ],
)
def test_wrong_address_marks_position(text: str, position: int, message: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert str(caught.value) == f"{message}\n    {text}\n    {' ' * position}^"
    assert caught.value.position == position
    assert caught.value.text == text


@pytest.mark.parametrize("value", [3, None, ["a"], b"a"])
def test_address_that_is_no_string_raises(value: object) -> None:
    with pytest.raises(AddressError, match="an address is a string, not"):
        parse(value)  # type: ignore[arg-type]


def test_parse_gives_the_same_object_again() -> None:
    assert parse("h.*:output.grad") is parse("h.*:output.grad")


def test_format_leaf_quotes_what_is_no_name() -> None:
    assert format_leaf(("x", 0, "a b", -1, "grad", "")) == '.x[0]["a b"][-1]["grad"][""]'
    assert format_leaf(()) == ""


def test_parse_leaf_marks_position() -> None:
    assert parse_leaf("") == ()
    with pytest.raises(AddressError) as caught:
        parse_leaf(".x[0")
    assert caught.value.position == 2


keys = st.one_of(st.text(), st.sampled_from(["grad", "x", "ª", "a·", "1", "ö"]))
leaves = st.lists(st.one_of(keys, st.integers()), max_size=4).map(tuple)
names = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters="."), min_size=1),
        st.text("ab*?[]:@/\\ -,!", min_size=1),
        st.sampled_from(["re", "**", "layers", "0"]),
    ),
    max_size=3,
).map(".".join)


@given(leaves)
def test_leaf_reads_back_the_same(leaf: tuple[str | int, ...]) -> None:
    assert parse_leaf(format_leaf(leaf)) == leaf


@given(names, st.sampled_from(["input", "output"]), leaves, st.booleans())
def test_address_made_from_parts_reads_back_the_same(
    name: str, port: str, leaf: tuple[str | int, ...], is_grad: bool
) -> None:
    address = parse(str(Address(escape(name), port, leaf, is_grad)))
    assert read_exact(address.path) == name
    assert (address.port, address.leaf, address.is_grad) == (port, leaf, is_grad)


@given(names)
def test_parameter_address_reads_back_the_same(name: str) -> None:
    address = parse(escape(name) + ":grad")
    assert read_exact(address.path) == name
    assert (address.port, address.leaf, address.is_grad) == ("grad", (), True)
    assert read_exact(parse(escape(name)).path) == name


@given(st.text("ab.:*[]0-9,!\\\"'@/ inputgrad"))
def test_any_text_parses_or_raises_address_error(text: str) -> None:
    position: int | None = 0
    try:
        address = parse(text)
    except AddressError as error:
        position = error.position
    else:
        assert parse(str(address)) == address
    assert position in range(max(len(text), 1))
