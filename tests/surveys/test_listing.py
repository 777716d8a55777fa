"""`sites`: what a pattern means, and what flows there with an example."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline._errors import NoSuchSite, UnsupportedModel
from hookline.surveys.listing import sites


class Net(nn.Module):
    """Batch norm, dropout, a shared module, and a module that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.again = self.fc1
        self.idle = nn.Linear(1, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.drop(self.norm(self.fc1(x))) * scale
        self.fc1(x)
        return y


@pytest.fixture
def net() -> Net:
    return Net()


def cells(table: Any, *columns: str) -> list[tuple[object, ...]]:
    return [tuple(row[column] for column in columns) for row in table]


def test_listing_without_example_names_addresses_and_types(net: Net) -> None:
    table = sites(net)
    assert table.columns == ("address", "type", "names")
    assert table.rows == (
        (":output", "Net", ""),
        ("fc1:output", "Linear", "again"),
        ("norm:output", "BatchNorm1d", ""),
        ("drop:output", "Dropout", ""),
        ("idle:output", "Linear", ""),
    )
    assert table.title == "5 sites in `Net`"


def test_names_column_only_where_something_is_shared() -> None:
    assert sites(nn.Sequential(nn.Linear(1, 1))).columns == ("address", "type")


def test_parameters_show_shape_and_dtype(net: Net) -> None:
    table = sites(net, ["norm.weight", "fc1.weight:grad"])
    assert list(table) == [
        {
            "address": "fc1.weight:grad",
            "type": "parameter",
            "names": "again.weight",
            "shape": (4, 3),
            "dtype": "float32",
        },
        {
            "address": "norm.weight",
            "type": "parameter",
            "names": "",
            "shape": (4,),
            "dtype": "float32",
        },
    ]


def test_example_adds_what_flowed(net: Net) -> None:
    table = sites(net, example=torch.ones(2, 3))
    assert cells(table, "address", "shape", "dtype", "device", "visits") == [
        (":output", (2, 4), "float32", "cpu", 1),
        ("fc1:output", (2, 4), "float32", "cpu", 2),
        ("norm:output", (2, 4), "float32", "cpu", 1),
        ("drop:output", (2, 4), "float32", "cpu", 1),
        ("idle:output", None, None, None, 0),
    ]
    assert table.notes == ("1 of 5 sites did not run with this example.",)
    assert table.addresses[:2] == [":output", "fc1:output"]


def test_example_may_be_arguments_by_position_or_name(net: Net) -> None:
    x = torch.ones(2, 3)
    by_name = sites(net, ":input", example={"x": x, "scale": torch.tensor(2.0)})
    assert cells(by_name, "address", "shape") == [
        (":input.x", (2, 3)),
        (":input.scale", ()),
    ]
    assert cells(sites(net, ":input", example=(x,)), "address", "shape") == [(":input.x", (2, 3))]


def test_lstm_has_a_row_for_each_leaf() -> None:
    model = nn.Sequential(nn.LSTM(3, 5, num_layers=2))
    table = sites(model, "0", example=torch.ones(7, 2, 3))
    assert cells(table, "address", "shape") == [
        ("0:output[0]", (7, 2, 5)),
        ("0:output[1][0]", (2, 2, 5)),
        ("0:output[1][1]", (2, 2, 5)),
    ]
    one = sites(model, "0:output[1]", example=torch.ones(7, 2, 3))
    assert one.addresses == ["0:output[1][0]", "0:output[1][1]"]


def test_leaf_that_is_not_there_is_noted() -> None:
    table = sites(nn.LSTM(3, 5), ":output[7]", example=torch.ones(7, 2, 3))
    assert cells(table, "address", "visits") == [(":output[7]", 0)]
    assert table.notes == (
        "`:output[7]` was not in the value; "
        "tensors there: `output[0]`, `output[1][0]`, `output[1][1]`.",
    )


def test_unknown_argument_raises(net: Net) -> None:
    with pytest.raises(NoSuchSite, match="no argument `y`"):
        sites(net, ":input.y")


def test_gradients_show_the_shape_of_their_value() -> None:
    model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2))
    table = sites(model, ["0:input.grad", "1:output.grad"], example=torch.tensor([1, 2]))
    assert cells(table, "address", "shape", "visits") == [
        ("0:input.grad", None, 1),
        ("1:output.grad", (2, 2), 1),
    ]


def test_shapes_that_change_have_a_row_each() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> None:
            for length in (1, 2, 1):
                self.act(x[:length])

    table = sites(Growing(), ["act", ""], example=torch.ones(2))
    assert cells(table, "address", "shape", "visits") == [
        (":output", None, 1),
        ("act:output", (1,), 2),
        ("act:output", (2,), 1),
    ]
    assert table.addresses == [":output", "act:output"]


def test_pattern_without_match_raises(net: Net) -> None:
    with pytest.raises(NoSuchSite):
        sites(net, "nothing.*")


class Yielding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.fc(x)


class Consumer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = Yielding()

    def forward(self, x: Tensor) -> Tensor:
        return next(iter(self.source(x)))


@pytest.mark.parametrize("example", [None, torch.ones(1, 3)])
def test_generator_forward_is_listed_with_a_note(example: Tensor | None) -> None:
    table = sites(Consumer(), example=example)
    assert table.addresses == [":output", "source:output", "source.fc:output"]
    assert table.notes == (
        "`source:output`: its forward is a generator, which returns before its body runs; "
        "attach to the modules it calls.",
    )
    if example is not None:
        assert cells(table, "visits") == [(1,), (None,), (1,)]


def test_listing_keeps_no_tensor_alive(net: Net) -> None:
    alive: list[weakref.ref[Tensor]] = []
    handle = net.fc1.register_forward_hook(lambda _, __, y: alive.append(weakref.ref(y)))
    table = sites(net, ["**", "**:input"], example=torch.ones(2, 3))
    handle.remove()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert len(table) == 10


def test_lazy_model_is_listed_but_not_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    assert cells(sites(model, "0.weight"), "address", "shape") == [("0.weight", None)]
    with pytest.raises(UnsupportedModel) as caught:
        sites(model, example=torch.ones(1, 2))
    assert str(caught.value) == (
        "`0.weight` is not initialized yet, and running the example would do it. "
        "Run the model once first: model(example); or list without an example."
    )
    model(torch.ones(1, 2))
    assert cells(sites(model, "0", example=torch.ones(1, 2)), "shape") == [((1, 3),)]
