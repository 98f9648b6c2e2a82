"""Output errors: the mean of d d^T is what the model's own labels make it."""

from __future__ import annotations

import itertools

import pytest
import torch

from dpkernels.fisher.errors import (
    exact_errors,
    output_errors,
    sampled_errors,
    sign_errors,
)
from python_tests.fisher.oracle import assert_same

DRAWS = 100_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def log_p_of(rows, classes, sharpness=1.0):
    logits = sharpness * torch.randn(rows, classes, generator=generator(), dtype=torch.float64)
    return logits.log_softmax(1)


def covariance(log_p):
    p = log_p.exp()
    apart = -p.unsqueeze(2) * p.unsqueeze(1)
    apart.diagonal(dim1=1, dim2=2).zero_()
    # p (1 - p) as p times the others: p - p^2 cancels where p is nearly 1.
    return apart - apart.sum(2).diag_embed()


def mean_product(errors):
    return torch.stack([d.unsqueeze(2) * d.unsqueeze(1) for d in errors]).mean(0)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0])
def test_exact_errors_are_a_root_of_the_covariance_of_labels(classes, sharpness):
    log_p = log_p_of(5, classes, sharpness)
    errors = list(exact_errors(log_p))
    assert len(errors) == classes - 1
    assert_same(mean_product(errors), covariance(log_p))


def test_exact_errors_are_finite_where_all_probability_is_on_one_class():
    log_p = torch.tensor([[0.0, -1000.0, -1000.0], [-1000.0, -1000.0, 0.0]])
    for d in exact_errors(log_p):
        assert torch.equal(d, torch.zeros_like(d))


def test_all_sign_vectors_together_are_exact():
    log_p = log_p_of(3, 4)
    vectors = itertools.product((-1.0, 1.0), repeat=4)
    errors = [sign_errors(log_p, torch.tensor(v, dtype=log_p.dtype).expand(3, 4)) for v in vectors]
    assert_same(mean_product(errors), covariance(log_p))


def test_uniform_numbers_choose_labels_in_proportion():
    log_p = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64).log().expand(8, 4)
    u = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    labels = (log_p.exp() - sampled_errors(log_p, u)).round().argmax(1)
    assert labels.tolist() == [0, 0, 0, 0, 2, 2, 3, 3]


def test_a_uniform_number_next_to_one_chooses_a_label_that_there_is():
    log_p = torch.full((1, 3), 1 / 3, dtype=torch.float32).log()
    d = sampled_errors(log_p, torch.tensor([1 - 2.0**-53], dtype=torch.float64))
    assert d[0].argmin() == 2


@pytest.mark.parametrize("expectation", ["sampled", "rademacher"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize("draws", [1_000, DRAWS])
def test_one_draw_is_unbiased_and_errors_fall_with_the_root_of_draws(expectation, loss, draws):
    outputs = torch.randn(1, 4, generator=generator(1), dtype=torch.float64).expand(draws, 4)
    (d,) = output_errors(loss, expectation, generator(2))(outputs)
    wanted = covariance(outputs[:1].log_softmax(1))[0]
    if loss == "squared":
        wanted = torch.eye(4, dtype=torch.float64)
    products = d.unsqueeze(2) * d.unsqueeze(1)
    # Sixteen means of independent draws: 5 standard deviations are met once in 10^6.
    deviation = products.std(0) / draws**0.5
    error = (products.mean(0) - wanted).abs()
    assert (error <= 5 * deviation + 1e-15).all()
    assert deviation.max() <= 4 / draws**0.5


@pytest.mark.parametrize("expectation", ["sampled", "rademacher"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_records_get_the_same_errors_however_they_are_cut(expectation, loss):
    outputs = torch.randn(50, 5, generator=generator(), dtype=torch.float64)
    whole = output_errors(loss, expectation, generator(1))
    cut = output_errors(loss, expectation, generator(1))
    (wanted,) = whole(outputs)
    found = [d for part in outputs.split((1, 30, 2, 17)) for d in cut(part)]
    assert torch.equal(torch.cat(found), wanted)


def test_errors_have_the_dtype_of_the_outputs():
    outputs = torch.randn(4, 3, generator=generator()).bfloat16()
    for expectation in ("exact", "sampled", "rademacher"):
        for loss in ("cross_entropy", "squared"):
            for d in output_errors(loss, expectation, generator())(outputs):
                assert d.dtype == torch.bfloat16 and d.shape == outputs.shape


@pytest.mark.parametrize("outputs", [torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, 2, 2)])
def test_logits_of_another_shape_are_refused(outputs):
    with pytest.raises(ValueError, match=r"logits \[records, classes\] of at least 2"):
        list(output_errors("cross_entropy", "exact", generator())(outputs))


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="loss must be one of cross_entropy, squared, got 'mse'"):
        output_errors("mse", "exact", generator())
    with pytest.raises(ValueError, match="expectation must be one of exact, sampled, rademacher"):
        output_errors("squared", "empirical", generator())
