"""Which tensors of a forward pass provably do not come from its samples.

Positions are made from lengths, buffers and parameters; tokens come in through the arguments. A
``Provenance`` follows every operation of a pass and keeps the tensors that were made from nothing
but parameters, buffers, and functions that make tensors of numbers (``arange``, ``zeros``). Every
other tensor counts as the samples': arguments, and whatever came from outside of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TO_PYTHON = torch.ops.aten._local_scalar_dense.default
# Make tensors of a number: of which one, once a sample's number has gone to Python, is not known.
_FILLS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("full", "full_like", "new_full", "fill", "fill_", "scalar_tensor")
)


class Provenance(TorchDispatchMode):
    """Follows the operations inside of ``with``.

    known: parameters and buffers, which are not the samples'.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage: views share it, and what is written into one is in all. The values keep the
        # storages alive, so that no other one can get the same address.
        self._shared = {_storage(x): x for x in known if _storage(x) is not None}
        self._escaped = False  # whether a number of the samples' has become one of Python's

    def is_shared(self, x: Tensor) -> bool:
        """Return whether ``x`` provably does not come from the samples."""
        return _storage(x) in self._shared

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and note whether what it returns is of the samples."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        shared = all(map(self.is_shared, given))
        if func is _TO_PYTHON:
            self._escaped |= not shared
        if self._escaped and func.overloadpacket in _FILLS:
            shared = False
        if not shared and func._schema.is_mutable:
            self._forget(func, args, kwargs)
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and shared and _storage(x) is not None:
                self._shared[_storage(x)] = x
        return output

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let tensors that an operation has written the samples' values into be the samples'."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(given.get(argument.name)):
                    if isinstance(x, Tensor):
                        self._shared.pop(_storage(x), None)


def _storage(x: Tensor) -> int | None:
    try:
        address: int = x.untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors have none
