"""What only a GPU shows: backward on its own thread, devices, random state, CUDA graphs."""

import threading

import pytest
import torch
from torch import nn

import hookline as hl

pytestmark = pytest.mark.gpu


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).cuda()


def test_observing_on_the_gpu_is_bit_identical() -> None:
    net = _net()
    x = torch.randn(32, 8, device="cuda")

    def run() -> list[torch.Tensor]:
        net.zero_grad()
        torch.cuda.manual_seed(0)
        out = net(x)
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in net.parameters()), torch.cuda.get_rng_state()]

    plain = run()
    with hl.capture(net, "**", inputs=True, grads=True) as got:
        seen = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert got["0"].output.is_cuda
    assert torch.equal(got[""].output, plain[0])
    assert got["0"].output.grad.is_cuda


def test_gradient_hooks_run_on_the_autograd_thread_with_their_visit() -> None:
    net = _net()
    threads, places = set(), []

    def look(grad: torch.Tensor, at: hl.At) -> None:
        threads.add(threading.current_thread().name)
        places.append((at.address, at.call, at.visit))

    with hl.hook(net, "*:output.grad", look):
        net(torch.randn(2, 8, device="cuda")).sum().backward()
    assert threads != {threading.main_thread().name}
    assert [place for place, _, _ in places] == ["2:output.grad", "1:output.grad", "0:output.grad"]
    assert {(call, visit) for _, call, visit in places} == {(0, 0)}


def test_module_backward_hooks_get_their_gradients() -> None:
    net = _net()
    seen = []
    x = torch.randn(2, 8, device="cuda", requires_grad=True)
    with hl.register_backward_hook(net, "**", lambda m, gi, go: seen.append((gi[0], go[0]))):
        net(x).sum().backward()
    assert len(seen) == 4
    assert all(a is not None and b is not None for a, b in seen)


def test_capture_moves_to_the_device_asked_for() -> None:
    net = _net()
    with hl.capture(net, "2", device="cpu", dtype=torch.float64) as got:
        out = net(torch.randn(2, 8, device="cuda"))
    assert got["2"].output.device.type == "cpu"
    assert torch.equal(got["2"].output, out.detach().cpu().double())


def test_observer_random_numbers_do_not_disturb_the_model() -> None:
    net = _net()
    x = torch.randn(2, 8, device="cuda")
    torch.cuda.manual_seed(1)
    plain = net(x)
    torch.cuda.manual_seed(1)
    with hl.hook(net, "**", lambda value, at: torch.randn(5, device="cuda")):
        assert torch.equal(net(x), plain)


def test_edit_from_another_device_is_refused() -> None:
    net = _net()
    with (
        pytest.raises(hl.EditError, match="returned a tensor on cpu for one on cuda:0"),
        hl.edit(net, {"0": lambda value, at: value.cpu()}),
    ):
        net(torch.randn(2, 8, device="cuda"))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_while_a_cuda_graph_is_recorded_is_refused() -> None:
    net = nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        net(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(hl.UnsupportedModel, match="CUDA graph"),
        hl.capture(net, ""),
        torch.cuda.graph(graph),
        torch.no_grad(),
    ):
        net(x)


def test_watch_measures_nothing_of_a_cuda_graph_that_is_recorded() -> None:
    net = nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with hl.watch(net, None, rules=False, with_inference=True, parameters=None) as watched:
        with torch.no_grad():
            net(x)
        with torch.cuda.graph(graph), torch.no_grad():
            out = net(x)
        graph.replay()
        watched.step()
    assert watched.history.series(":output", "count").values.tolist() == [8.0]
    assert any("CUDA graph" in note for note in watched.notes)
    torch.testing.assert_close(out, net(x))


def test_checkpointed_edit_is_repeated_in_the_recompute_on_the_gpu() -> None:
    from torch.utils.checkpoint import checkpoint

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    with hl.edit(net, {"0": hl.noise(1.0)}):
        net(x).sum().backward()
    wanted, x.grad = x.grad, None
    for reentrant in (False, True):
        with hl.edit(net, {"0": hl.noise(1.0)}):
            out = checkpoint(net, x, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(x.grad, wanted)
        x.grad = None


def test_capture_of_outputs_adds_no_synchronisation() -> None:
    net = _net()
    x = torch.randn(2, 8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with hl.capture(net, "**", inputs=True, grads=True):
            net(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * 0.25
        weights = scores.softmax(-1)
        for _ in range(2):
            v = v * 1.5
        return self.out(weights @ v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _inside_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("where", [["**@**"], ["**/*"], ["layers.*@weights", "layers.*/matmul[1]"]])
@pytest.mark.parametrize("grads", [False, True])
def test_looking_inside_forward_is_bit_identical(where: list[str], grads: bool) -> None:
    model, x = Model().cuda(), torch.randn(4, 8, 16, device="cuda")
    plain = _inside_step(model, x)
    with hl.capture(model, *where, grads=grads) as got:
        seen = _inside_step(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert all(tensor.is_cuda for tensor in got.tensors().values())
    assert "forward" not in vars(model.layers[0])


def test_edit_inside_forward_equals_one_by_hand() -> None:
    class Edited(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) * 0.25
            weights = scores.softmax(-1) * 0.5
            for _ in range(2):
                v = v * 1.5
            return self.out(weights @ v)

    model, x = Model().cuda(), torch.randn(4, 8, 16, device="cuda")
    by_hand = Model().cuda()
    by_hand.load_state_dict(model.state_dict())
    by_hand.layers[1].__class__ = Edited
    expected = _inside_step(by_hand, x)
    for where in ("layers.1@weights", "layers.1/softmax"):
        with hl.edit(model, {where: hl.scale(0.5)}):
            edited = _inside_step(model, x)
        assert all(torch.equal(a, b) for a, b in zip(edited, expected, strict=True))


def test_looking_inside_forward_adds_no_synchronisation() -> None:
    model, x = Model().cuda(), torch.randn(4, 8, 16, device="cuda")
    with hl.capture(model, "**@**", "**/*", grads=True) as got:
        _inside_step(model, x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            _inside_step(model, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(got.calls) == 2


def test_variables_while_a_cuda_graph_is_recorded_are_refused() -> None:
    model, x = Model().cuda(), torch.randn(4, 8, 16, device="cuda")
    with torch.no_grad():
        model(x)
        with (
            pytest.raises((hl.UnsupportedModel, RuntimeError)),
            hl.capture(model, "layers.0@weights"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
    torch.cuda.synchronize()


def test_gradients_inside_forward_come_on_the_autograd_thread() -> None:
    model, x = Model().cuda(), torch.randn(4, 8, 16, device="cuda")
    seen = []

    def look(grad: torch.Tensor, at: hl.At) -> None:
        seen.append((at.address, at.visit, threading.current_thread().name))

    with hl.hook(model, "layers.*@weights:grad", look):
        model(x).sum().backward()
    assert [(address, visit) for address, visit, _ in seen] == [
        ("layers.1@weights[0]:grad", 0),
        ("layers.0@weights[0]:grad", 0),
    ]
    assert {thread for *_, thread in seen} != {threading.main_thread().name}
