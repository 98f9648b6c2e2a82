"""Damping of linear systems, one number for each client, and what became of them."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.checks import check_finite


def damping_of(
    op: str, value: float | Tensor, clients: int, device: torch.device, name: str = "gamma"
) -> Tensor:
    """Return ``value`` as float64 ``[clients]``.

    Raises ValueError unless it is a positive finite number, or such for every client.
    """
    if not isinstance(value, Tensor):
        check_finite(op, name, value, above=0.0)
        return torch.full((clients,), float(value), dtype=torch.float64, device=device)
    if value.shape != (clients,) or value.dtype != torch.float64 or value.device != device:
        raise ValueError(
            f"{op}: {name} must be a number or [{clients}] float64 on {device}, got "
            f"{list(value.shape)} {value.dtype} on {value.device}"
        )
    if not torch.compiler.is_compiling():
        wrong = (~((value > 0) & value.isfinite())).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"{op}: {name} must be finite numbers > 0, got {value[wrong[0]].item()} for client "
                f"{wrong[0]}"
            )
    return value


# Elements that are divided at a time: 2 MB of float64. Measured in one thread, 10,000 clients of
# 64 x 10: 4.1 us a client with all of them at once, which takes new pages in every call, 0.4
# in parts.
_DIVIDED = 2**18


def divided(v: Tensor, scales: Tensor) -> Tensor:
    """Return ``v_i / scales_i`` for every client, divided in float64 and rounded once.

    v: ``[clients, C, d]``. scales: float64 ``[clients]``.
    """
    columns = scales[:, None, None]
    if torch.compiler.is_compiling() or v.numel() <= _DIVIDED:
        return (v.double() / columns).to(v.dtype)
    result = torch.empty_like(v)
    clients = max(1, _DIVIDED * v.shape[0] // v.numel())
    parts = (v.split(clients), columns.split(clients), result.split(clients))
    for some, by, quotients in zip(*parts, strict=True):
        quotients.copy_(some.double() / by)
    return result


def check_solved(op: str, failed: Tensor) -> None:
    """Raise ValueError if ``failed``, ``[clients]``, is not zero everywhere.

    It is one more than the row in which a client's matrix was found not to be positive definite.
    """
    if torch.compiler.is_compiling():
        return
    wrong = failed.nonzero().flatten().tolist()
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"{op}: the matrix of client {wrong[0]}{more} is not positive definite (pivot "
            f"{int(failed[wrong[0]])}); pass a larger gamma, or float64"
        )
