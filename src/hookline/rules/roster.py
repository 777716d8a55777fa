"""The sites of a training by what they are, as arrays that rules can compute with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from hookline.runs import SiteFacts
from hookline.runs.step_sources import Flags, Floats, Integers

_LARGEST = {
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}
_SMALLEST_NORMAL = {
    "float16": 2.0**-14,
    "float8_e4m3fn": 2.0**-6,
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e5m2": 2.0**-14,
    "float8_e5m2fnuz": 2.0**-15,
}
_COARSE = {"float16", "bfloat16", *_LARGEST}


class Roster:
    """Arrays by site id. Made anew when sites are added, which is rare after the first step."""

    def __init__(self, sites: Sequence[SiteFacts]) -> None:
        self.sites = sites
        kinds = np.array([site.kind for site in sites], dtype=object)
        self.is_value: Flags = kinds == "value"
        """Outputs of modules."""
        self.is_gradient: Flags = kinds == "gradient"
        """The gradients that reach these outputs."""
        self.is_parameter: Flags = kinds == "parameter"
        """Parameters before a step."""
        self.is_local_gradient: Flags = kinds == "local gradient"
        """What a rank computed of them, before they were reduced."""
        self.is_parameter_gradient: Flags = kinds == "parameter gradient"
        """The gradients that an optimizer is given."""
        self.is_update: Flags = kinds == "update"
        """The changes that an optimizer made."""
        self.size: Integers = np.array([math.prod(site.shape) for site in sites], np.int64)
        """How many elements the first value had."""
        self.dimensions: Integers = np.array([len(site.shape) for site in sites], np.int64)
        """How many dimensions it had."""
        self.largest: Floats = np.array([_LARGEST.get(one.dtype, np.inf) for one in sites])
        """The largest number of a narrow element type; infinity for the others."""
        self.smallest: Floats = np.array([_SMALLEST_NORMAL.get(one.dtype, 0.0) for one in sites])
        """The smallest normal number of a narrow element type; 0 for the others."""
        self.is_coarse: Flags = np.array([one.dtype in _COARSE for one in sites], bool)
        """Whether an element has too few digits to add small updates to."""
        trainable = [one.more.get("requires_grad", True) for one in sites]
        self.is_trainable: Flags = np.array(trainable, bool)
        """Whether a parameter can be trained."""
        self.is_table: Flags = np.array([_is_table(one) for one in sites], bool)
        """Whether a site is of a table to look up in."""

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def by_address(self) -> dict[str, int]:
        """The ids by address."""
        return {site.address: site.id for site in self.sites}

    @cached_property
    def gradient_of(self) -> Integers:
        """By id: the gradient of a value, of a parameter; -1 where there is none."""
        return self._pair(lambda one: one.address + (".grad" if one.kind == "value" else ":grad"))

    @cached_property
    def update_of(self) -> Integers:
        """By id: the update of a parameter; -1 where there is none."""
        return self._pair(lambda one: f"{one.address}:update")

    @cached_property
    def parameters(self) -> Integers:
        """The ids of the parameters."""
        return np.flatnonzero(self.is_parameter)

    @cached_property
    def matrices(self) -> Integers:
        """The ids of the parameters that can be trained and are no vectors, whatever their shape.

        A table of single numbers is a vector, too: biases of users, or of items.
        """
        return np.array(
            [
                number
                for number in self.parameters
                if self.dimensions[number] > 1
                and self.is_trainable[number]
                and not (self.is_table[number] and 1 in self.sites[number].shape)
            ],
            np.int64,
        )

    @cached_property
    def layer_matrices(self) -> Integers:
        """Those of `matrices` that are no tables to look up in; all where there is no other."""
        own = self.matrices[~self.is_table[self.matrices]]
        return own if len(own) else self.matrices

    @cached_property
    def usual_norm(self) -> Floats:
        """The norm that a weight of each shape usually begins with: a row of norm one each."""
        return np.sqrt([site.shape[0] if site.shape else 1 for site in self.sites])

    @cached_property
    def is_of_last_layer(self) -> Flags:
        """Whether a site is of the layer that ran last."""
        last = self.sites[self.layers[-1]].module if len(self.layers) else None
        return np.array([site.module == last for site in self.sites], bool)

    @cached_property
    def is_before_last_layer(self) -> Flags:
        """Whether a layer runs after a site: outputs of a model may be as extreme as targets."""
        last = self.layers[-1] if len(self.layers) else -1
        return np.asarray(np.arange(len(self)) < last)

    @cached_property
    def first_value(self) -> dict[str, int]:
        """The first output of each module, by its path."""
        found: dict[str, int] = {}
        for number in np.flatnonzero(self.is_value).tolist():
            found.setdefault(self.sites[number].module, number)
        return found

    @cached_property
    def value_beside(self) -> Integers:
        """By id: the first output of the site's module; the site itself where it has none."""
        found = [self.first_value.get(one.module, one.id) for one in self.sites]
        return np.array(found, np.int64)

    @cached_property
    def layers(self) -> Integers:
        """The outputs of the modules that have a weight matrix, in the order they ran in.

        Lookups in a table are left out: their scale is that of the table and not of a layer.
        """
        modules = {
            self.sites[number].module
            for number in self.parameters
            if self.dimensions[number] > 1 and not _is_table(self.sites[number])
        }
        found = [self.first_value[one] for one in modules if one in self.first_value]
        return np.array(sorted(found), np.int64)

    @cached_property
    def tables(self) -> Integers:
        """The outputs of the tables to look up in that can be trained, in the order they ran in."""
        modules = {self.sites[one].module for one in self.matrices if self.is_table[one]}
        found = [self.first_value[one] for one in modules if one in self.first_value]
        return np.array(sorted(found), np.int64)

    @cached_property
    def gradients_of_layers(self) -> Integers:
        """The gradients that reach the layers, in the layers' order, of those that have one."""
        gradients = self.gradient_of[self.layers] if len(self.layers) else self.layers
        return np.asarray(gradients[gradients >= 0])

    def _pair(self, name: object) -> Integers:
        assert callable(name)
        found = [self.by_address.get(name(one), -1) for one in self.sites]
        return np.array(found, np.int64)


def _is_table(site: SiteFacts) -> bool:
    return "Embedding" in site.type
