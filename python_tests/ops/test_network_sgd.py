"""An epoch on networks in compiled code is that of plain PyTorch; bad input is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dpkernels import backend, use_backend
from dpkernels.ops.network_sgd import Layer, Window, network_epoch_

COUNTS = (9, 0, 5, 1)
compiled = pytest.mark.skipif(backend.extension is None, reason="dpkernels._C is not built")


def network(channels=3, outputs=5, *, biases=True, activation="relu"):
    """Return two convolutions and two linear layers, and how many parameters they have."""
    first = Layer("convolution", (channels, 8, 7), outputs, Window((3, 2), (1, 1), (1, 1)))
    first = replace(first, activation=activation, pool=Window((2, 2), (2, 2))).dropping(0.25)
    second = Layer("convolution", first.made, 7, Window((2, 3), (1, 2)), activation=activation)
    hidden = Layer("linear", (second.features, 1, 1), 6, activation=activation).dropping(0.1)
    layers, begin = [], 0
    for layer in (first, second, hidden, Layer("linear", (6, 1, 1), 4)):
        size = layer.outputs * layer.image[0] * layer.kernel.size[0] * layer.kernel.size[1]
        bias = begin + size if biases else None
        layers.append(replace(layer, weight=begin, bias=bias))
        begin += size + (layer.outputs if biases else 0)
    return layers, begin


def arguments(*, dtype=torch.float64, momentum=0.0, **options):
    layers, size = network(**options)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    clients, most, total = len(COUNTS), max(COUNTS), 12
    channels = layers[0].image[0]
    theta = 0.1 * normal(clients, size)  # steps stay small: rounding does not grow
    nothing = torch.full((clients, size), torch.nan, dtype=dtype)
    return {
        "parameters": nothing,
        "velocity": nothing.clone() if momentum else None,
        "momentum": momentum,
        "theta": theta,
        "records": normal(total, channels * 8 * 7),
        "rows": torch.randint(total, (clients, most), generator=generator),
        "labels": torch.randint(4, (clients, most), generator=generator),
        "counts": list(COUNTS),
        "masks": [
            torch.randint(layer.levels, (clients, most, layer.features), generator=generator).to(
                torch.uint8 if layer.levels == 256 else torch.uint16
            )
            for layer in layers
            if layer.levels
        ],
        "layers": layers,
        "batch_size": 4,
        "lr": 0.1,
    }


def result(given, which=None):
    return results(given, which)[0]


def results(given, which=None):
    """Return parameters and velocity after the epoch."""
    written = ("parameters", "velocity")
    given = given | {name: None if given[name] is None else given[name].clone() for name in written}
    if which is None:
        network_epoch_(**given)
    else:
        with use_backend(which):
            network_epoch_(**given)
    return given["parameters"], given["velocity"]


@compiled
@pytest.mark.parametrize(("channels", "outputs"), [(1, 6), (3, 1), (6, 16), (16, 33), (6, 64)])
@pytest.mark.parametrize("activation", ["relu", "tanh", "none"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_compiled_steps_are_those_of_the_reference(channels, outputs, activation, momentum, isa):
    features = backend.extension.cpu_features()
    if isa != "portable" and not features[isa]:
        pytest.skip(f"no {isa}")
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        for biases in (True, False):
            given = arguments(
                dtype=dtype,
                channels=channels,
                outputs=outputs,
                activation=activation,
                biases=biases,
                momentum=momentum,
            )
            wanted = results(given, "reference")
            try:
                backend.extension.set_isa(isa)
                found = results(given, "cpp")
            finally:
                backend.extension.set_isa(features["active"])
            for ours, theirs in zip(found, wanted, strict=True):
                if theirs is None:
                    continue
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
                assert ours[0].abs().max() > 1e-3 and not ours[1].any()


@pytest.mark.parametrize("which", ["reference", pytest.param("cpp", marks=compiled)])
def test_two_epochs_go_on_from_what_is_there(which):
    given = arguments()
    once = result(given | {"last": False}, which)
    assert torch.equal(once[1], given["theta"][1])
    torch.testing.assert_close(once - given["theta"], result(given, which))
    twice = result(given | {"parameters": once, "first": False}, which)
    from_there = result(given | {"theta": once}, which)
    torch.testing.assert_close(twice, from_there + once - given["theta"])


@pytest.mark.parametrize("which", ["reference", pytest.param("cpp", marks=compiled)])
def test_a_step_is_what_the_last_one_was_times_momentum_less_lr_times_the_gradient(which):
    given = arguments(momentum=0.9) | {"counts": [4, 0, 3, 1], "last": False}
    once, step = results(given, which)
    torch.testing.assert_close(step, once - given["theta"])  # one batch
    onwards = given | {"parameters": once, "velocity": step, "first": False}
    twice, second = results(onwards, which)
    plain = result(onwards | {"velocity": None, "momentum": 0.0}, which)
    torch.testing.assert_close(second, 0.9 * step + plain - once)
    torch.testing.assert_close(twice, once + second)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_momentum_that_rounds_away_leaves_the_bits_of_plain_steps(dtype):
    # Without biases: a plain step adds records to them one by one.
    plain = arguments(dtype=dtype, biases=False)
    tiny = 1e-30 if dtype == torch.float32 else 1e-200
    with_momentum = arguments(dtype=dtype, biases=False, momentum=tiny)
    assert torch.equal(result(plain, "cpp"), result(with_momentum, "cpp"))


@compiled
def test_the_result_does_not_depend_on_threads():
    given, before = arguments(dtype=torch.float32, momentum=0.9), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(result(given, "cpp"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("which", ["reference", pytest.param("cpp", marks=compiled)])
def test_positions_past_a_clients_count_are_not_read(which):
    given = arguments()
    wanted = result(given, which)
    for i, count in enumerate(COUNTS):
        given["rows"][i, count:] = -5
        given["labels"][i, count:] = 99
    assert torch.equal(wanted, result(given, which))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("theta", torch.zeros(3, 5), "theta must be"),
        ("records", torch.zeros(12, 168), "records must be"),
        ("rows", torch.zeros(4, 9), "rows must be"),
        ("counts", [1, 2], "one for each of 4 clients"),
        ("batch_size", 0, "batch_size"),
        ("layers", [], "number of layers"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\)"),
        ("momentum", 0.5, "momentum 0.5 without velocity"),
        ("velocity", torch.zeros(4, 5, dtype=torch.float64), "momentum 0.0 and velocity"),
    ],
)
def test_bad_input_is_refused(name, value, why):
    with pytest.raises(ValueError, match=why):
        network_epoch_(**arguments() | {name: value})


@pytest.mark.parametrize("shape", [(4, 5), (1, 1)])
def test_a_velocity_that_is_not_like_the_parameters_is_refused(shape):
    with pytest.raises(ValueError, match="velocity must be"):
        network_epoch_(**arguments(momentum=0.5) | {"velocity": torch.zeros(shape)})


def _changed(index, **what):
    layers, _ = network()
    layers[index] = replace(layers[index], **what)
    return layers


@compiled
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("rows", torch.full((4, 9), 12), "rows must be in"),
        ("labels", torch.full((4, 9), -1), "labels must be in"),
        ("counts", [10, 0, 5, 1], "counts must be in"),
        ("masks", [], "too few"),
        ("records", torch.zeros(12, 5, dtype=torch.float64), "records must be"),
        ("layers", network()[0][:3], "nothing after it"),
        ("layers", network()[0][1:], "records must be"),
        ("layers", _changed(0, weight=10**6), "outside of the parameters"),
        ("layers", _changed(3, bias=10**6), "outside of the parameters"),
        ("layers", _changed(0, pool=Window((2, 2), (2, 2), (2, 2))), "half its size"),
        ("layers", _changed(0, pool=Window((40, 1))), "does not fit"),
        ("layers", _changed(0, kernel=Window((3, 2), (0, 1))), "does not fit"),
        ("layers", _changed(1, image=(6, 4, 4)), "does not take what comes before"),
        ("layers", _changed(2, image=(9, 1, 1)), "does not take what comes before"),
        ("layers", _changed(0, outputs=2**40), "no such size"),
    ],
)
def test_the_operator_reads_no_memory_that_is_not_its_own(name, value, why):
    given = arguments() | {name: value}
    with pytest.raises(ValueError, match=why):
        network_epoch_(**given)
    assert given["parameters"].isnan().all()


@compiled
def test_what_is_written_must_not_be_read():
    given = arguments()
    with pytest.raises(ValueError, match="shares memory"):
        network_epoch_(**given | {"parameters": given["theta"]})
    given = arguments(momentum=0.5)
    for other in ("parameters", "theta"):
        with pytest.raises(ValueError, match="shares memory"):
            network_epoch_(**given | {"velocity": given[other]})
    apart = given["velocity"].mT.contiguous().mT
    with pytest.raises(ValueError, match="velocity must be contiguous"):
        network_epoch_(**given | {"velocity": apart})
