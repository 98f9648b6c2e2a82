"""Options are checked, written down, and reach what they are for."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import torch
from torch.optim import SGD

from dpkernels.postprocess import Sofim
from dpkernels.precondition import Kfac
from dpkernels.train.methods import METHODS, SPECIFIC
from dpkernels.train.options import Options, filled_in
from dpkernels.train.prepared import prepare, unreachable_of
from dpkernels.train.schedule import SCHEDULES, set_learning_rate
from python_tests.train.files import write_adult, write_csv, write_mnist

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")

# One value of each option that only some methods take.
VALUES = {
    "damping": 0.5,
    "normalise": "damping",
    "sides": "A",
    "rank": 3,
    "probe_batches": 1,
    "power": 2.0,
    "refresh_every": 7,
    "floor": 1e-4,
    "kappa": 0.5,
}
KFAC = {"dp-kfc", "dp-kfc-public", "dp-kfc-oracle", "dp-kfc+adambc", "dp-kfc+disk"}
SYNTHETIC = {"dp-kfc", "dp-kfc+adambc", "dp-kfc+disk", "adadps"}
TAKERS = {
    **dict.fromkeys(("normalise", "sides", "rank"), KFAC),
    **dict.fromkeys(
        ("damping", "probe_batches", "refresh_every"), KFAC | {"adadps", "adadps-public"}
    ),
    "power": SYNTHETIC,
    "floor": {"dp-adambc", "dp-kfc+adambc"},
    "kappa": {"disk", "dp-kfc+disk"},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_adult(folder / "adult-a9a")
    write_mnist(folder / "mnist", train=60)
    texts = [[n % 2, "good film" if n % 2 else "bad film"] for n in range(40)]
    for part in ("train", "test"):
        write_csv(folder / "imdb" / f"{part}.csv", ["label", "text"], texts)
    return str(folder)


@pytest.mark.parametrize("name", SPECIFIC)
def test_options_are_taken_by_the_methods_that_have_a_use_for_them(name):
    assert VALUES.keys() == set(SPECIFIC)
    for method in METHODS:
        if method in TAKERS[name]:
            assert getattr(filled_in({"method": method, name: VALUES[name]}), name) == VALUES[name]
            continue
        with pytest.raises(ValueError, match=re.escape(f"{name}: {method} does not take it")):
            filled_in({"method": method, name: VALUES[name]})
        assert getattr(filled_in({"method": method, name: None}), name) is None


def test_the_floor_is_that_of_the_optimizer_whatever_the_method():
    assert filled_in({"optimizer": "adambc", "floor": 1e-4}).floor == 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"damping": 0.0}, "damping must be a finite number > 0"),
        ({"normalise": "all"}, "normalise must be one of none, damping, factors, got 'all'"),
        ({"sides": "GA"}, "sides must be one of AG, A, G"),
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"probe_batches": 0}, "probe_batches must be an integer >= 1"),
        ({"power": -1.0}, "power must be a finite number >= 0"),
        ({"method": "dp-adambc", "floor": 0.0}, "floor must be a finite number > 0"),
        ({"method": "disk", "kappa": 1.5}, r"kappa must be in \(0, 1\], got 1.5"),
        ({"schedule": "step"}, "schedule must be one of constant, linear, cosine"),
        ({"average": 1.0}, r"average must be a decay in \[0, 1\), 0.99 say, got 1.0"),
        ({"accountant": "moments"}, "accountant must be one of pld, rdp"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        filled_in({"method": "dp-kfc"} | given)


def test_what_is_written_is_read_and_what_earlier_versions_left_out_has_its_default(tmp_path):
    options = filled_in(
        {"method": "dp-kfc+disk", "average": 0.9, "schedule": "linear"}
        | {name: VALUES[name] for name in SPECIFIC if name != "floor"}
    )
    options.write(tmp_path)
    assert Options.read(tmp_path) == options
    file = tmp_path / "options.json"
    early = {"dataset": "mnist", "method": "dp-kfc", "epsilon": 2.0, "refresh_every": None}
    file.write_text(json.dumps(early))
    assert Options.read(tmp_path) == Options(dataset="mnist", method="dp-kfc", epsilon=2.0)
    file.write_text(json.dumps(early | {"colour": "pink"}))
    with pytest.raises(ValueError, match="does not know, colour; go on with the version"):
        Options.read(tmp_path)


def ready(data_dir, **given):
    common = {"data_dir": data_dir, "batch_size": 20, "epochs": 1, "seed": 0, "epsilon": 4.0}
    return prepare(filled_in(common | given))


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_noise_is_calibrated_for_the_elements_of_the_model(data_dir, model):
    prepared = ready(data_dir, dataset="mnist", model=model)
    assert unreachable_of(prepared.model) == prepared.training.unreachable_mass


def test_curvature_is_estimated_as_asked(data_dir):
    given = {"dataset": "mnist", "model": "mlp", "method": "dp-kfc", "damping": 0.5}
    given |= {"sides": "A", "rank": 3, "probe_batches": 2, "power": 2.0}
    kfac = ready(data_dir, **given).preconditioner
    assert isinstance(kfac, Kfac)
    report = kfac.report()
    assert report.damping == 0.5
    assert report.probes.startswith("2 x 256 of brown noise 1 x 28 x 28")
    # A factor of another kind for each: low rank on the inputs' side, nothing on the errors'.
    for layer in report.layers:
        sides = kfac.sides(layer.name)
        assert sides.left is None and sides.right.vectors.shape[-1] == 3


def test_factors_are_normalised_as_asked(data_dir):
    given = {"dataset": "adult", "method": "dp-kfc", "probe_batches": 1}
    assert ready(data_dir, normalise="none", **given).preconditioner.normalise == "none"


def test_floor_and_kappa_reach_the_optimizers(data_dir):
    both = ready(data_dir, dataset="adult", method="dp-kfc+adambc", floor=1e-4).optimizer
    assert [group["floor"] for group in both.param_groups] == [1e-4]
    assert ready(data_dir, dataset="adult", method="disk", kappa=0.5).optimizer.kappa == 0.5


def test_sofim_is_an_optimizer_of_any_method_and_has_no_floor(data_dir):
    made = ready(data_dir, dataset="adult", method="adadps", optimizer="sofim").optimizer
    assert isinstance(made, Sofim)
    (group,) = made.param_groups
    assert (group["lr"], group["beta"], group["rho"], group["window"]) == (0.5, 0.9, 0.5, None)
    with pytest.raises(ValueError, match="floor: dp-sgd does not take it"):
        filled_in({"optimizer": "sofim", "floor": 1e-4})


def test_what_is_left_out_is_the_method_s_default(data_dir):
    kfac = ready(data_dir, dataset="mnist", model="logistic", method="dp-kfc").preconditioner
    report = kfac.report()
    assert report.damping == 0.1 and kfac.normalise == "factors" and kfac.rank is None
    assert kfac.refresh_every == 50
    assert all(kfac.sides(layer).left is None for layer in kfac.layers)
    assert report.probes.startswith("8 x 256 of f^-3 noise")
    assert ready(data_dir, dataset="adult", method="disk").optimizer.kappa == 0.7


def test_the_spectrum_of_images_is_refused_for_other_data(data_dir):
    with pytest.raises(
        ValueError, match="power: it is the spectrum of noise for images, and adult"
    ):
        ready(data_dir, dataset="adult", method="dp-kfc", power=1.0)


def test_bert_has_defaults_of_its_own_and_probes_of_tokens(data_dir):
    plain, tokens = (filled_in({"dataset": "imdb", "model": m}) for m in ("logistic", "bert"))
    assert (plain.optimizer, plain.epochs) == ("sgd", 20)
    assert (tokens.optimizer, tokens.epochs, tokens.lr) == ("adam", 5, 1e-3)
    assert filled_in({"dataset": "imdb", "model": "bert", "epochs": 2}).epochs == 2
    given = {"dataset": "imdb", "model": "bert", "method": "dp-kfc", "probe_batches": 1}
    made = ready(data_dir, **given)
    assert made.data.train.x.dtype == torch.int64
    assert "256 of uniform tokens of" in str(made.preconditioner.report())
    assert {"tokens", "blocks.0.attention.in_proj", "head"} <= made.preconditioner.layers


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_begin_at_lr_and_end_at_0_after_the_last_step(name):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], 9.0)
    rates = []
    for taken in range(11):
        set_learning_rate(optimizer, 0.5, name, taken, 10)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == 0.5
    if name == "constant":
        assert set(rates) == {0.5}
        return
    assert rates[10] == 0 and all(a > b for a, b in pairwise(rates))
    # Half way both are at half: cos(pi / 2) is 0 to the rounding of pi.
    assert rates[5] == pytest.approx(0.25, rel=1e-15)
    if name == "cosine":  # flat at its ends, unlike the line
        assert rates[1] > 0.475 and rates[9] < 0.025
