"""Every kind of tensor is measured for what it means, or named in an error."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from exact_statistics import assert_row, exact_counts, exact_sketch, numbers_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hookline._errors import HooklineError, UnsupportedTensor
from hookline.stats import Extras, Measured
from hookline.stats.preparing import find_layout, prepare

ALL = Extras.SKETCH | Extras.COUNTS


def measure(implementation, tensor: Tensor, extras: int = 0) -> Measured:
    """Measure one tensor in a log of its own."""
    log = implementation.open()
    log.add(tensor, extras)
    return log.take().wait()


def assert_measured_as(implementation, tensor: Tensor, meaning: Tensor) -> None:
    """Compare all that is measured of a tensor with what the plain tensor it means gives."""
    numbers = numbers_of(meaning)
    tensor = tensor.to(implementation.device)
    assert_row(measure(implementation, tensor).rows[0], numbers)
    got = measure(implementation, tensor, ALL)
    assert_row(got.rows[0], numbers)
    sketch, norm = exact_sketch(numbers)
    assert np.abs(got.sketches[0] - np.array(sketch)).max() <= 1e-6 * norm
    counts, bins = exact_counts(numbers, meaning.dtype)
    assert got.counts[0].tolist() == counts
    assert got.histograms[0].tolist() == bins


@pytest.fixture
def sparse() -> Tensor:
    """Give a matrix that is mostly zeros, one of them stored."""
    x = torch.zeros(40, 30)
    x[3, 4], x[3, 5], x[39, 29], x[0, 0], x[17, 2] = 2.5, -1.0, 7.0, 1e-40, math.nan
    return x


def test_sparse_is_the_whole_matrix(implementation, sparse: Tensor) -> None:
    assert_measured_as(implementation, sparse.to_sparse(), sparse)


def test_sparse_with_dense_rows_is_the_whole_matrix(implementation) -> None:
    x = torch.zeros(20, 3, 5)
    x[[2, 11]] = torch.randn(2, 3, 5)
    assert_measured_as(implementation, x.to_sparse(1), x)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_uncoalesced_sparse_adds_what_stands_at_one_place(implementation) -> None:
    x = torch.sparse_coo_tensor([[1, 1, 4]], [1.0, 2.0, -5.0], (6,), check_invariants=True)
    assert not x.is_coalesced()
    assert_measured_as(implementation, x, x.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC)")
@pytest.mark.parametrize("name", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_sparse_is_the_whole_matrix(implementation, sparse: Tensor, name: str) -> None:
    block = (2, 5) if name in ("sparse_bsr", "sparse_bsc") else None
    x = sparse.to_sparse(layout=getattr(torch, name), blocksize=block)
    assert_measured_as(implementation, x, sparse)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradient_of_an_update_is_the_whole_gradient(implementation) -> None:
    device = implementation.device
    before = torch.ones(5, 2, device=device)
    after = before.clone()
    after[1] = 2
    rows = torch.ones(2, 2)
    grad = torch.sparse_coo_tensor([[1, 3]], rows, (5, 2), check_invariants=True).to(device)
    log = implementation.open()
    log.add_update(before, after, grad)
    assert log.take().wait().updates.tolist() == [[4, 2]]


def test_complex_is_its_real_and_imaginary_parts(implementation) -> None:
    x = torch.randn(6, 7, dtype=torch.complex64)
    for view in (x, x.t(), x.conj(), x.mT.conj()):
        assert_measured_as(implementation, view, view.resolve_conj())


def test_negative_view_is_negated(implementation) -> None:
    x = torch.randn(50, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert_measured_as(implementation, x, x.resolve_neg())


def test_parameters_and_harmless_subclasses_are_plain(implementation) -> None:
    class Named(Tensor):
        """A tensor with another name."""

    x = torch.randn(9)
    assert_measured_as(implementation, nn.Parameter(x), x)
    numbers = numbers_of(x)
    named = x.to(implementation.device).as_subclass(Named)
    assert_row(measure(implementation, named).rows[0], numbers)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_is_all_its_parts(implementation) -> None:
    parts = [torch.randn(2, 3), torch.randn(5, 3), torch.randn(1, 3)]
    numbers = numbers_of(torch.cat([part.flatten() for part in parts]))
    device = implementation.device
    moved = [part.to(device) for part in parts]
    strided = torch.nested.nested_tensor(moved)
    jagged = torch.nested.nested_tensor(moved, layout=torch.jagged)
    for nested in (strided, strided.transpose(1, 2), jagged, jagged.transpose(1, 2)):
        assert_row(measure(implementation, nested, ALL).rows[0], numbers)
        assert_row(measure(implementation, nested).rows[0], numbers)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_with_holes_is_only_its_parts(implementation) -> None:
    device = implementation.device
    values = torch.arange(60.0, device=device).view(2, 10, 3)
    starts, lengths = torch.tensor([0, 4], device=device), torch.tensor([2, 3], device=device)
    nested = torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged)
    expected = numbers_of(torch.cat([values[0, 0:2], values[1, 4:7]]))
    assert_row(measure(implementation, nested).rows[0], expected)


def test_quantized_is_what_it_stands_for(implementation) -> None:
    if implementation.device.type != "cpu":
        pytest.skip("torch quantizes on the CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.quantize_per_tensor(torch.randn(20), 0.1, 3, torch.quint8)
    assert_measured_as(implementation, x, x.dequantize())


def test_mkldnn_is_its_dense_tensor(implementation) -> None:
    if implementation.device.type != "cpu":
        pytest.skip("mkldnn tensors are on the CPU")
    x = torch.randn(4, 5)
    assert_measured_as(implementation, x.to_mkldnn(), x)


def test_packed_float4_is_both_its_halves(implementation) -> None:
    x = torch.arange(256, dtype=torch.uint8, device=implementation.device)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]
    numbers = [values[half] for byte in range(256) for half in (byte & 15, byte >> 4)]
    got = measure(implementation, x.view(torch.float4_e2m1fn_x2), ALL)
    assert_row(got.rows[0], numbers)
    sketch, norm = exact_sketch(tuple(numbers))
    assert np.abs(got.sketches[0] - np.array(sketch)).max() <= 1e-6 * norm
    # The smallest normal number is 1, an eighth of the largest 0.75.
    tiny, huge = sum(abs(x) == 0.5 for x in numbers), sum(abs(x) > 0.75 for x in numbers)
    assert got.counts.tolist() == [[numbers.count(0), tiny, huge]]


@pytest.fixture(scope="module")
def mesh():
    """Give a mesh of one rank that talks to nobody."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtensor_is_its_local_shard(implementation, mesh) -> None:
    from torch.distributed.tensor import DTensor, Shard

    if implementation.device.type != "cpu":
        pytest.skip("the mesh is on the CPU")
    local = torch.randn(6, 4, requires_grad=True)
    numbers = numbers_of(local)
    spread = DTensor.from_local(local, mesh, [Shard(0)])
    for tensor in (spread, nn.Parameter(spread.detach())):
        assert_row(measure(implementation, tensor, ALL).rows[0], numbers)
    log = implementation.open()
    log.add_update(spread.detach(), spread.detach() * 2, spread.detach())
    assert_row(log.take().wait().rows[0], numbers)


def test_collective_on_its_way_is_waited_for(implementation) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    x = torch.randn(6, 4)
    numbers = numbers_of(x)
    tensor = AsyncCollectiveTensor(x.to(implementation.device))
    assert_row(measure(implementation, tensor, ALL).rows[0], numbers)


class Wrapper(Tensor):
    """A tensor that holds its numbers somewhere else."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_unknown_subclass_is_named(implementation) -> None:
    with pytest.raises(UnsupportedTensor, match=r"A `Wrapper` holds no numbers"):
        measure(implementation, Wrapper(torch.zeros(3)))


def test_fake_tensor_is_named(implementation) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(3))
    with pytest.raises(UnsupportedTensor, match=r"A `FakeTensor` holds no numbers"):
        measure(implementation, fake)


def test_lazy_parameter_is_named(implementation) -> None:
    with pytest.raises(UnsupportedTensor, match=r"`UninitializedParameter` holds no numbers"):
        measure(implementation, nn.LazyLinear(3).weight)


def test_meta_tensor_is_named(implementation) -> None:
    with pytest.raises(UnsupportedTensor, match="on the meta device has a shape and no values"):
        measure(implementation, torch.zeros(3, device="meta"))


def test_tensor_inside_a_transform_is_named(implementation) -> None:
    x = torch.zeros(3, 4, device=implementation.device)

    def look(row: Tensor) -> Tensor:
        with pytest.raises(UnsupportedTensor, match=r"inside `torch.func`"):
            measure(implementation, row)
        return row.sum()

    torch.vmap(look)(x)
    torch.func.grad(look)(x[0])


@pytest.mark.parametrize("name", ["uint4", "int4", "uint1"])
def test_dtype_that_torch_does_not_compute_with_is_named(implementation, name: str) -> None:
    x = torch.empty(4, dtype=getattr(torch, name), device=implementation.device)
    with pytest.raises(UnsupportedTensor, match=rf"torch\.{name} is not measured.*Unpack"):
        measure(implementation, x)


def test_sparse_complex_is_named(implementation) -> None:
    x = torch.eye(3, dtype=torch.complex64).to_sparse().to(implementation.device)
    with pytest.raises(UnsupportedTensor, match=r"sparse tensor of torch.complex64"):
        measure(implementation, x)


@pytest.mark.parametrize("offset", [0, 10])
def test_freed_memory_is_named_and_not_read(implementation, offset: int) -> None:
    x = torch.randn(100, device=implementation.device)
    view = x[offset:]
    x.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensor, match="was freed"):
        measure(implementation, view)
    with pytest.raises(UnsupportedTensor, match="was freed"):
        implementation.open().add_update(view, view)


def test_another_device_is_named() -> None:
    from hookline.stats.anywhere import TorchLog

    with pytest.raises(UnsupportedTensor, match=r"given one on `cpu`.*open_log\('cpu'\)"):
        TorchLog("cuda").add(torch.zeros(3))


def test_a_tensor_that_is_refused_takes_no_number(implementation) -> None:
    log = implementation.open()
    with pytest.raises(HooklineError):
        log.add(torch.zeros(3, device="meta"), ALL)
    assert log.add(torch.zeros(3, device=implementation.device)) == 0
    got = log.take().wait()
    assert (len(got.rows), len(got.sketched), len(got.counted)) == (1, 0, 0)


def test_nothing_is_copied_where_memory_holds_the_numbers() -> None:
    x = torch.randn(4, 5, 6)
    expanded = torch.randn(4, 1, 6).expand(4, 7, 6)
    for view in (x, x.permute(2, 0, 1), x[2:], x.mT, expanded, expanded.mT[1:]):
        prepared = prepare(view, shortest_run=1)
        assert prepared.values.data_ptr() == view.data_ptr()
        assert prepared.values.numel() * prepared.repeats == view.numel()
    columns = torch.randn(8, 64)[:, 10:40]
    assert prepare(columns, shortest_run=30).run == (30, 64)
    assert prepare(columns, shortest_run=30, ordered=True).values.data_ptr() == columns.data_ptr()
    assert prepare(columns).values.is_contiguous()
    assert prepare(columns, shortest_run=31).run is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60)), max_size=4), st.booleans())
def test_layout_finds_the_elements_that_strides_name(
    dims: list[tuple[int, int]], ordered: bool
) -> None:
    shape, strides = tuple(size for size, _ in dims), tuple(step for _, step in dims)
    places = torch.arange(1000).as_strided(shape, strides).flatten().tolist()
    layout = find_layout(shape, strides, ordered)
    if layout.is_dense:
        found = list(range(len(places) // layout.repeats)) * layout.repeats
    elif layout.run is not None:
        inner, step = layout.run
        count = len(places) // layout.repeats // inner
        found = [run * step + i for run in range(count) for i in range(inner)] * layout.repeats
    else:
        return
    assert found == places if ordered else sorted(found) == sorted(places)
