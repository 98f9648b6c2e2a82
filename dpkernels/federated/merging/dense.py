"""DENSE: a student learns from the clients' ensemble on images that a generator makes for it.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022, Algorithm 1, in the
setting of FedFisher's authors: the student begins at the weighted average, the generator begins
anew in each epoch, and the student learns from all images made so far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpkernels.federated.merging.dense_images import (
    BatchStatistics,
    Ensemble,
    Generator,
    augmented,
    boundary_support,
    divergence,
)
from dpkernels.federated.merging.states import Score, check_alike, mean, rounded, scored, shares

# Per channel: mean and standard deviation of the pixels, as dpkernels.train.data.PIXELS has them.
Pixels = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class DenseSettings:
    """How much is computed, and the losses' weights.

    epochs: rounds of making a batch of images, then training the student on all of them.
    generator_steps: T_G, the generator's steps in an epoch. lambda1, lambda2: weights of the
    BatchNorm and the boundary loss. batch: images of an epoch, and of a step of the student.
    latent: length of the noise. channels: width of the generator; the published one has 64, at 16
    times the cost. generator_rate: Adam's. rate, momentum: the student's SGD. temperature: of the
    logits that the student learns. crop, flip: images are moved by so many pixels and mirrored, for
    both networks.
    """

    epochs: int = 20
    generator_steps: int = 30
    lambda1: float = 1.0
    lambda2: float = 0.5
    batch: int = 256
    latent: int = 256
    channels: int = 16
    generator_rate: float = 1e-3
    rate: float = 0.01
    momentum: float = 0.9
    temperature: float = 20.0
    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        least = {"lambda1": 0.0, "lambda2": 0.0, "momentum": 0.0, "crop": 0.0}
        least |= dict.fromkeys(("epochs", "generator_steps", "latent", "channels"), 1.0)
        least["batch"] = 2.0  # the generator normalises over the batch
        for field in fields(self):
            value = getattr(self, field.name)
            bound = least.get(field.name)
            fits = math.isfinite(value) and (value > 0 if bound is None else value >= bound)
            if not fits and field.name != "flip":
                wanted = "> 0" if bound is None else f">= {bound:g}"
                raise ValueError(f"DenseSettings: {field.name} must be {wanted}, got {value}")


def dense(
    models: Sequence[nn.Module],
    *,
    classes: int,
    shape: tuple[int, int, int],
    student: nn.Module | None = None,
    weights: Sequence[float] | None = None,
    pixels: Pixels = ((0.0,), (1.0,)),
    settings: DenseSettings | None = None,
    choose: Score | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return the state dict of a student that was distilled from ``models`` without data.

    models: the clients', from images ``[N, *shape]`` to logits ``[N, classes]``; any modules, which
    may differ if ``student`` is given. shape: (C, H, W) of an image.
    student: the network to train, from its own parameters; None: one like the first client's that
    begins at the weighted mean. weights: what a client counts, in the ensemble's logits too.
    pixels: mean and standard deviation by which the clients normalised pixels in [0, 1], for all
    channels or each. settings: see ``DenseSettings``; None: its defaults.
    choose: score of a state dict on data that is declared public; the student of the best epoch is
    returned, without it that of the last.
    seed: of everything random; torch's own generators are left as they were.

    In each epoch, noise z and labels y are drawn and a new generator is trained for T_G steps, z
    with it, on ``CE(D(x), y) + lambda1 L_BN - lambda2 mean w KL(D | f_S)`` at x = G(z), where D is
    the ensemble's mean logits. L_BN compares batches with the running statistics of
    the clients' BatchNorm layers; networks without any, as the paper's LeNet and CNN, have none.
    The images of the smallest loss are kept; then the student takes one pass of SGD over all images
    so far on ``T^2 KL(D / T | f_S / T)``.

    Cost: epochs * T_G * batch forward and backward passes of the generator (``Generator`` has its
    size), of all clients and of the student; epochs^2 batch / 2 of the student's training.
    Who sees what: it needs each client's own model in the clear, view ``each_upload``; the images
    are made from them and may show what clients trained on. No differential privacy.

    Raises ValueError for models whose outputs are not finite logits of ``classes`` classes, clients
    that cannot be averaged, and settings out of their range.
    """
    settings = settings or DenseSettings()
    p = shares(len(models), weights)
    began = copy.deepcopy(models[0] if student is None else student).requires_grad_(True)
    if student is None:
        states = [model.state_dict() for model in models]
        check_alike(states)
        began.load_state_dict(rounded(mean(states, p), states[0]))
    run = _Distillation(began, Ensemble(copy.deepcopy(list(models)), p), shape, pixels, settings)
    run.check(classes)
    best: tuple[float, dict[str, Tensor]] | None = None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pool: list[Tensor] = []
        for epoch in range(settings.epochs):
            pool.append(run.make_images(torch.randint(classes, (settings.batch,))))
            run.train_student(torch.cat(pool))
            if choose is not None:
                state = copy.deepcopy(began.state_dict())
                score = scored(choose, state, epoch)
                best = (score, state) if best is None or score > best[0] else best
    found: Mapping[str, Tensor] = began.state_dict() if best is None else best[1]
    return {name: tensor.detach().clone() for name, tensor in found.items()}


class _Distillation:
    """The two networks, and what an epoch does to them."""

    def __init__(
        self,
        student: nn.Module,
        ensemble: Ensemble,
        shape: tuple[int, int, int],
        pixels: Pixels,
        settings: DenseSettings,
    ) -> None:
        self.student, self.ensemble = student, ensemble
        self.shape, self.settings = shape, settings
        like = next(student.parameters())
        self._device = like.device
        mean_and_deviation = (like.new_tensor(values).reshape(-1, 1, 1) for values in pixels)
        self._mean, self._deviation = mean_and_deviation
        self._optimizer = torch.optim.SGD(
            student.parameters(), lr=settings.rate, momentum=settings.momentum
        )

    def _seen(self, images: Tensor) -> Tensor:
        """Return pixels in [0, 1] as the clients' models take them, augmented."""
        images = augmented(images, self.settings.crop, self.settings.flip)
        return ((images - self._mean) / self._deviation).to(self._mean.dtype)

    @torch.no_grad()
    def check(self, classes: int) -> None:
        """Raise ValueError unless all networks make finite logits of so many classes."""
        if len(self.shape) != 3 or min(self.shape) < 1 or classes < 2:
            raise ValueError(
                f"dense: shape must be (C, H, W) and classes >= 2, got {self.shape}, {classes}"
            )
        blank = torch.zeros(2, *self.shape, device=self._device)
        x = ((blank - self._mean) / self._deviation).to(self._mean.dtype)
        self.student.eval()
        named = [(f"models[{i}]", model) for i, model in enumerate(self.ensemble.models)]
        for name, model in [*named, ("student", self.student)]:
            logits = model(x)
            if tuple(logits.shape) != (2, classes) or not bool(logits.isfinite().all()):
                raise ValueError(
                    f"dense: {name} must make finite logits [2, {classes}] of two images, got "
                    f"{logits.tolist() if logits.numel() < 50 else list(logits.shape)}; leave out "
                    "a client whose training diverged"
                )

    def make_images(self, labels: Tensor) -> Tensor:
        """Return images in [0, 1] from a new generator, trained for T_G steps: the best batch."""
        settings = self.settings
        generator = Generator(settings.latent, settings.channels, self.shape).to(self._device)
        noise = torch.randn(len(labels), settings.latent).to(self._device).requires_grad_()
        labels = labels.to(self._device)
        optimizer = torch.optim.Adam(
            [*generator.parameters(), noise], lr=settings.generator_rate, betas=(0.5, 0.999)
        )
        self.student.eval().requires_grad_(False)
        least, kept = math.inf, torch.empty(0)
        with BatchStatistics(self.ensemble.models) as statistics:
            for _ in range(settings.generator_steps):
                images = generator(noise)
                x = self._seen(images)
                logits = self.ensemble(x)
                loss = cross_entropy(logits, labels) + settings.lambda1 * statistics.loss()
                loss = loss - settings.lambda2 * boundary_support(self.student(x), logits)
                if not math.isfinite(value := loss.item()):
                    raise ValueError(
                        "dense: the generator's loss must be finite, got "
                        f"{value}; take a smaller generator_rate"
                    )
                if value < least:
                    least, kept = value, images.detach()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return kept

    def train_student(self, images: Tensor) -> None:
        """Train the student for one pass over ``images``, [0, 1], in a new order."""
        self.student.train().requires_grad_(True)
        order = torch.randperm(len(images)).to(self._device)
        for at in order.split(self.settings.batch):
            x = self._seen(images[at])
            with torch.no_grad():
                wanted = self.ensemble(x)
            heat = self.settings.temperature
            loss = divergence(self.student(x), wanted, heat).sum(1).mean() * heat**2
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
