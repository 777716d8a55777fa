"""The sites of an extraction, and what is kept of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hookline._ranks import own_class
from hookline.addresses import ModuleTree, resolve
from hookline.captures.spreading import gather
from hookline.extractions.selecting import Reduce, check_reduce, name_reduce

Sites = str | Iterable[str] | Mapping[str, Reduce]


class SiteChoice:
    """Which values of a model are kept, and how."""

    def __init__(self, model: nn.Module, sites: Sites, reduce: Any = None) -> None:
        given = {sites: reduce} if isinstance(sites, str) else sites
        if not isinstance(given, Mapping):
            given = dict.fromkeys(given, reduce)
        elif reduce is not None:
            given = {site: reduce if own is None else own for site, own in given.items()}
        if not given:
            raise ValueError(
                "name at least one site, such as `layers.3`; `hl.sites(model)` lists all"
            )
        self.where = list(given)
        """Addresses and patterns as they were given."""
        tree = ModuleTree(model)
        # A value that two of them name is kept as the later one says.
        self._reduce: dict[str, Any] = {}
        for where, one in given.items():
            check_reduce(one)
            self._reduce |= {site.address: one for site in resolve(tree, where)}
        self._found: dict[str, Any] = {}

    def reduce_of(self, address: str) -> Any:
        """Give how the value at an address is reduced."""
        if address not in self._found:
            plain = address.split("#")[0]
            self._found[address] = next(
                reduce
                for site, reduce in self._reduce.items()
                if plain == site or (plain.startswith(site) and plain[len(site)] in ".[:")
            )
        return self._found[address]

    def facts(self) -> dict[str, Any]:
        """Describe it, so that two extractions can be compared."""
        return {address: name_reduce(reduce) for address, reduce in self._reduce.items()}


def name_model(model: nn.Module) -> dict[str, Any]:
    """Say which model it is, by what is quick to find out; spread over ranks, it is the same one.

    Of such a model every rank has to ask.
    """
    import hashlib

    # Compiled, it is the same model.
    model = getattr(model, "_orig_mod", model)
    digest = hashlib.sha256()
    count = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        plain = name.replace("_orig_mod.", "")
        digest.update(f"{plain} {tensor.dtype} {list(tensor.shape)}".encode())
        count += tensor.numel()
        digest.update(_probe(tensor))
    own = own_class(model)
    kind = f"{own.__module__}.{own.__qualname__}"
    return {"class": kind, "numbers": count, "digest": digest.hexdigest()[:16]}


def _probe(tensor: Tensor) -> bytes:
    """Give some of a tensor's own numbers."""
    if tensor.is_meta or not tensor.numel():
        return b""
    found: Any = tensor.detach()
    mesh = getattr(found, "device_mesh", None)
    if mesh is not None:  # parameters that rest on the host are gathered by devices
        found = found.to(mesh.device_type)
    flat = gather(found, is_full=True, keep_graph=False).flatten()
    some = flat[:: max(1, len(flat) // 8)][:9]
    return str(some.double().cpu().tolist() if not some.is_complex() else len(flat)).encode()
