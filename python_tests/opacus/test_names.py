"""Names that Opacus' users import are there, and do what they say."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from torch import nn

import dpkernels.opacus as ours
from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.accountants import RDPAccountant
from dpkernels.opacus.accountants.analysis import gdp, rdp
from dpkernels.opacus.grad_sample import register_grad_sampler
from dpkernels.opacus.layers import SequenceBias
from dpkernels.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private_sum,
    sample_gradients,
)
from python_tests.opacus.small import RECORDS, arguments, made, train
from python_tests.optional_packages import optional_package

PACKAGES = [
    "accountants",
    "accountants.analysis",
    "data_loader",
    "distributed",
    "grad_sample",
    "grad_sample.grad_sample_module_fast_gradient_clipping",
    "grad_sample.gsm_base",
    "grad_sample.gsm_exp_weights",
    "grad_sample.utils",
    "layers",
    "optimizers",
    "optimizers.adaclipoptimizer",
    "optimizers.ddpoptimizer",
    "optimizers.optimizer_fast_gradient_clipping",
    "optimizers.perlayeroptimizer",
    "schedulers",
    "utils",
    "validators",
    "version",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_modules_have_what_those_of_opacus_export(name):
    optional_package("opacus")
    theirs = importlib.import_module(f"opacus.{name}")
    mine = importlib.import_module(f"dpkernels.opacus.{name}")
    own = [
        key
        for key, value in vars(theirs).items()
        if getattr(value, "__module__", "") == theirs.__name__ and not key.startswith("_")
    ]
    # Base classes of files that hold one class, and pieces that only their own engine calls.
    inner = {"create_or_accumulate_grad_sample", "promote_current_grad_sample", "shape_safe"}
    inner |= {"dtype_safe", "average_gradients", "CollateFnWithEmpty", "wrap_collate_with_empty"}
    inner |= {"create_norm_sample", "switch_generator"}
    assert not [key for key in own if key not in inner and not hasattr(mine, key)]


def test_one_import_is_enough():
    for name in ("accountants", "grad_sample", "layers", "optimizers", "schedulers", "validators"):
        assert hasattr(ours, name)
    assert ours.version.__version__ == ours.__version__
    assert issubclass(ours.layers.DPLSTM, nn.LSTM) and ours.schedulers.StepNoise


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_divergences_are_those_of_opacus_or_above(rate, sigma):
    optional_package("opacus")
    theirs = importlib.import_module("opacus.accountants.analysis.rdp")
    given = {"q": rate, "noise_multiplier": sigma, "steps": 100, "orders": [1.5, 2.0, 4.7, 16.0]}
    found, wanted = rdp.compute_rdp(**given), theirs.compute_rdp(**given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    epsilon = rdp.get_privacy_spent(orders=given["orders"], rdp=wanted, delta=1e-5)
    spent = theirs.get_privacy_spent(orders=given["orders"], rdp=wanted, delta=1e-5)
    np.testing.assert_allclose(epsilon, spent, rtol=1e-12)
    assert rdp.compute_rdp(**given | {"orders": 2.0}) == found[1]


def test_extremes_of_divergences():
    assert rdp.compute_rdp(q=0.0, noise_multiplier=1.0, steps=5, orders=2.0) == 0
    assert rdp.compute_rdp(q=0.1, noise_multiplier=0.0, steps=5, orders=2.0) == math.inf
    with pytest.raises(ValueError, match="one value for each"):
        rdp.get_privacy_spent(orders=[2.0, 3.0], rdp=[1.0], delta=1e-5)


def test_the_best_order_gives_the_epsilon():
    accountant = RDPAccountant()
    assert accountant.get_privacy_spent(delta=1e-5) == (0.0, 0.0)
    for _ in range(10):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    for alphas in (None, [2.0, 5.0, 9.0]):
        epsilon, order = accountant.get_privacy_spent(delta=1e-5, alphas=alphas)
        assert epsilon == accountant.get_epsilon(1e-5, alphas)
        assert epsilon == accountant.get_epsilon(1e-5, [order])


def test_the_exact_part_of_gaussian_privacy_is_there_and_the_limit_is_refused():
    assert gdp.delta_eps_mu(eps=gdp.eps_from_mu(mu=0.8, delta=1e-5), mu=0.8) <= 1e-5
    with pytest.raises(ValueError, match="central limit"):
        gdp.compute_mu_poisson(steps=10, noise_multiplier=1.0, sample_rate=0.1)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.shift


def test_a_grad_sampler_of_the_callers_is_taken_with_a_warning_and_never_called():
    with pytest.warns(UserWarning, match="Shifted is not called"):

        @register_grad_sampler(Shifted)
        def wrong(layer, activations, backprops):
            raise AssertionError

    model = nn.Sequential(nn.Linear(4, 3), Shifted()).double()
    train(*made(module=model))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_sequence_bias_is_one_more_position(batch_first):
    optional_package("opacus")
    theirs = importlib.import_module("opacus.layers").SequenceBias(3, batch_first)
    bias = SequenceBias(3, batch_first)
    bias.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 2, 3)
    assert torch.equal(bias(x), theirs(x))


def test_gradients_of_a_sequence_bias_are_those_of_single_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), SequenceBias(3, batch_first=True)).double()
    inputs = (torch.randn(4, 5, 3, dtype=torch.float64),)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


@pytest.mark.parametrize("kind", [int, np.int64, np.int32])
def test_epochs_are_integers_of_any_kind(kind):
    given = arguments()
    del given["noise_multiplier"]
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, _ = engine.make_private_with_epsilon(
        **given, target_epsilon=3.0, target_delta=1e-5, epochs=kind(2)
    )
    assert optimizer.noise_multiplier > 0


def test_samplers_say_how_many_records_they_have():
    sampler = UniformWithReplacementSampler(num_samples=RECORDS, sample_rate=0.2)
    assert sampler.num_samples == RECORDS and sampler.sample_rate == 0.2
