"""Parameters, gradients and updates of a recorded training, each with its sketch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.recordings.shards import find_shard, sketch_shard
from hookline.runs import SiteFacts
from hookline.stats import Log, Update
from hookline.watchers.weights import Weight, Weights

_STEPPED = (
    "the parameters were changed by hand before they could be recorded; end a step right after "
    "its backward pass with `recording.step()`"
)


class TraceWeights(Weights):
    """Measure what a watch does of weights, as sites of a trace.

    Where no optimizer steps, gradients are those at the end of the step.
    """

    keep: Callable[[int, Tensor], None] | None = None
    """What takes whole tensors, by the number of their site."""

    _versions: tuple[int, ...] | None = None
    """The versions of all weights when backward was over; None: it was not run."""

    _rest: dict[int, int] | None = None
    """The versions of those that no optimizer steps, as they were measured."""

    def note_backward(self, *, is_last: bool) -> None:
        if is_last:
            self._measure_rest()
        else:
            self._versions = self._read_versions()

    def end_step(self) -> None:
        versions, self._versions = self._versions, None
        if self._measured or versions == self._read_versions():
            self._measure_rest()
        elif versions:
            self._recorder.unmeasured.setdefault("parameters", _STEPPED)

    def _read_versions(self) -> tuple[int, ...]:
        return tuple([one.parameter._version for one in self._find_all().values()])

    def _find_all(self) -> dict[int, Weight]:
        if self._rest is None:
            self._rest = {}
            self._walk()
        return self._all

    def _measure_rest(self) -> None:
        """Measure the weights that no optimizer has stepped, if something about them is new."""
        try:
            everything = self._find_all()
            assert self._rest is not None
            left = []
            for key, one in everything.items():
                version = -1 if one.parameter.is_inference() else one.parameter._version
                has_grad = one.parameter.grad is not None
                if key not in self._measured and (has_grad or self._rest.get(key) != version):
                    self._rest[key] = version
                    left.append(one)
            self._measured.update(id(one.parameter) for one in left)
            with torch.no_grad():
                self._measure_all([(one, "", one.parameter.detach()) for one in left])
                self._measure_all(
                    [
                        (one, "grad", one.parameter.grad.detach())
                        for one in left
                        if one.parameter.grad is not None
                    ]
                )
        except Exception as error:
            self._recorder.guard.take(error)

    def _measure_updates(self, updates: Sequence[tuple[int, int, Update]]) -> None:
        for site, _, (before, after, _) in updates:
            update = after - before
            self._measure_one(site, update)
            if self.keep is not None:
                self.keep(site, update)

    def _measure_all(
        self, values: Sequence[tuple[Weight, str, Tensor]]
    ) -> list[tuple[int, Log] | None]:
        if any(find_shard(value) is not None for _, _, value in values):
            found = [self._measure_one(self._site(*one), one[2]) for one in values]
        else:
            found = super()._measure_all(values)
        if self.keep is not None:
            for one, part, value in values:
                self.keep(one.ids[part], value)
        return found

    def _measure_one(self, site: int, value: Tensor) -> tuple[int, Log] | None:
        shard = find_shard(value)
        if shard is None:
            return self._recorder.measure_now(site, value)
        return self._recorder.measure_part(site, shard.local, sketch_shard(shard))

    def _describe(self, one: Weight, part: str, number: int, value: Tensor) -> SiteFacts:
        facts = super()._describe(one, part, number, value)
        more: dict[str, Any] = {
            "port": "parameter",
            "visit": 0,
            "leaf": [one.name.rpartition(".")[2]],
        }
        if part:
            more["of"] = one.ids[""]
        else:
            more["requires_grad"] = one.parameter.requires_grad
        shard = find_shard(value)
        if shard is not None:
            more["shard"] = shard.facts()
        return replace(facts, more=more)
