"""DENSE's first half: a generator of images on which an ensemble is sure and a student is not.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022, data generation stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, pad, softmax

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


class Generator(nn.Module):
    """Noise ``[N, latent]`` to images ``[N, C, H, W]`` in [0, 1], any H and W.

    A linear layer makes ``2 channels`` maps of a quarter of the size; two convolutions, each after
    doubling the size, and a third make the image. About ``27 channels^2 H W`` multiplications an
    image. Weights are drawn as the authors draw them, from torch's default generator.
    """

    def __init__(self, latent: int, channels: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape
        self.small = (2 * channels, -(-shape[1] // 4), -(-shape[2] // 4))
        maps, height, width = self.small
        self.spread = nn.Linear(latent, maps * height * width)
        self.draw = nn.Sequential(
            nn.BatchNorm2d(maps),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(maps, maps, 3, padding=1, bias=False),
            nn.BatchNorm2d(maps),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(maps, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, shape[0], 3, padding=1),
            nn.Sigmoid(),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, noise: Tensor) -> Tensor:
        """Return the images."""
        maps = self.spread(noise).reshape(-1, *self.small)
        images: Tensor = self.draw(maps)
        return images[:, :, : self.shape[1], : self.shape[2]]


class Ensemble(nn.Module):
    """The clients' models, frozen and evaluating: ``D(x) = sum_i p_i f_i(x)``, of their logits."""

    def __init__(self, models: Sequence[nn.Module], p: Sequence[float]) -> None:
        super().__init__()
        self.models, self.p = nn.ModuleList(models), tuple(p)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the averaged logits ``[N, classes]``."""
        logits = [p * model(x) for p, model in zip(self.p, self.models, strict=True)]
        return torch.stack(logits).sum(0)


class BatchStatistics:
    """What BatchNorm layers saw in training against what they see now, while it is entered.

    ``loss()``: ``(1/m) sum over layers of |mean - running mean| + |variance - running variance|``,
    Euclidean, of the last forward pass; zero for models without BatchNorm.
    """

    def __init__(self, models: nn.ModuleList) -> None:
        self._clients = len(models)
        self._layers = [
            module
            for module in models.modules()
            if isinstance(module, BatchNorm) and module.running_mean is not None
        ]
        self._now: dict[nn.Module, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> BatchStatistics:
        self._hooks = [layer.register_forward_pre_hook(self._see) for layer in self._layers]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._now[layer] = inputs[0]

    def loss(self) -> Tensor | float:
        """Return the loss of the last pass."""
        total: Tensor | float = 0.0
        for layer in self._layers:
            x = self._now[layer].transpose(0, 1).flatten(1)
            assert layer.running_mean is not None and layer.running_var is not None
            total = total + (x.mean(1) - layer.running_mean).norm()
            total = total + (x.var(1, unbiased=False) - layer.running_var).norm()
        return total / self._clients


def boundary_support(student: Tensor, ensemble: Tensor) -> Tensor:
    """Return the mean over images of ``w KL(D | f_S)``, w = 1 where the two disagree on the class.

    student, ensemble: logits ``[N, classes]``. The generator makes it large: images between the
    two decision boundaries (its loss has the other sign).
    """
    differs = student.argmax(1) != ensemble.argmax(1)
    return (divergence(student, ensemble).sum(1) * differs).mean()


def divergence(student: Tensor, ensemble: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the terms of ``KL(softmax(ensemble / T) | softmax(student / T))``, of each class."""
    log_q = log_softmax(student / temperature, 1)
    return kl_div(log_q, softmax(ensemble / temperature, 1), reduction="none")


def augmented(images: Tensor, crop: int, flip: bool) -> Tensor:
    """Return ``images`` moved by up to ``crop`` pixels, each by its own, and half of them mirrored.

    What moves in is 0. Draws from torch's default generator, on the CPU.
    """
    count, _, height, width = images.shape
    device = images.device
    if crop:
        padded = pad(images, [crop] * 4)
        down, right = torch.randint(2 * crop + 1, (2, count, 1)).to(device)
        rows = (down + torch.arange(height, device=device)).unsqueeze(2)
        columns = (right + torch.arange(width, device=device)).unsqueeze(1)
        each = torch.arange(count, device=device).reshape(-1, 1, 1)
        images = padded[each, :, rows, columns].permute(0, 3, 1, 2)
    if flip:
        mirrored = (torch.rand(count, 1, 1, 1) < 0.5).to(device)
        images = torch.where(mirrored, images.flip(-1), images)
    return images
