"""How a gradient reaches a course without a bit of the model's gradients changing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from hookline._torch import add_tensor_hook
from hookline.hooks.caution import Way, choose_way, maker_of
from hookline.hooks.gradients import NodeRelay, witness_of

if TYPE_CHECKING:
    from hookline.recordings.listening import TraceListener


class Ear:
    """Serve as the hook of a tensor whose gradient is of a site."""

    __slots__ = ("epoch", "listener", "site")

    def __init__(self, listener: TraceListener, site: int) -> None:
        self.listener = listener
        self.site = site
        self.epoch = listener.session.epoch

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None and self.listener.session.epoch is self.epoch:
            self.listener.on_total(self.site, grad)


class ViewEar(Ear):
    """Do so for a view, as long as its memory is not changed: then a hook hears of a part."""

    __slots__ = ("version", "witness")

    def __init__(self, listener: TraceListener, site: int, view: Tensor) -> None:
        super().__init__(listener, site)
        self.version = view._version
        self.witness = witness_of(view)

    @property
    def is_changed(self) -> bool:
        """Whether the memory of the view was changed since."""
        return self.witness._version != self.version

    def __call__(self, grad: Tensor | None) -> None:
        if not self.is_changed:
            super().__call__(grad)


def hear(listener: TraceListener, site: int, tensor: Tensor, module: nn.Module | None) -> bool:
    """Have the gradient of a tensor told; false where that could change it."""
    if not (tensor.is_leaf or tensor._is_view()):  # the short way of most
        add_tensor_hook(tensor, Ear(listener, site))
        return True
    way = choose_way(tensor, {}, module=module, hooks_views=True)
    if way is Way.HOOK:
        add_tensor_hook(tensor, Ear(listener, site))
    elif way is Way.NODE:
        maker = maker_of(tensor, module)
        assert maker is not None
        maker.register_prehook(NodeRelay(Ear(listener, site)))
    elif way is Way.VIEW:
        ear = ViewEar(listener, site, tensor)
        add_tensor_hook(tensor, ear)
        listener.course.views.append(ear)
    return way is not Way.NONE
