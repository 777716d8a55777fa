"""What two runs are compared by: the values of a step in the order in which they were made.

A trace knows no model. It has sites, each a value at the border of a module that ran, or what
belongs to such a value or to a parameter; and for each step the numbers that were measured there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline._trees import Path

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

KINDS = (
    "value",
    "gradient",
    "parameter",
    "buffer",
    "parameter gradient",
    "update",
    "overwritten",
)
"""What a site of a trace can be; `overwritten` is an input of a module after this wrote into it."""


@dataclass(frozen=True, slots=True)
class TraceSite:
    """Say what one site of a trace is, and how it hangs together with others."""

    id: int
    """Its number: 0, 1, 2, ... in the order of first meeting, which is that of execution."""

    kind: str
    """One of `KINDS`."""

    address: str
    """Its address without the visit: `blocks.5.mlp.act:output.grad`, `wte.weight`."""

    module: str
    """The path of its module, without wrappers; the root is empty."""

    port: str
    """`input` or `output` of a value and its gradient, `parameter` or `buffer` of the rest."""

    leaf: Path = ()
    """Where in a nested value it is; of a parameter or buffer, its name in the module."""

    visit: int = 0
    """Which execution of the module in the step it belongs to, from 0."""

    type: str = ""
    """The class of the module."""

    caller: str | None = None
    """The path of the module whose forward called this one; None: the root, or called outside."""

    dtype: str = ""
    """The element type, such as `bfloat16`."""

    shape: tuple[int, ...] = ()
    """The shape, of the whole tensor where it is spread over ranks."""

    requires_grad: bool | None = None
    """Whether a gradient is wanted of it; None where it was made without grad."""

    same_as: int | None = None
    """The site whose very tensor this is, met earlier; what was measured there holds here."""

    of: int | None = None
    """The value or the parameter that a gradient or an update belongs to."""

    is_part: bool = False
    """Whether a gradient is the part that this module alone sends to its input."""

    source: str = ""
    """Where the class of the module is written: `model.py:48`."""

    more: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else JSON can hold."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """Say what one module of a model is, as far as two of them can be compared by it."""

    type: str
    """Its class."""

    is_torch: bool = False
    """Whether the class is torch's own."""

    training: bool = False
    """Whether it was in training."""

    config: Mapping[str, str] = field(default_factory=dict)
    """Its plain attributes as text: `eps` is `1e-05`; hooks of others under `hooks`."""

    names: tuple[str, ...] = ()
    """All its paths."""

    source: str = ""
    """Where its class is written."""

    is_known: bool = True
    """Whether more than its class is known."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Say what a trace was made of."""

    title: str = ""
    """How to call it in a sentence: the folder, or the class of the model."""

    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    """The modules by path."""

    ties: Sequence[tuple[str, ...]] = ()
    """Parameters that have several names."""

    autocast: str = ""
    """The dtype of autocast when the model was called; empty where it was off."""

    has_tf32: bool = False
    """Whether float32 products were allowed to use TF32."""

    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, devices, settings."""

    is_known: bool = True
    """Whether ties, autocast and TF32 are known."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """What was measured in one step, row i of site i."""

    rows: npt.NDArray[np.float64]
    """The eight statistics of `hookline.stats.rows`, [sites, 8]; all NaN where none."""

    sketches: npt.NDArray[np.float32]
    """The sketches, [sites, 64]; all NaN where none."""

    @property
    def is_there(self) -> npt.NDArray[np.bool_]:
        """Tell which sites were measured."""
        return ~np.isnan(self.rows[:, 0])


class Trace(ABC):
    """One run, or one step of a model, as it can be compared."""

    facts: TraceFacts
    """What it was made of."""

    sites: Sequence[TraceSite]
    """Its sites by number."""

    unrepeated: Set[int] = frozenset()
    """The sites known to be others when the step is run again from the same random states."""

    @property
    @abstractmethod
    def steps(self) -> Sequence[int]:
        """The numbers of its steps."""

    @abstractmethod
    def measurements(self, step: int) -> Measurements:
        """Give what was measured in a step; a site that is `same_as` another has its numbers."""

    def tensor(self, site: int, step: int) -> Tensor | None:
        """Give the whole tensor of a site, on the CPU, if it was kept; read when asked for."""
        return None

    def known_gap(self, site: int, other: Trace, other_site: int) -> tuple[float, float] | None:
        """Give how far a site is from one of another trace, where that was measured as it flowed.

        The norm of the difference, and that of the other.
        """
        return None

    def has_tensors(self, step: int) -> bool:
        """Tell whether tensors of a step may be there; where not, none is asked for."""
        return True

    def floors(self) -> npt.NDArray[np.float64] | None:
        """Give for each site how far rounding alone moves it, relative; None: not measured."""
        return None
