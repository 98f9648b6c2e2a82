"""Fisher information by definition: dense matrices, single records, single classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def jacobian(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return d outputs / d parameter of one record ``[1, ...]``: ``[outputs, elements]``."""
    trained = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (x,)).flatten()

    return {k: j.flatten(1) for k, j in jacrev(outputs)(trained).items()}


def ggn(model: nn.Module, x: Tensor, names: list[str], loss: str = "cross_entropy") -> Tensor:
    """Return the mean over records of J^T S J, over the named parameters in a row."""
    model = model.eval()
    total: Tensor | float = 0.0
    for i in range(len(x)):
        found = jacobian(model, x[i : i + 1])
        j = torch.cat([found[name] for name in names], 1)
        s = torch.eye(len(j), dtype=j.dtype)
        if loss == "cross_entropy":
            p = model(x[i : i + 1]).detach().softmax(1)[0]
            s = p.diag() - p.outer(p)
        total = total + j.T @ s @ j / len(x)
    assert isinstance(total, Tensor)
    return total


def squares_by_class(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return mean over records of sum_y p_y (d log p_y / d parameter)^2, by autograd."""
    model = model.eval()
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    total = {k: torch.zeros_like(p) for k, p in named.items()}
    for i in range(len(x)):
        log_p = model(x[i : i + 1]).log_softmax(1)[0]
        for one in log_p:
            scores = torch.autograd.grad(
                one, list(named.values()), retain_graph=True, allow_unused=True
            )
            for k, score in zip(named, scores, strict=True):
                if score is not None:
                    total[k] += one.exp().detach() * score.square() / len(x)
    return total


def assert_same(found: Tensor, wanted: Tensor, roundings: int = 1000) -> None:
    """Assert that they are apart by roundings of the largest element: no sum has more terms."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    bound = roundings * torch.finfo(wanted.dtype).eps * wanted.abs().max()
    assert (found - wanted).abs().max() <= bound
