"""Reading what was captured: by address, attribute and iteration; and what cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Branches, Mixer, Net, Twice, Wrapped, same
from torch import Tensor, nn

import hookline as hl


class Deep(nn.Module):
    """Two blocks in a list, each with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def got() -> hl.Captured:
    net = Net()
    with hl.capture(net, inputs=True, grads=True, params=True) as got:
        net(torch.ones(2, 3)).sum().backward()
    return got


@pytest.fixture
def twice() -> hl.Captured:
    model = Twice()
    with hl.capture(model, "fc") as got:
        model(torch.ones(1, 3))
    return got


@pytest.fixture
def calls() -> hl.Captured:
    net = Net()
    with hl.capture(net, "fc1", "fc1.bias") as got:
        net(torch.ones(1, 3))
        net(torch.zeros(1, 3))
    return got


def test_address_and_attribute_read_the_same(got: hl.Captured) -> None:
    assert got["fc1:output"] is got["fc1"].output is got.fc1.output
    assert got["fc1:output.grad"] is got["fc1"].output.grad
    assert got["fc1:input.input"] is got["fc1"].input is got.fc1.inputs["input"]
    assert got["fc1.weight"] is got.fc1.weight is got["fc1"].params["weight"]
    assert got["fc1.weight:grad"] is got["fc1.weight"].grad
    assert got[""].output is got[":output"]


def test_visit_says_what_it_is(got: hl.Captured) -> None:
    visit = got["fc1"]
    assert (visit.path, visit.names, visit.call, visit.visit) == ("fc1", ("fc1",), 0, 0)
    assert repr(visit) == "<fc1 (Linear), visit 0: :input, :output>"
    assert repr(got[""]) == "<root (Net), visit 0: :input, :output>"
    assert repr(got) == "<hookline.Captured: 1 calls, 4 visits>"
    assert repr(got.calls[0]) == "<call 0: 4 visits>"


def test_iteration_gives_visits_in_the_order_they_began(got: hl.Captured) -> None:
    assert [visit.path for visit in got] == ["", "fc1", "act", "fc2"]
    assert len(got) == 4


def test_numbered_modules_are_read_by_index() -> None:
    model = Deep()
    with hl.capture(model, "layers.**") as got:
        model(torch.ones(1, 3))
    assert got.layers[1].output is got["layers.1"].output
    assert got.layers[1][0].output is got["layers.1.0"].output
    assert got.layers["0"][1].visit == 0
    assert "layers" in dir(got)
    assert repr(got.layers) == "<captured under layers>"


def test_names_of_a_shared_module_read_the_same() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with hl.capture(model, "2") as got:
        model(torch.ones(1, 2))
    assert got["0", 1].output is got["2", 1].output
    assert got["2", 0].names == ("0", "2")


def test_leaves_are_read_by_name_and_by_position() -> None:
    model = Wrapped(Branches())
    with hl.capture(model, "inner") as got:
        model(torch.ones(1))
    assert got["inner:output.b[1][0]"].item() == 3
    assert got["inner:output[1][0]"].item() == 2
    assert got["inner:output.n"] == 7
    with pytest.raises(hl.NotCaptured) as caught:
        got["inner:output.c"]
    assert str(caught.value) == (
        "`inner:output.c`: this value has no such leaf. It has: `.a`, `.b[0]`, `.b[1][0]`."
    )


def test_gradients_come_in_the_structure_of_the_value() -> None:
    model = Wrapped(Branches())
    with hl.capture(model, "inner", grads=True) as got:
        out = model(torch.ones(1, requires_grad=True))
        (out["a"] + 5 * out["b"][1][0]).backward()
    grads = got["inner:output.grad"]
    assert grads["a"].item() == 1
    assert grads["b"][0] is None
    assert grads["b"][1][0].item() == 5
    assert got["inner:output.b.grad"][1][0].item() == 5
    assert got["inner"].grads()[0]["a"].item() == 1


def test_visit_must_be_chosen_where_there_are_several(twice: hl.Captured) -> None:
    with pytest.raises(hl.AmbiguousRead) as caught:
        twice["fc"]
    assert str(caught.value) == (
        "`fc` ran 2 times in this call; choose a visit: got['fc', 0], or capture with last=True."
    )
    assert twice["fc", 1].visit == 1
    assert twice["fc", -1].visit == 1
    assert twice["fc:output", 0] is twice["fc", 0].output


def test_visit_that_never_was_is_told(twice: hl.Captured) -> None:
    with pytest.raises(hl.NotCaptured) as caught:
        twice["fc", 2]
    assert str(caught.value) == "`fc` has no visit 2 in this call; captured visits: 0, 1."
    with pytest.raises(hl.NotCaptured, match="has no visit -3"):
        twice["fc", -3]


def test_call_must_be_chosen_where_there_are_several(calls: hl.Captured) -> None:
    with pytest.raises(hl.AmbiguousRead) as caught:
        calls["fc1"]
    assert str(caught.value) == (
        "`fc1` was captured in 2 calls; choose one: got.calls[0]['fc1'], or capture with last=True."
    )
    with pytest.raises(hl.AmbiguousRead, match=r"choose one: got\.calls\[0\]\['fc1\.bias'\]"):
        calls["fc1.bias"]
    assert calls.calls[1]["fc1"].call == 1
    assert calls.calls[1]["fc1.bias"].shape == (4,)
    assert [one.path for one in calls.calls[0]] == ["fc1"]


def test_several_arguments_have_no_single_input() -> None:
    model = Wrapped(Mixer())
    with hl.capture(model, "inner", inputs=True) as got:
        model(torch.ones(1), torch.ones(1))
    with pytest.raises(hl.AmbiguousRead) as caught:
        got["inner"].input
    assert str(caught.value) == (
        "`inner` has 2 arguments: `x`, `y`. Read one by its name in .inputs."
    )


def test_value_read_before_it_exists_says_so() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        with pytest.raises(hl.NotCaptured) as caught:
            got["fc1"]
        with pytest.raises(hl.NotCaptured, match="the report is made when the capture ends"):
            got.report()
        net(torch.ones(1, 3))
        assert got["fc1"].output.shape == (1, 4)
    assert str(caught.value) == "`fc1` has no value yet. It did not run."


def test_site_that_was_not_asked_for_names_the_nearest(got: hl.Captured) -> None:
    with pytest.raises(hl.NotCaptured) as caught:
        got["fc3"]
    assert str(caught.value) == (
        "`fc3` was not asked for in this capture. Nearest: `fc2`, `fc1`. "
        "Name it in hl.capture(model, 'fc3')."
    )
    with pytest.raises(AttributeError, match="`fc3` was not asked for in this capture"):
        got.fc3
    assert not hasattr(got, "nothing")


def test_port_that_was_not_captured_names_what_is_there(twice: hl.Captured) -> None:
    with pytest.raises(hl.NotCaptured) as caught:
        twice["fc:output[1]", 0]
    assert "this value has no such leaf" in str(caught.value)
    with pytest.raises(hl.NotCaptured, match=r"no parameters of `fc` were captured; use"):
        twice["fc", 0].params


def test_gradient_that_is_missing_says_why() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(hl.NotCaptured, match=r"`fc1:output\.grad` has no gradient"):
        got["fc1:output.grad"]


@pytest.mark.parametrize("key", [3, ("fc", "1"), (1, 2), None])
def test_key_of_another_kind_is_refused(got: hl.Captured, key: Any) -> None:
    with pytest.raises(TypeError, match="read with an address, or an address and a visit"):
        got[key]


def test_contains_tells_whether_there_is_a_value(got: hl.Captured, twice: hl.Captured) -> None:
    assert "fc1" in got
    assert "fc1:output.grad" in got
    assert "fc1.weight:grad" in got
    assert "fc9" not in got
    assert "fc1:output[5]" not in got
    assert "fc" in twice


def test_tensors_are_named_by_address(got: hl.Captured, calls: hl.Captured) -> None:
    assert list(got.tensors())[:4] == [
        "fc1.weight",
        "fc1.weight:grad",
        "fc1.bias",
        "fc1.bias:grad",
    ]
    assert "act:input.input" in got.tensors()
    assert "fc2:output.grad" in got.tensors()
    assert list(calls.tensors()) == ["fc1.bias#0", "fc1:output#0.0", "fc1.bias#1", "fc1:output#1.0"]
    assert all(same(got[name], tensor) for name, tensor in got.tensors().items())


def test_nbytes_counts_each_storage_once(calls: hl.Captured) -> None:
    assert calls.nbytes == 2 * 4 * 4 + 2 * 4 * 4


def test_clear_forgets_and_a_capture_goes_on() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        net(torch.ones(1, 3))
        got.clear()
        assert len(got) == 0
        net(torch.ones(1, 3))
    assert [call.number for call in got.calls] == [1]


def test_table_has_a_row_for_each_tensor(got: hl.Captured, twice: hl.Captured) -> None:
    rows = {row["site"]: row for row in got.table()}
    assert list(rows["act:output"]) == ["site", "type", "shape", "dtype", "norm", "grad norm"]
    assert rows["act:output"]["type"] == "Tanh"
    assert rows["act:output"]["shape"] == "2x4"
    assert rows["fc1.weight"]["type"] == "parameter"
    assert rows["fc1:output"]["norm"] == pytest.approx(got["fc1"].output.norm().item())
    assert rows["fc1:output"]["grad norm"] == pytest.approx(got["fc1:output.grad"].norm().item())
    assert rows["fc1:input.input"]["grad norm"] is None
    assert [row["visit"] for row in twice.table()] == [0, 1]
    assert str(got) == str(got.table())


def test_table_shows_in_a_notebook_and_through_rich(got: hl.Captured) -> None:
    import io

    from rich.console import Console

    assert "<td" in got._repr_html_()
    assert "fc1:output" in got._repr_html_()
    console = Console(file=io.StringIO(), width=120)
    console.print(got)
    assert "fc1:output" in console.file.getvalue()


def test_overwritten_value_is_marked_in_the_table() -> None:
    net = Net()
    with hl.capture(net, "fc1", clone=False) as got:
        net(torch.ones(1, 3))
    got["fc1"].output.add_(1)
    table = got.table()
    assert next(iter(table))["norm"] == ""
    assert table.notes == ("1 values were overwritten in place; capture with clone=True.",)


def test_arguments_of_a_module_named_by_itself_are_kept_aside() -> None:
    net, x = Net(), torch.ones(1, 3)
    with hl.capture(net, "fc1") as got:
        net(x)
    assert len(got.table()) == 1
    assert torch.equal(got["fc1"].inputs["input"], x)
    assert torch.equal(got["fc1:input[0]"], x)


def test_arguments_that_were_not_kept_say_what_is_there() -> None:
    net, x = Net(), torch.ones(1, 3)
    for options in ({"where": "fc*"}, {"where": "fc1", "inputs": False}):
        with hl.capture(net, options.pop("where"), **options) as got:
            net(x)
        with pytest.raises(hl.NotCaptured) as caught:
            got["fc1"].inputs
        assert str(caught.value) == (
            "`fc1:input` was not captured; of this module there is: `fc1:output`. "
            "Name it in hl.capture(model, 'fc1:input'), or pass inputs=True."
        )


def test_arguments_changed_inside_the_module_are_told() -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return x * 2

    model = nn.Sequential(Adding())
    with hl.capture(model, "0") as got:
        model(torch.ones(2))
    with pytest.raises(hl.Overwritten, match=r"0:input\.x"):
        got["0"].inputs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_table_has_the_norms_of_nested_tensors(layout: torch.layout) -> None:
    rows = [torch.ones(3, 2), torch.ones(1, 2)]
    model = nn.Sequential(nn.ReLU())
    with hl.capture(model, "0") as got:
        model(torch.nested.nested_tensor(rows, layout=layout))
    (row,) = got.table()
    assert (row["shape"], row["norm"]) == ("nested", pytest.approx(8**0.5))
