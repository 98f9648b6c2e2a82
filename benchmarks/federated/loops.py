"""One round as a loop over clients in plain PyTorch, as fast as we can write it.

Whatever does not depend on the model is computed once, outside the timed call: norms of features,
one-hot labels, views. Buffers are kept, and operations are fused where PyTorch has one:

    r_i = (|x_i| / C) (p_i - e_i)    one ``addcmul``; |r_i| is the norm of the gradient over C
    r_i / max(1, |r_i|^2)^(1/2)      ``mul``, ``sum``, ``clamp_``, ``rsqrt_``, ``mul_``
    noise + (C / |D|) r x_hat        one ``addmm``, with x_hat_i = x_i / |x_i| precomputed

Tables are ``[classes, records]``: softmax over 10 classes of 100 records takes 1.4 us down the
columns and 12 us along the rows. Clipping takes 4 us; ``vector_norm`` alone down the columns takes
9 us, and ``renorm`` 10 us.
Every client draws its noise from one generator. A call is a whole round: clients, sum, server step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.federated.workload import Size
from dpkernels.federated import FedGD, FedNew, FedSOFIM

# Writes every client's noisy solution to ``loop.uploads``.
Solver = Callable[["NewtonLoop"], None]


@dataclass
class Server:
    """What the server keeps: theta, and momentum (FedSOFIM) or the mean direction (FedNew)."""

    theta: Tensor
    other: Tensor


class ClientLoop(ABC):
    """A round of one algorithm, client after client.

    clip: of a record's gradient. x: ``[n, B, d]``. labels: ``[n, B]``. std: of a client's noise.
    """

    def __init__(self, clip: float, x: Tensor, labels: Tensor, size: Size, std: float) -> None:
        self.size, self.std = size, std
        self.x = list(x.unbind(0))
        self.columns = list(x.mT.unbind(0))
        norms = torch.linalg.vector_norm(x, dim=2)
        self.norms = list((norms / clip).unbind(0))
        self.directions = list((x / norms.unsqueeze(2)).unbind(0))
        one_hot = torch.nn.functional.one_hot(labels, size.classes).to(x.dtype)
        targets = (one_hot * (norms / -clip).unsqueeze(2)).mT.contiguous()
        self.targets = list(targets.unbind(0))
        shape = (size.classes, size.features)
        self.server = Server(torch.zeros(shape), torch.zeros(shape))
        self.stacked = torch.empty(size.clients, *shape)
        self.uploads = list(self.stacked.unbind(0))
        self.generator = torch.Generator().manual_seed(1)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Run one round."""
        self.clients()
        self.step(self.stacked.sum(0).div_(self.size.clients))

    @abstractmethod
    def clients(self) -> None:
        """Write every client's noisy upload to ``uploads``."""

    @abstractmethod
    def step(self, mean: Tensor) -> None:
        """Let the server go on from the mean upload."""


class GradientLoop(ClientLoop):
    """FedGD and FedSOFIM: clients upload noisy clipped gradients."""

    def __init__(
        self, algorithm: FedGD | FedSOFIM, x: Tensor, labels: Tensor, size: Size, std: float
    ) -> None:
        super().__init__(algorithm.clip, x, labels, size, std)
        self.algorithm = algorithm

    def clients(self) -> None:
        """Clip, sum, add noise: ten operations a client."""
        theta, std, generator = self.server.theta, self.std, self.generator
        scale = self.algorithm.clip / self.size.records
        mm, softmax, addcmul = torch.mm, torch.softmax, torch.addcmul
        for columns, norms, directions, target, upload in zip(
            self.columns, self.norms, self.directions, self.targets, self.uploads, strict=True
        ):
            residuals = addcmul(target, softmax(mm(theta, columns), 0), norms)
            residuals.mul_((residuals * residuals).sum(0).clamp_(min=1.0).rsqrt_())
            upload.normal_(0.0, std, generator=generator)
            upload.addmm_(residuals, directions, alpha=scale)

    def step(self, mean: Tensor) -> None:
        """Take a gradient step, or SOFIM's by Sherman and Morrison."""
        algorithm, server = self.algorithm, self.server
        if isinstance(algorithm, FedGD):
            server.theta.sub_(mean, alpha=algorithm.lr)
            return
        momentum = server.other.mul_(algorithm.beta).add_(mean, alpha=1 - algorithm.beta)
        flat = momentum.view(-1)
        along = torch.dot(flat, mean.view(-1)) / (algorithm.rho + torch.dot(flat, flat))
        server.theta.sub_(mean.sub_(momentum * along), alpha=algorithm.lr / algorithm.rho)


class NewtonLoop(ClientLoop):
    """FedNew without duals: s_i = clip(g_i + rho y), y_i = (H_i + gamma I)^-1 s_i."""

    def __init__(
        self,
        algorithm: FedNew,
        x: Tensor,
        labels: Tensor,
        size: Size,
        std: float,
        solver: Solver,
    ) -> None:
        super().__init__(algorithm.clip, x, labels, size, std)
        self.algorithm, self.solver = algorithm, solver
        squares = x.square().sum(2)
        # Of a record's Hessian norm, the part that does not depend on theta: Delta_H / |x|^2.
        self.allowed = list((algorithm.hessian_clip / squares).unbind(0))
        self.noise = torch.empty(size.classes, size.features)
        self._stacks: tuple[Tensor, ...] | None = None

    def clients(self) -> None:
        """Solve every client's system; the solver adds the noise."""
        self.solver(self)

    def stacks(self) -> tuple[Tensor, ...]:
        """Return features, norms, directions, targets and allowances of all clients; made once."""
        if self._stacks is None:
            norms, allowed = (torch.stack(v).unsqueeze(1) for v in (self.norms, self.allowed))
            rest = [torch.stack(v) for v in (self.x, self.directions, self.targets)]
            self._stacks = (rest[0], norms, *rest[1:], allowed)
        return self._stacks

    def right_hand_side(self, client: int, p: Tensor, out: Tensor) -> Tensor:
        """Return s_i, ``[C, d]``, in ``out``."""
        algorithm = self.algorithm
        residuals = torch.addcmul(self.targets[client], p, self.norms[client])
        residuals.mul_((residuals * residuals).sum(0).clamp_(min=1.0).rsqrt_())
        torch.addmm(
            self.server.other,
            residuals,
            self.directions[client],
            beta=algorithm.rho,
            alpha=algorithm.clip / self.size.records,
            out=out,
        )
        out.view(1, -1).renorm_(2, 0, algorithm.total_clip)
        return out

    def weights(self, client: int, p: Tensor) -> Tensor:
        """Return each record's clip factor over |D|, ``[B]``; p: ``[C, B]``.

        |diag p - p p^T|^2 = s2 - 2 s3 + s2^2 with s_k the sum of p^k.
        """
        squares = p * p
        second = squares.sum(0)
        third = squares.mul_(p).sum(0)
        norms = torch.addcmul(second, second, second).sub_(third, alpha=2.0).sqrt_()
        return torch.div(self.allowed[client], norms).clamp_(max=1.0).div_(self.size.records)

    def add_noise(self, upload: Tensor) -> None:
        """Add the client's noise to its upload."""
        upload.add_(self.noise.normal_(0.0, self.std, generator=self.generator))

    def step(self, mean: Tensor) -> None:
        """Take the mean direction."""
        self.server.theta.sub_(mean, alpha=self.algorithm.lr)
        self.server.other.copy_(mean)
