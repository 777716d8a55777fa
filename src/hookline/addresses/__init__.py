"""Say where a value is: addresses, patterns, and what they name in a model.

    address.py   the text of an address and its parts
    inside.py    names inside a forward: variables and operations
    pattern.py   path patterns as regular expressions
    bracket.py   `[0-11]`, `[1,3,5]` and `[!abc]` in a pattern
    names.py     the canonical names of modules and parameters
    resolve.py   from a selector to the sites of a model
    variables.py from a name inside forward to the variables there
    bytecodes.py which operations stand behind a variable that has no source
    nearest.py   the errors that say what is near

Knows no hooks.
"""

from __future__ import annotations

from hookline.addresses.address import (
    PARAMETER_PORTS,
    Address,
    format_leaf,
    format_parameter,
    format_place,
    parse,
    parse_leaf,
)
from hookline.addresses.inside import Inside, is_inside, parse_port
from hookline.addresses.names import ModuleEntry, ModuleTree, ParameterEntry, unwrap
from hookline.addresses.resolve import Selection, Selector, Site, port, resolve

__all__ = [
    "PARAMETER_PORTS",
    "Address",
    "Inside",
    "ModuleEntry",
    "ModuleTree",
    "ParameterEntry",
    "Selection",
    "Selector",
    "Site",
    "format_leaf",
    "format_parameter",
    "format_place",
    "is_inside",
    "parse",
    "parse_leaf",
    "parse_port",
    "port",
    "resolve",
    "unwrap",
]
