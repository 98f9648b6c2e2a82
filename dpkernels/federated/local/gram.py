r"""The first layer of every client in the span of its own records.

SGD moves the first weights only along the client's n records: W = W0 + C^T X with coefficients C
``[n, h]``, so that for records B of a batch

    X_B W^T = X_B W0^T + K_B C,    K = X X^T

and a step adds to the batch's rows of C. A step takes 2 b n h flops in place of 4 b d h; W0 X^T and
C^T X, 4 n d h together, are taken once a round. It is the same SGD, rounded differently. K does not
depend on the model: it is computed once for each client and kept where memory allows.

With momentum the last step is in that span as well, U^T X: U <- momentum U, a batch adds to its
rows of U, and C <- C + U, 3 n h flops.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dpkernels.federated.local.batches import Batch, Batches
from dpkernels.federated.local.stacked import StackedNet
from dpkernels.federated.problem import LocalSGD
from dpkernels.ops.local_sgd import is_compiled, two_layer_epoch_


class Grams:
    """Products K = X X^T of clients' records, kept as long as they are no more than the records.

    x: ``[N, d]``, all records. parts: the rows of every client. Sum of n_i^2 over clients is at
    most N d where it pays: then K of all clients takes no more memory than the records do.
    """

    def __init__(self, x: Tensor, parts: list[Tensor]) -> None:
        self._x, self._parts = x, parts
        self.keeps = sum(len(part) ** 2 for part in parts) <= x.numel()
        self._kept: dict[int, Tensor] = {}

    def of(self, client: int, rows: Tensor) -> Tensor:
        """Return K ``[n, n]`` of these records; client: whose they are. 2 n^2 d flops."""
        whole = rows is self._parts[client]
        if whole and client in self._kept:
            return self._kept[client]
        x = self._x[rows]
        found = x @ x.mT
        if whole and self.keeps:
            self._kept[client] = found
        return found


class SpannedLayer:
    """The first layer of all clients of a round, as coefficients of their records.

    grams: K of every client, ``[n_i, n_i]``. momentum: of every step.
    """

    def __init__(
        self,
        net: StackedNet,
        x: Tensor,
        batches: Batches,
        grams: list[Tensor],
        momentum: float = 0.0,
    ) -> None:
        self._net, self._x, self._batches, self._grams = net, x, batches, grams
        self._momentum = momentum
        clients, most, weight = len(grams), batches.most, net.weights[0]
        # What the first weights of the round make of every record, [k, n, h].
        self._start = weight.new_zeros(clients, most, weight.shape[1])
        for i, count in enumerate(batches.counts):
            torch.mm(self._records(i), weight[i].mT, out=self._start[i, :count])
        self._coefficients = torch.zeros_like(self._start)
        # Of the last step; without momentum a step goes straight into the coefficients.
        self._last = torch.zeros_like(self._start) if momentum else self._coefficients
        self._at = torch.empty(0, dtype=torch.int64)

    def _records(self, client: int) -> Tensor:
        """Return the client's records, ``[n, d]``, in a buffer: new pages cost as much to fill."""
        rows = self._batches.rows[client]
        out = self._net.buffer("all records", len(rows), self._x.shape[1])
        return torch.index_select(self._x, 0, rows, out=out)

    @property
    def is_compiled(self) -> bool:
        """Whether ``epoch`` takes this net: two layers, ReLU and a dropout at most between.

        It has no momentum.
        """
        chain = self._net.chain
        between = sorted(op.kind for op in chain[1].before)
        two = len(chain) == 2 and between in (["relu"], ["dropout", "relu"])
        return two and not self._momentum and is_compiled(self._start)

    def epoch(self, order: Tensor, labels: Tensor, masks: list[Tensor], local: LocalSGD) -> None:
        """Take all steps of an epoch in compiled code; order, labels: int64 ``[k, most]``."""
        net = self._net
        two_layer_epoch_(
            self._coefficients,
            net.weights[1],
            *net.biases,
            grams=self._grams,
            start=self._start,
            order=order,
            labels=labels,
            mask=masks[0] if masks else None,
            counts=self._batches.counts,
            batch_size=local.batch_size,
            lr=local.lr,
        )

    @functools.cached_property
    def _gram(self) -> Tensor:
        """K of all clients, ``[k, most, most]``; zeros fill up the smaller ones."""
        stacked = self._start.new_zeros(len(self._grams), self._batches.most, self._batches.most)
        for own, gram in zip(stacked, self._grams, strict=True):
            own[: len(gram), : len(gram)] = gram
        return stacked

    def outputs(self, order: Tensor, batch: Batch) -> Tensor:
        """Return what the layer puts out, ``[a, b, h]``.

        order: int64 ``[a, b]``, each client's own records. 2 a b n h flops, a b n values of K read.
        """
        net, (clients, width) = self._net, order.shape
        most, hidden = self._start.shape[1:]
        first = torch.arange(clients, device=order.device).unsqueeze(1) * most
        self._at = (order + first).reshape(-1)
        out = net.buffer("first", clients * width, hidden)
        torch.index_select(self._start.view(-1, hidden), 0, self._at, out=out)
        rows = net.buffer("gram", clients * width, most)
        torch.index_select(self._gram.view(-1, most), 0, self._at, out=rows)
        if batch.absent is not None:
            rows.index_fill_(0, batch.absent, 0.0)
            out.index_fill_(0, batch.absent, 0.0)
        found = out.view(clients, width, hidden)
        found.baddbmm_(rows.view(clients, width, most), self._coefficients[:clients])
        bias = net.biases[0]
        return found if bias is None else found.add_(bias[:clients].unsqueeze(1))

    def step(self, residuals: Tensor) -> None:
        """Take a step by the residuals of the batch that was put out last, ``[a, b, h]``."""
        flat, last = residuals.reshape(len(self._at), -1), self._last[: len(residuals)]
        if self._momentum:
            last.mul_(self._momentum)
        last.view(-1, flat.shape[1]).index_add_(0, self._at, flat, alpha=-1.0)
        if self._momentum:
            self._coefficients[: len(residuals)].add_(last)

    def finish(self) -> None:
        """Write the first weights, W0 + C^T X, to the net."""
        for i, count in enumerate(self._batches.counts):
            coefficients = self._coefficients[i, :count]
            self._net.weights[0][i].addmm_(coefficients.mT, self._records(i))
