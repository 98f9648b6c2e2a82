"""Counts products of matrices, convolutions and attention while something runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Flops(TorchDispatchMode):
    """Adds up torch's own formulas of the operations inside of ``with``.

    ``FlopCounterMode`` does so for every module apart, with hooks on their inputs, which fail where
    an input is a parameter.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Imported here because it brings triton along.
        from torch.utils.flop_counter import flop_registry

        self._formulas: Mapping[Any, Callable[..., int]] = flop_registry
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``, and count it if there is a formula."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=output)
        return output
