"""One forward of a model with an example, for those who want to look at it.

The model, its buffers and the random states are afterwards as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree
from hookline.hooks.compiled import may_be_traced
from hookline.hooks.sessions import Session
from hookline.surveys.preserving import preserved


class ExampleRun:
    """A session to listen with, and the one forward it hears."""

    def __init__(self, model: nn.Module, tree: ModuleTree, caller: str) -> None:
        _refuse_uninitialized(tree)
        self._model = model
        self._tree = tree
        self._caller = caller
        self.session = Session(model, f"{caller}(...)", this_thread=True, is_eager=may_be_traced())
        self.session.follows_recompute = False

    def start(self, example: Any) -> None:
        """Run the model: on one value, a tuple of arguments, or a dict of keyword arguments."""
        args, kwargs = _arguments(example)
        with preserved([entry.module for entry in self._tree.entries]):
            self.session.open()
            try:
                self._model(*args, **kwargs)
            except Exception as error:
                error.add_note(
                    f"in the forward that {self._caller} ran with `example`; nothing is left of it"
                )
                raise
            finally:
                self.session.close()


def _arguments(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _refuse_uninitialized(tree: ModuleTree) -> None:
    for entry in tree.entries:
        for owned in (entry.module._parameters, entry.module._buffers):
            for name, tensor in owned.items():
                if tensor is not None and is_lazy(tensor):
                    path = f"{entry.names[0]}.{name}" if entry.names[0] else name
                    raise UnsupportedModel(
                        f"`{path}` is not initialized yet, and running the example would do it. "
                        "Run the model once first: model(example); or list without an example."
                    )
