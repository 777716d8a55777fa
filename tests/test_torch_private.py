"""The private corners of torch that hookline stands on behave as it relies on.

A torch release that moves one of them fails here, and says which.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hookline import _torch
from hookline.hooks import checkpoints

both_kinds = pytest.mark.parametrize("reentrant", [True, False])


def test_graph_task_id_is_minus_one_outside_and_differs_between_backwards() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(_torch.graph_task_id()))
    x.register_hook(lambda grad: seen.append(_torch.graph_task_id()))
    assert _torch.graph_task_id() == -1
    (x * 2).sum().backward()
    torch.autograd.grad((x * 3).sum(), x)
    assert _torch.graph_task_id() == -1
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert min(seen) >= 0


def test_graph_task_id_is_set_while_a_checkpoint_is_recomputed() -> None:
    tasks: list[int] = []

    def part(x: Tensor) -> Tensor:
        tasks.append(_torch.graph_task_id())
        return x.sin()

    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert tasks[0] == -1
    assert tasks[1] >= 0


def test_preserve_version_puts_the_counter_back() -> None:
    x = torch.zeros(2)
    version = x._version
    with _torch.preserve_version(x):
        x.add_(1)
        assert x._version == version + 1
    assert x._version == version
    assert x.tolist() == [1, 1]


def test_detached_alias_shares_the_version_counter_and_is_no_view() -> None:
    x = torch.zeros(2, requires_grad=True) * 1
    alias = x.detach()
    alias.add_(1)
    assert x._version == alias._version == 1
    assert not alias._is_view()


def test_is_functorch_active_only_inside_a_transform() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(_torch.is_functorch_active())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert seen == [True, True]
    assert not _torch.is_functorch_active()


@pytest.mark.parametrize(("in_dims", "shape"), [(0, (2, 3, 4)), (1, (3, 2, 4)), (2, (4, 2, 3))])
def test_unwrap_functorch_moves_the_batch_to_the_front(in_dims: int, shape: Any) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    kept: list[Tensor] = []

    def function(row: Tensor) -> Tensor:
        kept.append(_torch.unwrap_functorch(row))
        return row

    torch.func.vmap(function, in_dims=in_dims)(x)
    assert kept[0].shape == shape
    assert torch.equal(kept[0], x.movedim(in_dims, 0))


def test_unwrap_functorch_goes_through_nested_transforms() -> None:
    x = torch.randn(2, 3)
    kept: list[Tensor] = []

    def function(row: Tensor) -> Tensor:
        kept.append(_torch.unwrap_functorch(row))
        return row.sin().sum()

    torch.func.vmap(torch.func.grad(function))(x)
    assert torch.equal(kept[0], x)
    assert type(kept[0]) is Tensor


def test_unwrap_functorch_gives_a_plain_tensor_back() -> None:
    x = torch.ones(1)
    assert _torch.unwrap_functorch(x) is x


def test_at_end_of_backward_runs_once_after_all_hooks() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def queue(grad: Tensor) -> None:
        order.append("hook")
        _torch.at_end_of_backward(lambda: order.append("end"))

    y.register_hook(queue)
    x.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
    y.sum().backward()
    assert order == ["hook", "accumulated", "end"]


def test_error_at_the_end_of_backward_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("at the end")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: _torch.at_end_of_backward(fail))
    with pytest.raises(ValueError, match="at the end"):
        (x * 2).sum().backward()


def test_cpu_tensor_never_records_a_cuda_graph() -> None:
    assert not _torch.is_capturing_cuda_graph(torch.ones(1))


@pytest.mark.gpu
def test_capturing_cuda_graph_is_noticed() -> None:
    seen: list[bool] = []
    x = torch.ones(4, device="cuda")
    assert not _torch.is_capturing_cuda_graph(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        seen.append(_torch.is_capturing_cuda_graph(y))
    assert seen == [True]


def test_saved_tensor_hooks_of_a_checkpoint_are_known_by_name() -> None:
    seen: list[str] = []

    def part(x: Tensor) -> Tensor:
        top: Any = _torch.top_saved_tensor_hooks(False)
        seen.append(top[0].__qualname__)
        return x.sin()

    assert _torch.top_saved_tensor_hooks(False) is None
    checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [checkpoints._PACK]


def test_other_saved_tensor_hooks_are_no_checkpoint() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert checkpoints.in_checkpoint() is None
        assert checkpoints.recorded_regions() == []


@both_kinds
def test_recompute_is_traced_to_the_region_that_was_recorded(reentrant: bool) -> None:
    recorded: list[Any] = []
    repeated: list[Any] = []

    def part(x: Tensor) -> Tensor:
        region = checkpoints.recomputed_region()
        (recorded if region is None else repeated).append(region or checkpoints.recorded_regions())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    first = checkpoint(part, x, use_reentrant=reentrant)
    second = checkpoint(part, x.cos(), use_reentrant=reentrant)
    (first + second).sum().backward()
    assert [len(regions) for regions in recorded] == [1, 1]
    assert {id(one) for one in repeated} == {id(regions[0]) for regions in recorded}
    assert recorded[0][0] is not recorded[1][0]


@both_kinds
def test_nested_regions_are_listed_innermost_first(reentrant: bool) -> None:
    outer: list[Any] = []
    inner: list[Any] = []

    def small(x: Tensor) -> Tensor:
        if _torch.graph_task_id() == -1:
            inner.extend(checkpoints.recorded_regions())
        return x.sin()

    def large(x: Tensor) -> Tensor:
        if _torch.graph_task_id() == -1:
            outer.extend(checkpoints.recorded_regions())
        return checkpoint(small, x.cos(), use_reentrant=False)

    checkpoint(large, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    assert len(outer) == 1
    assert inner[-1] is outer[0]
    assert len(inner) == 2


@both_kinds
def test_region_lives_as_long_as_its_graph(reentrant: bool) -> None:
    import weakref

    regions: list[Any] = []

    def part(x: Tensor) -> Tensor:
        regions.extend(weakref.ref(one) for one in checkpoints.recorded_regions())
        return x.sin()

    y = checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    assert regions[0]() is not None
    del y
    assert regions[0]() is None


def test_early_stop_of_a_recompute_exists() -> None:
    """A recompute may end in the middle of a module: its end is not seen."""
    assert issubclass(torch_checkpoint._StopRecomputationError, Exception)


def test_module_call_has_the_names_that_hookline_reads() -> None:
    """`_call_impl` keeps `self` and `kwargs` in its frame, and pre hooks see that frame."""
    seen: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
            frame = frame.f_back
        seen.append(None if frame is None else (frame.f_locals["self"], frame.f_locals["kwargs"]))

    module = nn.Linear(1, 1)
    x = torch.ones(1)
    with torch_module.register_module_forward_pre_hook(look):
        module(input=x)
    assert seen[0][0] is module
    assert seen[0][1]["input"] is x


def test_hook_dictionaries_of_modules_and_handles_have_their_names() -> None:
    module = nn.Linear(1, 1)
    handle = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    assert handle.hooks_dict_ref() is module._forward_hooks
    assert handle.id in module._forward_hooks_with_kwargs
    assert handle.id in module._forward_hooks_always_called
    handle.remove()
    assert not module._forward_hooks_with_kwargs


def test_accumulate_hooks_run_in_the_order_of_their_dictionary() -> None:
    """Torch reads the plain dictionary: `move_to_end` would not do, taking out and in does."""
    order: list[str] = []
    parameter = nn.Parameter(torch.ones(1))
    handle = parameter.register_post_accumulate_grad_hook(lambda p: order.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda p: order.append("second"))
    hooks: Any = handle.hooks_dict_ref()
    hooks[handle.id] = hooks.pop(handle.id)
    (parameter * 2).sum().backward()
    assert order == ["second", "first"]


def test_creation_meta_tells_views_made_at_once() -> None:
    base = torch.ones(4, requires_grad=True) * 1
    assert _torch.creation_meta(base.view(2, 2)) != _torch.CreationMeta.MULTI_OUTPUT_NODE
    assert _torch.creation_meta(base.chunk(2)[0]) == _torch.CreationMeta.MULTI_OUTPUT_NODE


def test_forward_hooks_are_added_and_removed_without_a_trace() -> None:
    module = nn.Linear(2, 2)
    before = {name: dict(value) for name, value in vars(module).items() if "_hooks" in name}
    seen = []
    key = _torch.add_forward_hooks(
        module,
        lambda m, args, kwargs: seen.append(("pre", len(args), kwargs)),
        lambda m, args, kwargs, output: seen.append(("post", output.shape)),
    )
    module(torch.ones(1, 2))
    assert seen == [("pre", 1, {}), ("post", torch.Size([1, 2]))]
    other = module.register_forward_hook(lambda *args: None)
    assert other.id != key
    other.remove()
    _torch.remove_forward_hooks(module, key)
    after = {name: dict(value) for name, value in vars(module).items() if "_hooks" in name}
    assert before == after


def test_tensor_hook_without_a_handle_edits_as_a_registered_one() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    _torch.add_tensor_hook(y, lambda grad: grad * 3)
    y.register_hook(lambda grad: grad + 1)
    y.sum().backward()
    assert x.grad.tolist() == [8, 8]


def test_function_applied_directly_is_in_the_graph() -> None:
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    x = torch.ones(2, requires_grad=True)
    _torch.apply_function(Triple, x).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_function_mode_is_on_only_while_it_sees_what_is_called() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(_torch.is_function_mode_on(self))
            return func(*args, **(kwargs or {}))

    mode = Mode()
    assert not _torch.is_function_mode_on(mode)
    with mode:
        assert _torch.is_function_mode_on(mode)
        torch.ones(1) + 1
    assert not _torch.is_function_mode_on(mode)
    assert seen == [False, False]  # off inside of itself


def test_any_function_mode_is_noticed() -> None:
    class Mode(TorchFunctionMode):
        pass

    assert not _torch.has_function_mode()
    with Mode():
        assert _torch.has_function_mode()
    assert not _torch.has_function_mode()


@pytest.mark.gpu
def test_current_stream_is_known_by_its_address() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert _torch.raw_cuda_stream(_torch.current_cuda_device()) == side.cuda_stream


def test_what_may_be_changed_in_place_is_known() -> None:
    made = torch.ones(4, requires_grad=True)
    assert not _torch.may_be_changed(made)
    assert not _torch.may_be_changed(made.view(2, 2))
    assert _torch.may_be_changed(made * 2)
    assert _torch.may_be_changed((made * 2).view(2, 2))
    assert not _torch.may_be_changed((made * 2).chunk(2)[0])


def test_what_a_linear_layer_shows_is_known() -> None:
    layer = nn.Linear(3, 3)
    shown = layer(torch.ones(2, 2, 3))
    product = _torch.shown_product(shown)
    assert (product is not None) == (torch.__version__ < "2.15") == shown._is_view()
    if product is not None:
        assert product.shape == (4, 3)
    assert _torch.shown_product(layer(torch.ones(2, 3))) is None
    assert _torch.shown_product(layer(torch.ones(2, 2, 3))[0]) is None
    assert _torch.shown_product((layer(torch.ones(2, 3)) * 2).view(-1)) is None


def test_scale_of_a_scaler_is_a_tensor() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert _torch.gradient_scale(scaler) is None  # made with the first loss
    scaler.scale(torch.ones(1))
    scale = _torch.gradient_scale(scaler)
    assert scale is not None
    assert scale.item() == 8
    assert _torch.gradient_scale(torch.amp.GradScaler("cpu", enabled=False)) is None


def test_storage_number_is_shared_by_aliases_and_not_given_again() -> None:
    held: dict[int, object] = {}
    x = torch.zeros(100)
    number = _torch.storage_number(x, held)
    assert _torch.storage_number(x.detach()[3:], held) == number
    others = {_torch.storage_number(torch.zeros(100), held) for _ in range(50)}
    del x
    others |= {_torch.storage_number(torch.zeros(100), held) for _ in range(50)}
    assert number not in others
    assert len(others) == 100


def test_backward_inside_of_another_is_noticed() -> None:
    seen: list[bool] = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: seen.append(_torch.is_in_nested_backward()))
    x = torch.ones(2, requires_grad=True)
    (x * weight).sum().backward()
    for is_reentrant in (True, False):
        checkpoint(lambda x: (x * weight).sum(), x, use_reentrant=is_reentrant).backward()
    assert seen == [False, True, False]


def test_whether_a_leaf_gets_its_gradient_is_known_in_its_hook() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(_torch.will_accumulate(x)))
    x.sin().sum().backward()
    torch.autograd.grad(x.sin().sum(), x)
    torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    assert seen == [True, False, False]


@pytest.mark.parametrize("is_kept", [False, True])
def test_workers_of_a_loader_end_at_once_unless_they_are_kept(is_kept: bool) -> None:
    samples = torch.arange(8.0).tolist()
    loader: Any = DataLoader(samples, batch_size=2, num_workers=1, persistent_workers=is_kept)
    batches = iter(loader)
    next(batches)
    cycle = [batches]
    cycle.append(cycle)
    _torch.end_loading(batches)
    assert len(multiprocessing.active_children()) == is_kept
    _torch.end_loading(iter(DataLoader(samples)))  # it has none
    batches._shutdown_workers()


def test_tensors_are_guarded_in_all_but_memory_and_content() -> None:
    a, b = torch.ones(2, 3), torch.ones(4)
    is_like = _torch.guard_tensors([a, b])
    assert is_like(torch.zeros(2, 3), torch.zeros(4))
    assert not is_like(torch.zeros(3, 2), b)
    assert not is_like(a, None)
    twins = _torch.guard_tensors([a, a.clone()])
    assert twins(a, a.clone())
    assert not twins(a, a)  # one object in two places


def test_the_elements_of_a_jagged_tensor_are_known() -> None:
    rows = [torch.ones(2, 3), torch.zeros(1, 3)]
    whole = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert torch.equal(_torch.find_values(whole), torch.cat(rows))
    assert _torch.is_gapless(whole)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 1])
    part = torch.nested.narrow(torch.ones(2, 3, 4), 1, starts, lengths, layout=torch.jagged)
    assert not _torch.is_gapless(part)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_told_without_its_sizes() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    assert _torch.is_nested(torch.nested.nested_tensor(parts))
    assert _torch.is_nested(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert not _torch.is_nested(parts[0])
    with pytest.raises(TypeError):
        _torch.is_nested(None)


def test_tensors_are_not_like_under_other_modes() -> None:
    a = torch.ones(2, 3)
    is_like = _torch.guard_tensors([a])
    seen: list[Any] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad():
        assert is_like(a)
    with Seeing():
        assert is_like(a)
    assert not seen  # no mode is told
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_like(a)
    with torch.inference_mode():
        assert not is_like(torch.ones(2, 3))

    def transformed(x: Tensor) -> Tensor:
        assert not is_like(x)
        assert not is_like(a)
        return x

    torch.func.vmap(transformed)(torch.ones(5, 2, 3))
