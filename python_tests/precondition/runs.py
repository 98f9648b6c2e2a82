"""Private runs of small models of every kind, with probes for each, from fixed seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels import NoiseKey, PoissonSampler, PrivateLoader, PrivateRun
from dpkernels.postprocess import DiSK, DPAdamBC
from dpkernels.precondition import AdaDPS, ColouredNoise, Features, Kfac, Probe, Tokens
from python_tests.precondition.factors import cross_entropy

RECORDS, CLASSES = 48, 3


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token and positions as bare parameters, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.token, self.place = (nn.Parameter(torch.randn(1, n, 8) / 4) for n in (1, 5))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        return self.head(self.block(x)[:, 0])


class Bert(nn.Module):
    """Tokens and positions from tables, a mask on attention, the first position classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 8, padding_idx=0), nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        x = self.words(ids) + self.places(places)
        return self.head(self.block(x, src_key_padding_mask=~mask)[:, 0])


class LowRankAdapter(nn.Module):
    """A frozen layer and a trained product of two narrow ones beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, CLASSES))


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3)
    return nn.Sequential(*convolutions, nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(20, CLASSES))


def adapted() -> nn.Module:
    return nn.Sequential(LowRankAdapter(8, 6), nn.Tanh(), LowRankAdapter(6, CLASSES))


IMAGES, FEATURES = ColouredNoise((1, 8, 8), classes=CLASSES), Features(8, CLASSES)
MODELS: dict[str, tuple[Callable[[], nn.Module], Probe]] = {
    "logistic": (lambda: nn.Linear(8, CLASSES), FEATURES),
    "mlp": (mlp, FEATURES),
    "cnn": (cnn, IMAGES),
    "vision transformer": (VisionTransformer, IMAGES),
    "bert": (Bert, Tokens(30, 7, CLASSES, cls=1, sep=2, distribution="zipf")),
    "adapters": (adapted, FEATURES),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "adambc": lambda parameters: DPAdamBC(parameters, lr=0.01),
    "disk": lambda parameters: DiSK(Adam(parameters, lr=0.01)),
    "disk adambc": lambda parameters: DiSK(DPAdamBC(parameters, lr=0.01)),
}


def made(
    model: str,
    optimizer: str = "sgd",
    *,
    dtype: torch.dtype = torch.float32,
    probe: Probe | None = None,
    adadps: bool = False,
    **options: Any,
) -> tuple[PrivateRun, Kfac | AdaDPS]:
    """Return a run that refreshes its factors every second step; options: of ``Kfac``.

    adadps: of ``AdaDPS``, in its place.
    """
    torch.manual_seed(0)
    build, own_probe = MODELS[model]
    network = build().to(dtype)
    inputs, targets = own_probe.batch(RECORDS, torch.Generator().manual_seed(5))
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    options = {"batches": 2, "batch_size": 12, "refresh_every": 2} | options
    kfac: Kfac | AdaDPS
    if adadps:
        kfac = AdaDPS(network, probe or own_probe, cross_entropy, **options)
    else:
        kfac = Kfac(network, probe or own_probe, cross_entropy, **{"sides": "AG", **options})
    trained = OPTIMIZERS[optimizer](network.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seeds
        sampler = PoissonSampler(RECORDS, 0.25, seed=1)
        training = dpkernels.make_private(
            network,
            trained,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=sampler.expected_batch_size,
            loss_reduction="sum",
            preconditioner=kfac,
            noise_key=NoiseKey.from_seed(1),
        )
    if isinstance(trained, DPAdamBC | DiSK):
        trained.follow(training)
    loader = PrivateLoader(TensorDataset(*inputs, targets), sampler)
    return PrivateRun(training, loader, accountant="rdp"), kfac


def train(run: PrivateRun, steps: int) -> None:
    """Train until ``steps`` steps are done."""
    training = run.training
    while training.steps < steps:
        for *inputs, targets in run.loader:
            cross_entropy(training.model(*inputs), targets).sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            if training.steps == steps:
                return


def outcome(run: PrivateRun, kfac: Kfac | AdaDPS) -> dict[str, Tensor]:
    """Return copies of all parameters, and all factors as matrices, or all scales."""
    found = {name: p.detach().clone() for name, p in run.training.model.named_parameters()}
    for layer in kfac.layers:
        sides = kfac.sides(layer)
        for name, factor in (("left", sides.left), ("right", sides.right)):
            if factor is not None:
                found[f"{layer} {name}"] = factor.dense()
        if sides.scale is not None:
            found |= {f"{layer} scale {name}": x for name, x in sides.scale.values.items()}
    return found
