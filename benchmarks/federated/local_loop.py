"""Local SGD of the MLP as a loop over clients in plain PyTorch, as fast as we can write it.

No autograd: ``mm`` and ``addmm_`` into buffers that are kept, softmax down columns, residuals in
place. It takes the records in the same order and draws the same dropout masks as ours does: both
end at the same parameters, which ``local.check`` holds them to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.federated import LocalSGD
from dpkernels.federated.local.chance import Masks, orders_of


class LocalLoop:
    """Clients one after the other; each takes all its steps.

    x: ``[N, d]``. y: int64 ``[N]``. parts: the rows of every client, of one length.
    weights: of the first and the second layer, ``[h, d]`` and ``[classes, h]``.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        parts: list[Tensor],
        weights: tuple[Tensor, Tensor],
        local: LocalSGD,
        seeds: list[int],
    ) -> None:
        self.x, self.y, self.parts, self.start = x, y, parts, weights
        self.local, self.seeds = local, seeds
        (hidden, features), classes = weights[0].shape, len(weights[1])
        self.own = tuple(torch.empty_like(w) for w in weights)
        self.sizes = sorted({len(p) for p in torch.arange(len(parts[0])).split(local.batch_size)})
        self.buffers = {
            size: (
                torch.empty(size, features),
                torch.empty(size, hidden),
                torch.empty(classes, size),
                torch.empty(size, hidden),
                torch.full((1, size), -1.0),
            )
            for size in self.sizes
        }
        self.updates = x.new_empty(len(parts), sum(w.numel() for w in weights))

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Return w - theta of every client, ``[k, D]``."""
        for i, (rows, seed) in enumerate(zip(self.parts, self.seeds, strict=True)):
            for own, start in zip(self.own, self.start, strict=True):
                own.copy_(start)
            self._train(rows, seed)
            moved = [own.sub_(w).flatten() for own, w in zip(self.own, self.start, strict=True)]
            torch.cat(moved, out=self.updates[i])
        return self.updates

    def _train(self, rows: Tensor, seed: int) -> None:
        count, hidden = len(rows), len(self.own[0])
        orders = orders_of(seed)
        masks = Masks([seed], [count], count, [hidden], [0.5], self.x)
        for _ in range(self.local.epochs):
            order = rows[torch.randperm(count, generator=orders)]
            labels, (kept,) = self.y[order].unsqueeze(0), masks.next_epoch()
            size = self.local.batch_size
            for part, own, mask in zip(
                order.split(size), labels.split(size, 1), kept[0].split(size), strict=True
            ):
                self._step(part, own, mask)

    def _step(self, part: Tensor, labels: Tensor, mask: Tensor) -> None:
        first, second = self.own
        x, z, logits, back, minus = self.buffers[len(part)]
        rate = -self.local.lr / len(part)
        torch.index_select(self.x, 0, part, out=x)
        torch.mm(x, first.T, out=z).mul_(mask).relu_()
        torch.mm(second, z.T, out=logits)
        torch.softmax(logits, 0, out=logits).scatter_add_(0, labels, minus)
        torch.mm(logits.T, second, out=back)
        torch.ops.aten.threshold_backward.grad_input(back, z, 0, grad_input=back).mul_(mask)
        second.addmm_(logits, z, alpha=rate)
        first.addmm_(back.T, x, alpha=rate)
