"""AdaDPS: E[g^2] of every weight is autograd's, and what is clipped is scaled by its root."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels.engine.layers import scaled
from dpkernels.precondition import AdaDPS, FixedSides, Kfac
from dpkernels.precondition.adadps import LayerSquares
from dpkernels.precondition.estimate import started
from dpkernels.precondition.probes import ColouredNoise, Features, PrivateData, PublicData, Tokens

DAMPING = 1e-3


def losses(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


class Text(nn.Module):
    """Embedding, normalisation and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.output = nn.Linear(6, 3)

    def forward(self, tokens):
        """Return logits ``[B, 3]``."""
        h = torch.tanh(self.twice(self.norm(self.embedding(tokens))))
        return self.output(torch.tanh(self.twice(h)).mean(1))


def images():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    )
    return model.double(), ColouredNoise((1, 8, 8), classes=3)


def text():
    torch.manual_seed(0)
    return Text().double(), Tokens(9, 7, 3, mask=False)


def table():
    torch.manual_seed(0)
    return nn.Linear(6, 3).double(), Features(6, 3)


MODELS = {"images": images, "text": text, "table": table}


def ada_dps(model, probe, **options):
    arguments = {"batches": 2, "batch_size": 8, "damping": DAMPING, "seed": 3} | options
    return AdaDPS(model, probe, losses, **arguments)


def squares_by_autograd(model, probe, batches=2, batch_size=8, seed=3):
    """Return E[g^2] of every parameter over single samples, and the number of samples."""
    generator = torch.Generator().manual_seed(seed)
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for _ in range(batches):
        inputs, targets = probe.batch(batch_size, generator)
        inputs = [x.double() if x.is_floating_point() else x for x in inputs]
        for i in range(batch_size):
            loss = losses(model(*(x[i : i + 1] for x in inputs)), targets[i : i + 1]).sum()
            for name, g in zip(total, torch.autograd.grad(loss, list(named.values())), strict=True):
                total[name] += g.square() / (batches * batch_size)
    return total


def scale_by_name(model, preconditioner):
    """Return the scales of all layers by the name of the parameter."""
    names = {p: name for name, p in model.named_parameters()}
    modules = dict(model.named_modules())
    return {
        names[getattr(modules[layer], attribute)]: values
        for layer in preconditioner.layers
        for attribute, values in preconditioner.sides(layer).scale.values.items()
    }


def private(model, preconditioner, **options):
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": 1e9} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sigma = 0
        return dpkernels.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            expected_batch_size=4,
            loss_reduction="sum",
            preconditioner=preconditioner,
            **arguments,
        )


@pytest.mark.parametrize("blocks", ["large", "small"])
@pytest.mark.parametrize("kind", MODELS)
def test_scales_are_one_over_the_root_of_what_autograd_squares(kind, blocks, monkeypatch):
    if blocks == "small":
        monkeypatch.setattr(scaled, "_BLOCK_BYTES", 1)
    model, probe = MODELS[kind]()
    scales = scale_by_name(model, ada_dps(model, probe))
    wanted = squares_by_autograd(model, probe)
    assert scales.keys() == wanted.keys()
    for name, squares in wanted.items():
        assert squares.max() > DAMPING**2
        # torch's own tolerance for float64: sums of positive terms lose nothing.
        torch.testing.assert_close(scales[name], 1 / (squares.sqrt() + DAMPING))


def test_squares_do_not_depend_on_how_samples_are_put_into_batches():
    model, _ = table()
    data = torch.randn(12, 6, dtype=torch.float64)

    class InOrder:
        not_private = None

        def __init__(self):
            self.at = 0

        def describe(self):
            return "samples in their order"

        def batch(self, size, generator):
            at = slice(self.at, self.at + size)
            self.at += size
            return (data[at],), torch.arange(12)[at] % 3

    few = ada_dps(model, InOrder(), batches=1, batch_size=12)
    many = ada_dps(model, InOrder(), batches=4, batch_size=3)
    for name, scale in scale_by_name(model, few).items():
        torch.testing.assert_close(scale, scale_by_name(model, many)[name])


def test_one_sample_is_scaled_to_the_signs_of_its_gradient():
    model, probe = table()
    preconditioner = ada_dps(model, probe, batches=1, batch_size=1, damping=1e-30)
    (x,), y = probe.batch(1, torch.Generator().manual_seed(3))
    training = private(model, preconditioner)
    losses(model(x.double()), y).sum().backward()
    training.optimizer.step()
    for p in model.parameters():
        # A square, its root, a quotient and two products round, by half an ulp each at most.
        off = (4 * p.grad).abs() - 1
        assert (off.abs() <= 5 * torch.finfo(torch.float64).eps).all()


@pytest.mark.parametrize("kind", MODELS)
def test_no_sample_moves_the_sum_by_more_than_its_bound(kind):
    model, probe = MODELS[kind]()
    preconditioner = ada_dps(model, probe)
    preconditioner.sides("")
    inputs, targets = probe.batch(5, torch.Generator().manual_seed(8))
    inputs = [x.double() * 30 if x.is_floating_point() else x for x in inputs]

    def total(samples):
        own = copy.deepcopy(model)
        fixed = FixedSides({n: preconditioner.sides(n) for n in preconditioner.layers})
        training = private(own, fixed, max_grad_norm=0.01)
        losses(own(*(x[:samples] for x in inputs)), targets[:samples]).sum().backward()
        training.optimizer.step()
        return torch.cat([4 * p.grad.flatten() for p in own.parameters()])

    moved = (total(5) - total(4)).norm().item()
    # All are clipped: the scale makes gradients of the order of 1 in every element.
    assert 0.01 * (1 - 1e-6) <= moved <= 0.01 * (1 + 1e-6)


def test_weights_without_gradients_have_a_finite_scale():
    model, probe = table()
    preconditioner = AdaDPS(model, probe, lambda y, t: 0 * losses(y, t), damping=1e-3)
    scale = preconditioner.sides("").scale
    assert all(torch.equal(x, torch.full_like(x, 1e3)) for x in scale.values.values())
    assert preconditioner.report().layers[0].damped == 1.0


def test_an_average_for_a_loss_is_refused():
    model, probe = table()
    with pytest.raises(ValueError, match="it is an average"):
        AdaDPS(model, probe, functional.cross_entropy).refresh()


def test_a_refresh_follows_the_parameters_and_leaves_training_alone():
    model, probe = images()
    preconditioner = ada_dps(model, probe, refresh_every=2)
    training = private(model, preconditioner)
    random_state = torch.get_rng_state()
    before = preconditioner.sides("5")
    preconditioner.after_step()
    assert preconditioner.sides("5") is before
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    expected = ada_dps(model, probe)
    expected._generator.set_state(preconditioner._generator.get_state())
    preconditioner.after_step()
    assert preconditioner.refreshes == 2
    for name, scale in scale_by_name(model, expected).items():
        assert torch.equal(scale_by_name(model, preconditioner)[name], scale)
    assert not torch.equal(
        preconditioner.sides("5").scale.values["weight"], before.scale.values["weight"]
    )
    assert training.samples == 0 and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(steps):
    def begun():
        model, probe = text()
        training = private(model, ada_dps(model, probe, refresh_every=2), max_grad_norm=1.0)
        return model, training

    def go_on(model, training, first, last):
        for k in range(first, last):
            tokens = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(k))
            losses(model(tokens), tokens[:, 0] % 3).sum().backward()
            training.optimizer.step()

    model, training = begun()
    go_on(model, training, 0, 5)
    interrupted, first = begun()
    go_on(interrupted, first, 0, steps)
    resumed, second = begun()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.load_state_dict(interrupted.state_dict())
    go_on(resumed, second, steps, 5)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("outputs", [3, 4])
def test_a_state_of_another_model_is_refused(outputs):
    state = ada_dps(*table()).state_dict()
    other = nn.Linear(6, outputs, bias=outputs == 4).double()
    with pytest.raises(ValueError, match="load it for the model that it was saved with"):
        ada_dps(other, Features(6, outputs)).load_state_dict(state)


def test_layers_that_share_a_weight_and_those_out_of_reach_are_named():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.idle, self.output = nn.Linear(2, 2), nn.Linear(6, 3)

        def forward(self, x):
            return self.output(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model = Shared().double()
    preconditioner = ada_dps(model, Features(6, 3))
    report = preconditioner.report()
    assert preconditioner.layers == {"output"}
    assert report.unpreconditioned == ("first", "second", "idle")
    assert "first (Linear): none, its weight is shared with another layer" in str(report)
    assert "idle (Linear): none, no probe reached it" in str(report)
    assert "output (Linear): 21 elements" in str(report)


def test_only_private_probes_void_the_guarantee():
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    for probe, void in (
        (PrivateData(TensorDataset(x, y), not_private=True), True),
        (PublicData(x, classes=3), False),
        (Features(6, 3), False),
    ):
        model = nn.Linear(6, 3)
        preconditioner = ada_dps(model, probe, batch_size=4)
        training = private(model, preconditioner)
        reasons = (training.void, preconditioner.not_private, preconditioner.report().not_private)
        assert all((reason is not None) is void for reason in reasons), reasons


@pytest.mark.parametrize("kind", [AdaDPS, Kfac])
@pytest.mark.parametrize("loaded", [False, True])
def test_what_private_probes_made_is_not_private_in_any_other_preconditioner(kind, loaded):
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    model = nn.Linear(6, 3)
    oracle = kind(model, PrivateData(TensorDataset(x, y), not_private=True), losses)
    if loaded:
        synthetic = kind(model, Features(6, 3), losses)
        assert synthetic.sides("").not_private is None
        synthetic.load_state_dict(oracle.state_dict())
        oracle = synthetic
    training = private(model, FixedSides({"": oracle.sides("")}))
    assert "oracle" in training.void


def test_scales_of_private_data_void_the_guarantee_after_a_checkpoint_too():
    model, probe = table()
    oracle = PrivateData(TensorDataset(torch.randn(9, 6), torch.arange(9) % 3), not_private=True)
    preconditioner = ada_dps(model, probe)
    training = private(model, preconditioner)
    assert training.void is None
    preconditioner.load_state_dict(ada_dps(model, oracle, batch_size=4).state_dict())
    preconditioner.refresh()
    assert "oracle" in training.void


def test_a_probe_that_does_not_say_whether_it_is_private_is_refused():
    class Silent:
        batch, describe = Features(6, 3).batch, Features(6, 3).describe

    with pytest.raises(ValueError, match="AdaDPS: probe must say in not_private"):
        ada_dps(nn.Linear(6, 3), Silent())


def test_a_state_of_another_preconditioner_is_refused():
    model, probe = table()
    state = Kfac(model, probe, losses, batches=1, batch_size=8).state_dict()
    with pytest.raises(ValueError, match="make the preconditioner as it was saved"):
        ada_dps(model, probe).load_state_dict(state)


def test_scales_are_loaded_beside_the_layer():
    # Checkpoints are read to the CPU; meta stands in for a device that need not be there.
    model, probe = table()
    state = ada_dps(model, probe).state_dict()
    (layer,) = started(model.to("meta"), LayerSquares).values()
    layer.load_state_dict(state["moments"][""])
    assert {x.device.type for x in layer.means.values()} == {"meta"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": 0}, "AdaDPS: batches must be at least 1"),
        ({"batch_size": 0}, "AdaDPS: batch_size must be at least 1"),
        ({"refresh_every": 0}, "AdaDPS: refresh_every must be at least 1"),
        ({"damping": 0.0}, "AdaDPS: damping must be a finite number > 0"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        ada_dps(nn.Linear(6, 3), Features(6, 3), **arguments)
