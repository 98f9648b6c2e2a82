"""An epoch of local SGD in compiled code is that of plain PyTorch; bad input is refused."""

from __future__ import annotations

import pytest
import torch

from dpkernels import backend, use_backend
from dpkernels.ops.local_sgd import two_layer_epoch_

COUNTS = (9, 0, 17, 1)


def arguments(hidden=5, classes=3, *, dtype=torch.float64, biases=True, mask=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    clients, most = len(COUNTS), max(COUNTS)
    grams = []
    for count in COUNTS:
        x = normal(count, 4)
        grams.append(x @ x.mT)
    order = torch.zeros(clients, most, dtype=torch.int64)
    for row, count in zip(order, COUNTS, strict=True):
        row[:count] = torch.randperm(count, generator=generator)
    return {
        "coefficients": 0.1 * normal(clients, most, hidden),
        "weight": normal(clients, classes, hidden) / hidden**0.5,  # steps of 0.3 are stable
        "hidden_bias": normal(clients, hidden) if biases else None,
        "bias": normal(clients, classes) if biases else None,
        "grams": grams,
        "start": normal(clients, most, hidden),
        "order": order,
        "labels": torch.randint(classes, (clients, most), generator=generator),
        "mask": 2 * (normal(clients, most, hidden) > 0).to(dtype) if mask else None,
        "counts": list(COUNTS),
        "batch_size": 4,
        "lr": 0.3,
    }


WRITTEN = ("coefficients", "weight", "hidden_bias", "bias")


def results(given, which=None):
    copies = {name: given[name] for name in given}
    for name in WRITTEN:
        copies[name] = None if given[name] is None else given[name].clone()
    if which is None:
        two_layer_epoch_(**copies)
    else:
        with use_backend(which):
            two_layer_epoch_(**copies)
    return [copies[name] for name in WRITTEN if copies[name] is not None]


compiled = pytest.mark.skipif(backend.extension is None, reason="dpkernels._C is not built")


@compiled
@pytest.mark.parametrize("hidden", [1, 5, 16, 37, 64, 100])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_compiled_steps_are_those_of_the_reference(hidden, biases, mask, isa):
    features = backend.extension.cpu_features()
    if isa != "portable" and not features[isa]:
        pytest.skip(f"no {isa}")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        given = arguments(hidden, dtype=dtype, biases=biases, mask=mask)
        wanted = results(given, "reference")
        try:
            backend.extension.set_isa(isa)
            found = results(given, "cpp")
        finally:
            backend.extension.set_isa(features["active"])
        for own, reference in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)


@compiled
def test_the_result_does_not_depend_on_threads():
    given, before = arguments(dtype=torch.float32), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(given, "cpp"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("which", ["reference", pytest.param("cpp", marks=compiled)])
def test_rows_past_a_clients_count_are_neither_read_nor_written(which):
    given = arguments()
    wanted = results(given, which)
    for i, count in enumerate(COUNTS):
        for name in ("coefficients", "start", "mask"):
            given[name][i, count:] = torch.nan
        given["labels"][i, count:] = -5
    found = results(given, which)
    for i, count in enumerate(COUNTS):
        assert torch.equal(found[0][i, :count], wanted[0][i, :count])
        assert found[0][i, count:].isnan().all()
    for own, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("which", ["reference", pytest.param("cpp", marks=compiled)])
def test_a_client_that_is_not_finite_leaves_the_others_alone(which):
    given = arguments()
    wanted = results(given, which)
    given["start"][2, 3] = torch.nan
    found = results(given, which)
    others = torch.tensor([0, 1, 3])
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own[others], other[others])
        assert own[2].isnan().any()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("weight", torch.zeros(4, 3, 6), "weight must be contiguous"),
        ("start", torch.zeros(4, 17, 5), "start must be contiguous"),
        ("order", torch.zeros(4, 17), "order must be"),
        ("counts", [1, 2], "one for each of 4 clients"),
        ("batch_size", 0, "batch_size must be >= 1"),
    ],
)
def test_bad_input_is_refused(name, value, why):
    with pytest.raises(ValueError, match=why):
        two_layer_epoch_(**arguments() | {name: value})


@compiled
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("order", (2, 4), 17), ("labels", (0, 3), 3), ("labels", (0, 3), -1)],
)
def test_the_operator_reads_no_memory_that_is_not_its_own(name, index, value):
    given = arguments()
    given[name][index] = value
    before = [given[n].clone() for n in WRITTEN]
    with pytest.raises(ValueError, match=f"{name} must be in"):
        two_layer_epoch_(**given)
    assert all(map(torch.equal, before, [given[n] for n in WRITTEN]))
