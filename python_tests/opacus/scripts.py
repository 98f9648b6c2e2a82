"""Training scripts in the manner of Opacus' published examples, as functions of the package.

Each takes the names that it would import, trains for two epochs without shuffling, and yields its
private model before the first step and after each one. All are in float64, with plain SGD, so that
two packages can be compared step by step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RECORDS, BATCH, EPOCHS = 24, 6, 2
STEPS = EPOCHS * RECORDS // BATCH


@dataclass
class Setting:
    """What a script trains with, and where it leaves its engine.

    package: ``opacus`` or ``dpkernels.opacus``.
    """

    package: str
    noise_multiplier: float = 0.0
    max_grad_norm: float = 0.5
    learning_rate: float = 0.5
    poisson_sampling: bool = False
    accountant: str = "rdp"
    grad_sample_mode: str = "hooks"
    engine: object = None

    def named(self, module, name):
        """Return ``name`` of a module of the package."""
        return getattr(importlib.import_module(f"{self.package}{module}"), name)

    def make_private(self, model, *tensors):
        """Return (model, optimizer, loader), or (model, optimizer, criterion, loader)."""
        model = model.double().train()
        self.engine = self.named("", "PrivacyEngine")(accountant=self.accountant)
        return self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), self.learning_rate),
            data_loader=DataLoader(TensorDataset(*tensors), batch_size=BATCH),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            poisson_sampling=self.poisson_sampling,
            grad_sample_mode=self.grad_sample_mode,
        )


class SampleConvNet(nn.Module):
    """Two convolutions and two linear layers, with pooling between."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(4, 6, 4, 2)
        self.fc1 = nn.Linear(6 * 4 * 4, 12)
        self.fc2 = nn.Linear(12, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2, 1)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, 1)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def classify(setting, model, x, y):
    """Train a classifier in the usual loop."""
    model, optimizer, *criterion, loader = setting.make_private(model, x, y)
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    yield model
    for _ in range(EPOCHS):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()
            assert isinstance(loss.item(), float)
            yield model


def mnist(setting):
    """Train the convolutional network for digits."""
    torch.manual_seed(0)
    x, y = torch.randn(RECORDS, 1, 28, 28).double(), torch.randint(10, (RECORDS,))
    yield from classify(setting, SampleConvNet(), x, y)


def cifar10(setting):
    """Train the convolutional network for small pictures."""
    torch.manual_seed(0)
    x, y = torch.randn(RECORDS, 3, 16, 16).double(), torch.randint(10, (RECORDS,))
    model = nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(8, 12, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(start_dim=1, end_dim=-1),
        nn.Linear(12, 10, bias=True),
    )
    yield from classify(setting, model, x, y)


class CharNNClassifier(nn.Module):
    """Characters embedded, a recurrent layer, and a classifier of its last output."""

    def __init__(self, recurrent, **options):
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.rnn = recurrent(6, 8, batch_first=True, **options)
        self.out_layer = nn.Linear(16 if options.get("bidirectional") else 8, 4)

    def forward(self, x, hidden=None):
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


def char_rnn(setting, kind, **options):
    """Train a classifier of names with the package's own recurrent layer."""
    torch.manual_seed(0)
    x, y = torch.randint(30, (RECORDS, 7)), torch.randint(4, (RECORDS,))
    yield from classify(setting, CharNNClassifier(setting.named(".layers", kind), **options), x, y)


def dcgan(setting):
    """Train a discriminator privately, on real and made-up pictures, against a generator."""
    torch.manual_seed(0)
    real = torch.randn(RECORDS, 1, 8, 8).double()
    net_g = nn.Sequential(
        nn.ConvTranspose2d(5, 8, 4, bias=False),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).double()
    net_d = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False),
        nn.GroupNorm(4, 8),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 4, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    criterion = nn.BCELoss()
    net_d, optimizer_d, loader = setting.make_private(net_d, real)
    optimizer_g = torch.optim.SGD(net_g.parameters(), 0.1)
    noise = torch.Generator().manual_seed(1)
    yield net_d
    for _ in range(EPOCHS):
        for (images,) in loader:
            optimizer_d.zero_grad(set_to_none=True)
            z = torch.randn(len(images), 5, 1, 1, generator=noise, dtype=torch.float64)
            fake = net_g(z)
            ones = torch.ones(len(images), dtype=torch.float64)
            loss_d = criterion(net_d(images), ones) + criterion(net_d(fake.detach()), 0 * ones)
            loss_d.backward()
            optimizer_d.step()
            optimizer_d.zero_grad(set_to_none=True)

            optimizer_g.zero_grad()
            criterion(net_d(fake), ones).backward()
            optimizer_g.step()
            yield net_d


SCRIPTS = {
    "mnist": mnist,
    "cifar10": cifar10,
    "char RNN, LSTM": lambda setting: char_rnn(setting, "DPLSTM"),
    "char RNN, two-way GRU": lambda setting: char_rnn(setting, "DPGRU", bidirectional=True),
    "char RNN, two layers": lambda setting: char_rnn(setting, "DPRNN", num_layers=2),
    "dcgan": dcgan,
}
