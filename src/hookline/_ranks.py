"""The private corners of torch where a model is spread over ranks: DDP, FSDP2, DTensors.

As in `_torch.py`, each has a test of its own. Knows nothing of hookline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def count_ranks() -> int:
    """Tell how many processes the default process group has; 0 where there is none."""
    known: Any = sys.modules.get("torch.distributed")
    if known is None or not known.is_available() or not known.is_initialized():
        return 0
    ranks: int = known.get_world_size()
    return ranks


def is_ddp(module: nn.Module) -> bool:
    """Tell whether a module is a `DistributedDataParallel`."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


def active_ddp() -> nn.Module | None:
    """Give the `DistributedDataParallel` whose forward is under way; None outside of one."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def is_of_ddp(ddp: Any, parameter: Tensor) -> bool:
    """Tell whether a `DistributedDataParallel` reduces the gradients of a parameter."""
    return any(one is parameter for one in ddp._module_parameters)


def will_reduce(ddp: Any) -> bool:
    """Tell whether it reduces in the backward of its latest forward, which was in no `no_sync`."""
    is_synchronised: bool = ddp.require_forward_param_sync
    return is_synchronised


def fsdp_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Give what `fully_shard` manages in a model: module, name of the parameter, who manages it."""
    sharded: Any
    for sharded in filter(_is_sharded, model.modules()):
        state = sharded._get_fsdp_state()
        # Torch 2.13 may have several groups at one module.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for one in () if group is None else group.fsdp_params:
                info = one._module_info
                yield info.module, info.param_name, one
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                yield from ((place, name, one) for place, name in shared)


def sharded_of(manager: Any) -> Tensor:
    """Give the part of a parameter that this rank has, as `fully_shard` keeps it."""
    sharded: Tensor = manager.sharded_param
    return sharded


def whole_of(manager: Any) -> Tensor | None:
    """Give the whole of it that forward and backward work with; None before the first forward."""
    whole: Tensor | None = getattr(manager, "_unsharded_param", None)
    return whole


def is_spread(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor."""
    known = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return known is not None and isinstance(tensor, known)


def is_fully_sharded(model: nn.Module) -> bool:
    """Tell whether `fully_shard` was applied to a model or to modules of it."""
    return any(map(_is_sharded, model.modules()))


def own_class(model: nn.Module) -> type[nn.Module]:
    """Give the class of a model as it was before `fully_shard` put one before it."""
    kinds = type(model).__mro__
    return kinds[getattr(model, "_orig_cls_mro_index", 2) if _is_sharded(model) else 0]


def reset_sharding(model: nn.Module) -> None:
    """Have what `fully_shard` was applied to as before a forward, after one that did not end."""
    for module in _sharded_roots(model):
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        else:
            _reset_older_sharding(module._get_fsdp_state())


def _is_sharded(module: nn.Module) -> bool:
    known = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return known is not None and isinstance(module, known)


def _sharded_roots(model: nn.Module) -> list[Any]:
    """Give the modules whose forward came first, of those that are sharded; none before it."""
    found: list[Any] = [one for one in model.modules() if _is_sharded(one)]
    return [one for one in found if one._get_fsdp_state()._is_root]


def _reset_older_sharding(root: Any) -> None:
    """Do what torch 2.13 has a method for."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    root._comm_ctx.all_gather_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        group = state._fsdp_param_group
        if group is not None:
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()  # of what was fetched ahead
            group.reshard()
    root._state_ctx.iter_forward_root = None
