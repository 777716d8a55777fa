"""What kind of module a class is, as far as its name and its parameters tell."""

from __future__ import annotations

from hookline.diffs.outlines import Outline

# The first that is in the lower-case name of a class names its family.
_FAMILIES = {
    "dropout": "dropout",
    "norm": "norm",
    "embed": "embedding",
    "attention": "attention",
    "attn": "attention",
    "gelu": "activation",
    "relu": "activation",
    "silu": "activation",
    "swish": "activation",
    "sigmoid": "activation",
    "tanh": "activation",
    "activation": "activation",
    "mlp": "feed forward",
    "feedforward": "feed forward",
    "ffn": "feed forward",
    "conv1d": "linear",
    "conv": "convolution",
    "linear": "linear",
    "dense": "linear",
    "pool": "pooling",
    "softmax": "softmax",
    "lstm": "recurrent",
    "gru": "recurrent",
    "rnn": "recurrent",
    "block": "block",
    "layer": "block",
}


def find_family(kind: str) -> str:
    """Give the family of a class by its name; empty where it is of none."""
    lower = kind.lower()
    return next((family for part, family in _FAMILIES.items() if part in lower), "")


def describe_parameters(outline: Outline, path: str) -> object:
    """Give the shapes of a module's own parameters, whichever way they lie; empty without any."""
    sites = outline.parameters(path).values()
    return tuple(sorted(tuple(sorted(outline.sites[site].shape)) for site in sites)) or ""


def are_of_one_kind(a: Outline, path_a: str, b: Outline, path_b: str) -> bool:
    """Tell whether two modules are of one class or family, or have parameters of equal shapes."""
    type_a, type_b = a.types[path_a], b.types[path_b]
    family = find_family(type_a)
    if type_a == type_b or (family and family == find_family(type_b)):
        return True
    parameters = describe_parameters(a, path_a)
    return parameters != "" and parameters == describe_parameters(b, path_b)


def can_be_of_one_kind(a: Outline, path_a: str, b: Outline, path_b: str) -> bool:
    """Tell whether two are of one kind; an unknown one goes with any that has children like it."""
    if are_of_one_kind(a, path_a, b, path_b):
        return True
    is_known = find_family(a.types[path_a]) and find_family(b.types[path_b])
    return not is_known and a.has_children(path_a) == b.has_children(path_b)
