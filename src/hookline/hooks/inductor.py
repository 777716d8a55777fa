"""Keep what the compiler makes of a model the same as without hookline's operators in its graph.

Inductor decides by who reads a value whether backward keeps it or makes it again, and whether it is
written to memory, and rounded, or only flows through a kernel. One reader more can turn such a
decision, and with it the last bits of a training. So the operators are out of the way while a graph
is parted into forward and backward, and what is not written to memory is copied for them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import sys
from typing import Any

import torch
from torch import fx

from hookline._compiler import has_inductor
from hookline.hooks.fusion import (
    fuse_the_others,
    mark_copy,
    sort_the_others,
    tune_the_others,
)
from hookline.hooks.sparing import spare_searches
from hookline.hooks.together import LOOKING, VALUE, is_looking, show_together

_OTHER = 3
"""What can stand among the arguments of a call where the value does, meanwhile."""
_WITH_PYTHON = ("pass_by", "pass_all", "hand_over", "hand_back", "hand_in", "carry", "note")
"""The operators that need Python every time; what a CUDA graph replays has none."""

_MADE = "hookline_made"
"""What tells that a node was made again for the operators alone."""

_MAKE = "hookline 9"
"""What torch's caches of compiled graphs know this by: another one whenever it parts otherwise."""

Parts = tuple[fx.GraphModule, fx.GraphModule]
"""The graphs of forward and of backward."""


def keep_decisions() -> None:
    """Have the graph that is being traced compiled as if nobody looked at its values.

    Called while a call of an operator is traced; does nothing where inductor is not at work.
    """
    if is_inductor():
        spare_searches()
        config = _config()
        if config.custom_partitioner_fn is None:  # another one that the user has set stays
            config.custom_partitioner_fn = _make_partitioner()
        _copy_unwritten()
        _count_other_readers()
        _match_other_readers()
        fuse_the_others()
        sort_the_others()
        tune_the_others()
        _part_replays(config)


def _part_replays(config: Any) -> None:
    """Have the operators run between CUDA graphs, and not be recorded in them.

    It stays so: a backward is compiled when it first runs.
    """
    if not config.triton.cudagraphs:
        return
    known = getattr(config, "custom_should_partition_ops", None)
    missing = [one for one in map("hookline::{}".format, _WITH_PYTHON) if one not in (known or ())]
    if known is not None and missing:
        config.custom_should_partition_ops = [*known, *missing]


def is_inductor() -> bool:
    """Tell whether it is inductor that has the graph traced, and no other backend."""
    settings = sys.modules.get("torch._functorch.config")
    return has_inductor() and bool(getattr(settings, "unlift_effect_tokens", True))


def _leave_others() -> None:
    """Take no other graph: settings are a part of what inductor knows compiled graphs by."""
    config = _config()
    if config.custom_partitioner_fn is _make_partitioner():
        config.custom_partitioner_fn = None


def _config() -> Any:
    return sys.modules["torch._inductor.config"]


@functools.cache
def _make_partitioner() -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """Part the graph that was traced, as inductor does."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Parts:
            _leave_others()
            is_replayed = bool(_config().triton.cudagraphs)
            return part_undisturbed(gm, joint_inputs, is_replayed=is_replayed, **options)

        def uuid(self) -> str:
            return _MAKE

        def __reduce__(self) -> Any:  # the keys of inductor's caches hold it pickled
            return _make_partitioner, ()

    return Partitioner()


def part_undisturbed(
    joint: fx.GraphModule, inputs: Any, *, is_replayed: bool = False, **options: Any
) -> Parts:
    """Part a graph of forward and backward where it would be parted without the operators."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.joint_graph import early_patterns

    tokens = _count_tokens(joint.graph)
    static = options.pop("static_lifetime_input_indices", None)
    if static is not None:
        options["static_lifetime_input_indices"] = [at + tokens for at in static]

    def part(one: fx.GraphModule) -> Parts:
        return min_cut_rematerialization_partition(one, inputs, **options)

    if not any(map(is_looking, joint.graph.nodes)):
        return part(joint)
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)  # done again later, when names have to stay
    before = copy.deepcopy(joint.graph)
    known = {node.name: node for node in before.nodes}
    values = {
        node.name: known[node.args[VALUE].name]
        for node in joint.graph.nodes
        if is_looking(node) and node.args[VALUE].op != "placeholder"
    }
    _set_aside(joint.graph, values)
    joint.graph.eliminate_dead_code()  # what only the operators were shown
    early_patterns.apply(joint.graph)  # views of views, of which the operators were shown some
    parts = part(joint)
    if all(_put_back(one.graph, values) for one in parts):
        for one in parts:
            show_together(one.graph, is_replayed=is_replayed)
            one.recompile()
        return parts
    return part(fx.GraphModule(joint, before))


def _count_tokens(graph: fx.Graph) -> int:
    """Tell how many inputs at the front are there for the operators' order alone.

    Inputs are known by numbers in which torch forgets them. Where the model has effects of its own
    that is so without the operators too.
    """
    nodes = [node for node in graph.nodes if node.target is torch.ops.higher_order.with_effects]
    if not all(map(is_looking, nodes)):
        return 0
    tokens = {node.args[0] for node in nodes}
    given = [node for node in graph.nodes if node.op == "placeholder"]
    return sum(1 for _ in itertools.takewhile(tokens.__contains__, given))


def _set_aside(graph: fx.Graph, values: dict[str, fx.Node]) -> None:
    """Take the values from the operators, and put these before everything else.

    What is left to them, keys and tickets and the order among them, parts them as it should.
    """
    moved = dict.fromkeys(node for node in graph.nodes if node.op == "placeholder")
    last = list(moved)[-1]
    for node in list(graph.nodes):
        if node.name in values:
            node.update_arg(VALUE, node.args[_OTHER])
        if _is_ours(node) and all(one in moved for one in node.all_input_nodes):
            last.append(node)
            last = node
            moved[node] = None


def _put_back(graph: fx.Graph, values: dict[str, fx.Node]) -> bool:
    """Give the operators their values again, and a place after them; tell whether that is done."""
    own = [node for node in graph.nodes if _is_ours(node)]
    others = [node for node in graph.nodes if not _is_ours(node)]
    order = {node: index for index, node in enumerate(others)}
    names = {node.name: node for node in graph.nodes}
    at = sum(node.op == "placeholder" for node in others) - 1
    last = dict(enumerate(others))
    """What stands last of all that comes after one of the others."""
    for node in own:
        made: list[fx.Node] = []
        if node.name in values:
            value = _find(values[node.name], graph, names, made)
            if value is None:
                return False
            node.update_arg(VALUE, value)
        if any(user not in own and user.op != "output" for user in node.users):
            return False
        needed = [one for new in (node, *made) for one in new.all_input_nodes]
        at = max(at, *(order.get(one, 0) for one in needed), 0)
        for one in (*made, node):
            last[at].append(one)
            last[at] = one
    return True


def _is_ours(node: fx.Node) -> bool:
    """Tell whether a node calls one of the operators, or is a part of what that gives."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_looking(node.args[0])
    return is_looking(node)


def _find(
    node: fx.Node, graph: fx.Graph, names: dict[str, fx.Node], made: list[fx.Node]
) -> fx.Node | None:
    """Find a node of the graph that was parted, or make it again from those that are there.

    So is what only the operators need, a view mostly. What cannot be had in this part is None.
    """
    known = names.get(node.name)
    if known is not None:
        return known
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return None
    inputs = {one: _find(one, graph, names, made) for one in node.all_input_nodes}
    if None in inputs.values():
        return None
    copied = names[node.name] = graph.node_copy(node, inputs.__getitem__)
    copied.meta[_MADE] = True
    made.append(copied)
    return copied


@functools.cache
def _copy_unwritten() -> None:
    """Have a value that is not written to memory copied for the operators, and not itself written.

    To whoever else reads it, it is what it is without them: it flows on as it was computed.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def write(value: Any) -> Any:
        data = value.data
        while isinstance(data, ir.BaseView):
            data = data.data
        if isinstance(data, ir.StorageBox) and isinstance(data.data, ir.Pointwise):
            value = lowering.clone(value)
            value.realize()
            mark_copy(value.data.data)
        return value

    def lower(called: Any, hidden: Any, *others: Any) -> Any:
        _leave_others()  # a graph without backward is not parted
        value = hidden.value if isinstance(hidden, _Hidden) else hidden
        value = list(map(write, value)) if isinstance(value, list) else write(value)
        given = lowering.fallback_handler(called, add_to_fallback_set=False)(value, *others)
        if called._opname in ("pass_by", "pass_all") and not V.graph.cpp_wrapper:
            # Nobody else has to see the call, and torch's way to it takes half of its time.
            made: Any = V.graph.operations[-1]
            made.python_kernel_name = f"torch.ops.hookline.{called._opname}.run"
        return given

    order = lowering.lowerings[torch.ops.higher_order.with_effects]
    own = [getattr(torch.ops.hookline, name).default for name in (*LOOKING, "pass_all")]

    @functools.wraps(order)
    def put_in_order(token: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        if called not in own:
            return order(token, called, *args, **kwargs)
        begin, after = len(V.graph.operations), V.graph.additional_star_deps
        # Torch 2.15 has all that goes to operators with effects written to memory.
        given = order(token, called, _Hidden(args[0]), *args[1:], **kwargs)
        for made in V.graph.operations[begin:]:
            # Torch notes by the name of a result what it looks up by that of an operation. A copy
            # has no order: it may be made in one kernel with others.
            if isinstance(made, ir.FallbackKernel):
                after[made.get_operation_name()] |= after[made.get_name()]
        return given

    lowering.lowerings[torch.ops.higher_order.with_effects] = put_in_order
    # Copied when it is shown: by then the model itself may have had it written to memory.
    look = lowering.register_lowering(torch.ops.hookline.look.default, type_promotion_kind=None)
    look(lambda value: value)
    for called in own:
        lowered = functools.wraps(lower)(functools.partial(lower, called))
        lowering.register_lowering(called, type_promotion_kind=None)(lowered)


@functools.cache
def _count_other_readers() -> None:
    """Have inductor decide by a value's readers in the model whether it is written to memory."""
    from torch._inductor.graph import GraphLowering

    run = GraphLowering.run_node

    @functools.wraps(run)
    def run_node(self: Any, n: fx.Node) -> Any:
        readers = dict(n.users)
        for one in readers:
            if _is_look(n) or _is_for_looks(one):
                del n.users[one]
        try:
            return run(self, n)
        finally:
            n.users.clear()
            n.users.update(readers)

    setattr(GraphLowering, "run_node", run_node)  # noqa: B010


@functools.cache
def _match_other_readers() -> None:
    """Have inductor's passes find what they look for also where the operators read a part of it.

    What a pass puts in the place of a value is shown; what it needs no more stays for them alone.
    Passes over frozen weights have no place for it: they fold what follows into what made it.
    """
    from torch._inductor.freezing_utils import _freezing_active
    from torch._inductor.pattern_matcher import _TargetExpr

    match = _TargetExpr._match_users

    @functools.wraps(match)
    def match_users(self: Any, node: fx.Node, ctx: Any) -> bool:
        if match(self, node, ctx):
            return True
        if _freezing_active():
            return False
        others = [one for one in node.users if not _is_for_looks(one)]
        return len(others) < len(node.users) and len(others) == self.users

    setattr(_TargetExpr, "_match_users", match_users)  # noqa: B010


class _Hidden:
    """What holds a value where only its reader finds it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_look(node: fx.Node) -> bool:
    return node.target is torch.ops.hookline.look.default


def _is_for_looks(node: fx.Node, steps: int = 3) -> bool:
    """Tell whether what a node computes is only shown, as it is or after a few steps more."""
    if _is_look(node) or _MADE in node.meta:
        return True
    readers = node.users
    return bool(readers) and steps > 0 and all(_is_for_looks(one, steps - 1) for one in readers)
