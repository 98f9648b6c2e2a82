"""``fisher_information``: batches, the model, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from typing import get_args

import pytest
import torch
from torch import nn

import dpkernels
from dpkernels.fisher import Fisher, fisher_information
from dpkernels.fisher.estimate import Kind
from python_tests.fisher import models
from python_tests.fisher.oracle import assert_same, squares_by_class


def tensors_of(fisher: Fisher) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": value
        for name, one in fisher.layers.items()
        for key, value in vars(one).items()
        if isinstance(value, torch.Tensor)
    }


def assert_equal(found: Fisher, wanted: Fisher) -> None:
    assert found.records == wanted.records and found.without == wanted.without
    found_tensors, wanted_tensors = tensors_of(found), tensors_of(wanted)
    assert found_tensors.keys() == wanted_tensors.keys()
    for name, tensor in wanted_tensors.items():
        assert_same(found_tensors[name], tensor)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("expectation", ["exact", "sampled", "rademacher"])
@pytest.mark.parametrize("model", ["images", "tokens", "twice"])
def test_how_records_are_cut_into_batches_changes_nothing(kind, expectation, model):
    net, x = models.MODELS[model]()
    x = torch.cat([x, x.flip(0)])
    options = {"kind": kind, "expectation": expectation}
    whole = fisher_information(net, [x], **options)
    for sizes in ([1] * len(x), [3, len(x) - 3], [len(x) - 1, 0, 1]):
        assert_equal(fisher_information(net, x.split(sizes), **options), whole)


def test_many_batches_round_no_more_than_one():
    model, _ = models.linear()
    x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(1)).double()
    truth = tensors_of(fisher_information(model, [x]))
    single = model.float()
    found = [tensors_of(fisher_information(single, x.float().split(n))) for n in (1, 2000)]
    for name, tensor in truth.items():
        one, whole = ((f[name] - tensor).abs().max() for f in found)
        assert one <= 2 * whole + torch.finfo(torch.float32).eps * tensor.abs().max()


def test_the_same_generator_draws_the_same_and_goes_on():
    model, x = models.linear()
    generator = torch.Generator().manual_seed(7)
    first = fisher_information(model, [x], generator=generator)
    second = fisher_information(model, [x], generator=generator)
    again = fisher_information(model, [x], generator=torch.Generator().manual_seed(7))
    assert_equal(again, first)
    assert not torch.equal(first.layers["0"].g, second.layers["0"].g)
    assert_equal(fisher_information(model, [x]), fisher_information(model, [x]))


def test_several_inputs_go_in_as_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, x, y):
            return self.left(x) * self.right(y)

    torch.manual_seed(0)
    model, x, y = Two().double(), torch.randn(6, 3), torch.randn(6, 2)
    whole = fisher_information(model, [(x, y)], expectation="exact")
    parts = zip(x.split(4), y.split(4), strict=True)
    assert_equal(fisher_information(model, [list(p) for p in parts], expectation="exact"), whole)


@pytest.mark.parametrize("takes_any_layout", [True, False])
def test_channels_go_last_where_the_model_lets_them(takes_any_layout):
    layouts = []

    class Flat(nn.Module):
        def forward(self, x):
            layouts.append(x.is_contiguous(memory_format=torch.channels_last))
            return x.flatten(1) if takes_any_layout else x.view(len(x), -1)

    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 2, 3)
    model = nn.Sequential(convolution, Flat(), nn.Linear(32, 3)).double()
    x = torch.randn(9, 1, 6, 6).double()
    found = fisher_information(model, [x], kind="diagonal", expectation="exact")
    assert layouts[-1] == takes_any_layout
    for name, values in squares_by_class(model, x).items():
        assert_same(found.layers[name].values, values)


def test_the_model_and_the_generators_stay_as_they_are():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).eval().requires_grad_(False)
    layers = nn.Conv2d(2, 4, 3), norm, nn.Dropout(0.5), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.LazyLinear(3))
    x = torch.randn(5, 2, 6, 6)
    model(x)
    model[2].train()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    with torch.no_grad():
        first = fisher_information(model, [x], kind="diagonal")
    assert_equal(fisher_information(model, [x], kind="diagonal"), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(m) for m in model.modules())
    assert model[0].weight.requires_grad and not norm.weight.requires_grad
    assert not any(name.startswith("1.") for name in [*first.covered(), *first.without])


@pytest.mark.parametrize("expectation", ["exact", "rademacher"])
def test_private_training_goes_on_as_if_nothing_had_happened(expectation):
    def gradient(interrupted):
        model, x = models.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of no noise
            dpkernels.make_private(
                model,
                optimizer,
                noise_multiplier=0.0,
                max_grad_norm=1.0,
                expected_batch_size=6,
                loss_reduction="mean",
            )
        loss = model(x).square().sum(1).mean()
        found = None
        if interrupted:
            found = fisher_information(model, [x], expectation=expectation)
        loss.backward()
        optimizer.step()
        return found, [p.detach().clone() for p in model.parameters()]

    found, after = gradient(True)
    _, wanted = gradient(False)
    assert all(map(torch.equal, after, wanted))
    model, x = models.linear()
    assert_equal(found, fisher_information(model, [x], expectation=expectation))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_what_has_no_fisher_is_named_with_the_reason(kind):
    torch.manual_seed(0)
    model = models.Tied()
    model.between.bias.requires_grad_(False)
    x = torch.randint(5, (6, 3))
    fisher = fisher_information(model, [x], kind=kind)
    assert set(fisher.covered()) == {"between.weight"}
    assert fisher.without.keys() == {
        "embedding.weight",
        "head.weight",
        "unused.weight",
        "unused.bias",
    }
    assert "shares a parameter with another layer" in fisher.without["head.weight"]
    assert "shares a parameter with another layer" in fisher.without["embedding.weight"]
    assert fisher.without["unused.bias"] == "no record reached unused (Linear)"


def test_records_that_do_not_reach_a_layer_count():
    class Sometimes(nn.Module):
        on = True

        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.always(x)
            return self.sometimes(y) if self.on else y

    torch.manual_seed(0)
    model, x = Sometimes().double(), torch.randn(6, 3).double()

    def batches():
        for part in x.split(4):
            model.on = len(part) == 4
            yield part

    options = {"expectation": "exact"}
    found = [fisher_information(model, batches(), kind=k, **options) for k in get_args(Kind)]
    model.on = True
    four = [fisher_information(model, [x[:4]], kind=k, **options) for k in get_args(Kind)]
    kronecker, alone = (f[0].layers["sometimes"] for f in (found, four))
    assert_same(kronecker.a, alone.a * 4 / 6)
    assert_same(kronecker.g, alone.g)
    diagonal, alone = (f[1].layers["sometimes.weight"] for f in (found, four))
    assert_same(diagonal.values, alone.values * 4 / 6)


def test_half_precision_is_summed_in_float32():
    model, x = models.linear()
    truth = squares_by_class(copy.deepcopy(model).bfloat16().double(), x.bfloat16().double())
    half = fisher_information(model.bfloat16(), [x.float()], kind="diagonal", expectation="exact")
    for name, values in truth.items():
        found = half.layers[name].values
        assert found.dtype == torch.float32
        # Activations, errors, and the two layers between: each rounds, and squares twice that.
        error = (found - values).abs().max()
        assert error <= 16 * torch.finfo(torch.bfloat16).eps * values.abs().max()


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("where", ["0", "2"])
def test_what_is_not_finite_is_refused_by_the_layers_name(kind, where):
    model, x = models.linear()
    with torch.no_grad():
        model.get_submodule(where).weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fisher_information: 2 \(Linear\)"):
        fisher_information(model, [x], kind=kind)
    assert not any("forward" in vars(m) for m in model.modules())


def test_no_records_are_refused():
    model, x = models.linear()
    for batches in ([], [x[:0]]):
        with pytest.raises(ValueError, match="batches hold no records"):
            fisher_information(model, batches)


def test_outputs_of_changing_size_are_refused_where_passes_would_differ():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x).squeeze(2)

    batches = [torch.randn(3, 4, 2), torch.randn(3, 5, 2)]
    options = {"loss": "squared"}
    assert fisher_information(Sequence(), batches, **options).records == 6
    with pytest.raises(ValueError, match="got 4 errors for a batch and 5 for another"):
        fisher_information(Sequence(), batches, expectation="exact", **options)


def test_a_model_that_returns_several_tensors_is_refused():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x):
            return self.linear(x), x

    with pytest.raises(ValueError, match="must return one tensor of outputs"):
        fisher_information(Outer(), [torch.randn(4, 2)])


def test_unknown_kinds_are_refused():
    model, x = models.linear()
    with pytest.raises(ValueError, match="kind must be one of kronecker, diagonal, got 'full'"):
        fisher_information(model, [x], kind="full")


def test_a_model_that_mixes_samples_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(dpkernels.Unsupported, match="normalises over the batch"):
        fisher_information(model, [torch.randn(4, 3)])


def test_the_docstrings_example_runs(capsys):
    import dpkernels.fisher as room

    example = [line[4:] for line in (room.__doc__ or "").splitlines() if line.startswith("    ")]
    exec("\n".join(example), {})
    assert capsys.readouterr().out.startswith("1000 torch.Size([9, 9]) torch.Size([16, 16])")
