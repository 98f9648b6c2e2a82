"""K-FAC's sides are inverse roots, the engine applies them, and they follow their schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dpkernels.precondition import Kfac
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    preconditioned,
    private,
    sample_gradients,
)
from python_tests.precondition.factors import Fixed, White, cross_entropy
from python_tests.tolerance import assert_as_accurate

BOTH = {"sides": "AG"}
OPTIONS = {
    "full": BOTH,
    "A": {"sides": "A"},
    "G": {"sides": "G"},
    "rank": {"rank": 2, **BOTH},
    "diagonal": {"diagonal": True, **BOTH},
    "reduce": {"sharing": "reduce", **BOTH},
    "wide": {"max_size": 10, **BOTH},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 3)
    )


def dense_root(moment: Tensor, damping: float) -> Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return vectors * (values.clamp(min=0) + damping).rsqrt() @ vectors.T


def plain_root(moment: Tensor, damping: float, exact: Tensor) -> Tensor:
    """Return a root as exact as plain PyTorch's are: the median of 15 orders of the rows.

    How far one is off is luck: of a 7 x 7 moment 1e-6 to 1e-5, with the last bits of the moment.
    """
    generator, roots = torch.Generator().manual_seed(0), [dense_root(moment, damping)]
    for _ in range(14):
        order = torch.randperm(len(moment), generator=generator)
        back = order.argsort()
        roots.append(dense_root(moment[order][:, order], damping)[back][:, back])
    return sorted(roots, key=lambda root: (root.double() - exact).abs().max().item())[7]


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_sides_are_damped_inverse_roots_of_the_moments(damping):
    given = {"batches": 2, "damping": damping, "normalise": "none", **BOTH}
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, **given)
    assert kfac.layers == {"0", "3", "4"}
    for name, moments in kfac.moments().items():
        sides = kfac.sides(name)
        for factor, moment in ((sides.left, moments.errors), (sides.right, moments.activations)):
            exact = dense_root(moment.double(), damping)
            assert_as_accurate(factor.matrix, plain_root(moment, damping, exact), exact)


def test_a_low_rank_side_has_the_largest_eigenpairs_and_the_mean_of_the_others():
    given = {"rank": 3, "damping": 0.1, "normalise": "none", **BOTH}
    kfac = Kfac(network().double(), White(1, 4, 4), cross_entropy, **given)
    sides, moment = kfac.sides("3"), kfac.moments()["3"].activations
    values, vectors = torch.linalg.eigh(moment)
    values[:-3] = values[:-3].mean()
    wanted = vectors * (values + 0.1).rsqrt() @ vectors.T
    torch.testing.assert_close(sides.right.dense(), wanted)
    # 6 is not more than twice the rank: nothing is gained by a truncation.
    assert sides.describe() == "G full 6, A rank 3 of 65"


@pytest.mark.parametrize("form", ["full", "rank", "diagonal"])
@pytest.mark.parametrize("normalise", ["none", "damping", "factors"])
def test_what_is_normalised_follows_the_units_of_the_loss_or_does_not(normalise, form):
    # U_G at damping g of errors c d is 1/c times U_G of d at damping g / c^2.
    def sides(unit: float, damping: float):
        kfac = Kfac(
            network().double(),
            White(1, 4, 4),
            lambda y, t: unit * cross_entropy(y, t),
            batches=1,
            damping=damping,
            normalise=normalise,
            **OPTIONS[form],
        )
        return kfac.sides("3")

    small, large = sides(1.0, 1e-3), sides(64.0, 1e-3 * (4096 if normalise == "none" else 1))
    expected = 1.0 if normalise == "factors" else 1 / 64
    torch.testing.assert_close(large.left.dense(), expected * small.left.dense())
    assert not torch.equal(sides(1.0, 1.0).left.dense(), small.left.dense())


@pytest.mark.parametrize("normalise", ["damping", "factors"])
def test_normalised_sides_are_roots_at_the_damping_that_is_stated(normalise):
    model = network().double()
    given = {"batches": 1, "normalise": normalise, "damping": 0.1, **BOTH}
    kfac = Kfac(model, White(1, 4, 4), cross_entropy, **given)
    moment = kfac.moments()["3"].errors
    mean = moment.trace() / 6
    if normalise == "damping":
        wanted = dense_root(moment, 0.1 * float(mean))
    else:
        wanted = dense_root(moment / mean, 0.1)
    torch.testing.assert_close(kfac.sides("3").left.matrix, wanted)


@pytest.mark.parametrize("form", OPTIONS)
def test_clipped_sums_are_those_of_single_samples_with_these_sides(form):
    model = network().double()
    kfac = Kfac(model, White(1, 4, 4), cross_entropy, batches=1, batch_size=32, **OPTIONS[form])
    x = torch.randn(7, 1, 4, 4, dtype=torch.float64)
    sides = {name: kfac.sides(name) for name in kfac.layers}
    assert len(sides) == 3

    def loss(outputs: Tensor) -> Tensor:
        return outputs.square().sum(1)

    plain = copy.deepcopy(model)
    gradients = [preconditioned(g, sides, plain) for g in sample_gradients(plain, [x], loss)]
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, preconditioner=kfac)
    loss(model(x)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for _ in range(2):
            model(torch.randn(3, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_factors_are_refreshed_at_the_schedule_with_updated_parameters():
    torch.manual_seed(0)
    x, y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))
    model, probe = network(), Fixed([x], y)
    options = {"batches": 1, "batch_size": 8, **BOTH}
    kfac = Kfac(model, probe, cross_entropy, refresh_every=3, **options)
    _, optimizer = private(model, 1.0, preconditioner=kfac)
    assert (kfac.refreshes, probe.drawn) == (1, 1)
    counts = []
    for _ in range(7):
        before = kfac.sides("3")
        train(model, optimizer, 1)
        counts.append(kfac.refreshes)
        assert (kfac.sides("3") is before) == (len(counts) % 3 != 0)
        if len(counts) % 3 == 0:
            now = Kfac(model, probe, cross_entropy, **options)
            assert torch.equal(now.sides("3").left.matrix, kfac.sides("3").left.matrix)
            assert not torch.equal(before.left.matrix, kfac.sides("3").left.matrix)
    assert counts == [1, 1, 2, 2, 2, 3, 3]


def test_training_goes_on_after_a_checkpoint_as_if_there_had_been_none(tmp_path):
    def made():
        model = network()
        kfac = Kfac(model, White(1, 4, 4), cross_entropy, batches=1, batch_size=16, refresh_every=3)
        return model, kfac, private(model, 1.0, preconditioner=kfac)[1]

    straight, _, optimizer = made()
    torch.manual_seed(5)
    train(straight, optimizer, 7)
    first, kfac, optimizer = made()
    torch.manual_seed(5)
    train(first, optimizer, 4)
    torch.save([first.state_dict(), kfac.state_dict()], tmp_path / "state.pt")
    place = torch.get_rng_state()
    second, kfac, optimizer = made()
    torch.set_rng_state(place)
    weights, state = torch.load(tmp_path / "state.pt")
    second.load_state_dict(weights)
    kfac.load_state_dict(state)
    train(second, optimizer, 3)
    pairs = zip(straight.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(wanted, got) for wanted, got in pairs)
    with pytest.raises(ValueError, match="must be of the layers"):
        Kfac(nn.Linear(4, 3), White(4), cross_entropy).load_state_dict(state)


def test_a_step_that_has_begun_keeps_its_factors():
    sums = []
    for refreshed in (False, True):
        model = network()
        kfac = Kfac(model, White(1, 4, 4), cross_entropy, batches=1, batch_size=16, **BOTH)
        _, optimizer = private(model, 1.0, preconditioner=kfac)
        torch.manual_seed(3)
        for x in torch.randn(2, 3, 1, 4, 4):
            model(x).square().sum().backward()
            if refreshed:
                before = kfac.sides("3").left.matrix
                kfac.refresh()
                assert not torch.equal(kfac.sides("3").left.matrix, before)
        optimizer.step()
        sums.append(gradients_of(model))
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def test_factors_depend_on_the_seed_alone_and_leave_torchs_generator():
    made = []
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        model = network()
        torch.manual_seed(state)
        before = torch.get_rng_state()
        kfac = Kfac(model, White(1, 4, 4), cross_entropy, batches=1, batch_size=16, seed=seed)
        made.append(kfac.sides("3").right.matrix)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_probes_take_the_parameters_dtype_and_factors_are_float32_or_wider(dtype):
    kfac = Kfac(network().to(dtype), White(1, 4, 4), cross_entropy, batches=1, **BOTH)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert kfac.sides("0").left.matrix.dtype == kfac.sides("0").right.matrix.dtype == wanted


def test_autocast_around_a_refresh_changes_nothing():
    plain, inside = (
        Kfac(network(), White(1, 4, 4), cross_entropy, batches=1, **BOTH) for _ in range(2)
    )
    with torch.autocast("cpu", torch.bfloat16):
        inside.refresh()
    assert torch.equal(plain.sides("3").left.matrix, inside.sides("3").left.matrix)


def test_private_probes_are_passed_on_and_not_forgotten():
    probe = White(1, 4, 4)
    kfac = Kfac(network(), probe, cross_entropy, batches=1)
    training, _ = private(kfac._model, 1.0, preconditioner=kfac)
    assert kfac.not_private is None and training.void is None
    probe.not_private = "factors of the private data"
    assert training.void == "factors of the private data"
    assert "not private: factors of the private data" in str(kfac.report())
    kfac.refresh()
    probe.not_private = None
    kfac.refresh()
    assert training.void == "factors of the private data"


def test_private_factors_stay_private_in_a_checkpoint():
    probe = White(1, 4, 4)
    probe.not_private = "factors of the private data"
    state = Kfac(network(), probe, cross_entropy, batches=1).state_dict()
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1)
    training, _ = private(kfac._model, 1.0, preconditioner=kfac)
    kfac.load_state_dict(state)
    assert training.void == "factors of the private data"
    again = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1)
    again.load_state_dict(kfac.state_dict())
    again.refresh()
    assert again.not_private == "factors of the private data"
    del state["not_private"]
    with pytest.raises(ValueError, match="state lacks not_private"):
        again.load_state_dict(state)


@pytest.mark.parametrize("said", ["nothing", False, True, ""])
def test_a_probe_that_does_not_say_whether_it_is_private_is_refused(said):
    class Silent:
        batch, describe = White(1, 4, 4).batch, White(1, 4, 4).describe

    probe = Silent()
    if said != "nothing":
        probe.not_private = said
    with pytest.raises(ValueError, match="probe must say in not_private"):
        Kfac(network(), probe, cross_entropy)
    probe.not_private = None
    kfac = Kfac(network(), probe, cross_entropy, batches=1)
    training, _ = private(kfac._model, 1.0, preconditioner=kfac)
    del probe.not_private
    assert "does not say" in training.void


def test_moments_of_another_kind_are_refused():
    state = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1, diagonal=True).state_dict()
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1)
    with pytest.raises(ValueError, match=r"state must be of .*'diagonal': False"):
        kfac.load_state_dict(state)


@pytest.mark.parametrize("other", [{"damping": 0.2}, {"normalise": "none"}, {"rank": 2}])
def test_sides_are_gone_on_with_as_they_were_or_not_at_all(other):
    state = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1).state_dict()
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1, **other)
    with pytest.raises(ValueError, match="make the preconditioner as it was saved"):
        kfac.load_state_dict(state)


def test_a_state_of_a_layer_of_another_size_is_refused_and_of_another_precision_taken():
    state = Kfac(nn.Linear(4, 3), White(4), cross_entropy, batches=1).state_dict()
    with pytest.raises(ValueError, match="right must be of size 6 or 7, got 5"):
        Kfac(nn.Linear(6, 3), White(6), cross_entropy, batches=1).load_state_dict(state)
    wide = Kfac(nn.Linear(4, 3).double(), White(4), cross_entropy, batches=1)
    wide.load_state_dict(state)
    assert wide.sides("").right.matrix.dtype == torch.float64


def test_fingerprints_differ_where_probes_or_options_do():
    def made(**options):
        return Kfac(network(), White(1, 4, 4), cross_entropy, batches=1, **options).fingerprint()

    others = [made(seed=1), made(damping=0.2), made(batch_size=128), made(sides="AG")]
    assert made() == made() and len({made(), *others}) == 5


def test_inputs_may_be_packed_in_anything():
    class Packed(nn.Sequential):
        def forward(self, given):
            return super().forward(given["x"])

    class Probe(White):
        def batch(self, size, generator):
            (x,), y = super().batch(size, generator)
            return ({"x": x},), y

    torch.manual_seed(0)
    packed = Kfac(Packed(nn.Linear(4, 3)), Probe(4), cross_entropy, batches=1)
    torch.manual_seed(0)
    plain = Kfac(nn.Linear(4, 3), White(4), cross_entropy, batches=1)
    assert torch.equal(packed.sides("0").right.matrix, plain.sides("").right.matrix)


@pytest.mark.parametrize("form", OPTIONS)
def test_the_report_shows_how_much_a_factor_stretches(form):
    options = {"batches": 1, "batch_size": 64, **OPTIONS[form]}
    kfac = Kfac(network().double(), White(1, 4, 4), cross_entropy, **options)
    for row in kfac.report().layers:
        sides = kfac.sides(row.name)
        for factor, stretch in ((sides.right, row.stretch_a), (sides.left, row.stretch_g)):
            if factor is None:
                assert stretch is None
                continue
            wanted = float(torch.linalg.cond(factor.dense()))
            # Eigenvalues and singular values err by n ulps of the largest, which are that many
            # times the stretch of the smallest.
            ulps = 4 * factor.size * wanted
            assert stretch == pytest.approx(wanted, rel=ulps * 2**-52)
        assert "identity" not in row.why


def test_the_report_says_which_sides_damping_has_drowned():
    # A convolution's G is a mean over positions: here about a thousandth of the damping.
    given = {"batches": 1, "damping": 1.0, "normalise": "none", **BOTH}
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, **given)
    rows = {layer.name: layer for layer in kfac.report().layers}
    assert rows["0"].why == "G: a multiple of the identity" and rows["0"].stretch_g < 1.01
    factor = kfac.sides("0").left.matrix
    scale = factor.trace() / len(factor)
    assert torch.linalg.matrix_norm(factor - scale * torch.eye(len(factor)), 2) < 0.01 * scale
    assert rows["3"].why == "" and "G: a multiple of the identity" in str(kfac.report())


class Everything(nn.Module):
    """Layers of all kinds, some without factors, some frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.norm = nn.LayerNorm(6)
        self.grouped = nn.Conv1d(6, 6, 1, groups=2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.shift = nn.Linear(6, 6)
        self.shift.weight.requires_grad_(False)
        self.unused = nn.Linear(6, 2)
        self.wide = nn.Linear(6, 25)
        self.head, self.same = nn.Linear(25, 25, bias=False), nn.Linear(25, 25, bias=False)
        self.same.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.grouped(self.norm(self.table(tokens)).transpose(1, 2)).mean(2)
        return self.same(self.head(self.wide(self.shift(self.frozen(x)))))


@pytest.mark.parametrize("sides", ["AG", "A"])
def test_the_report_says_what_each_layer_has_and_why(sides):
    torch.manual_seed(0)
    model = Everything()
    probe = Fixed([torch.randint(30, (8, 4))], torch.randint(3, (8,)))
    kfac = Kfac(model, probe, cross_entropy, batches=1, batch_size=8, max_size=20, sides=sides)
    report = kfac.report()
    rows = {layer.name: layer for layer in report.layers}
    g = {"AG": lambda text: text, "A": lambda text: "identity"}[sides]
    wanted = {
        "table": (f"G {g('full 6')}, A diagonal 30", ""),
        "norm": ("none", "its rule (scale and shift) takes no factors"),
        "grouped": ("none", "groups of channels must not be mixed"),
        "shift": ("G full 6, A identity", "")
        if sides == "AG"
        else ("none", "a bias alone has no A"),
        "unused": ("none", "no probe reached it"),
        "wide": (
            f"G {g('diagonal 25')}, A full 7",
            "diagonal: 25 is larger than 20" if sides == "AG" else "",
        ),
        "head": ("none", "its weight is shared with another layer"),
        "same": ("none", "its weight is shared with another layer"),
    }
    assert {name: (row.sides, row.why) for name, row in rows.items()} == wanted
    assert report.unpreconditioned == tuple(n for n, (s, _) in wanted.items() if s == "none")
    assert rows["wide"].mean_a == pytest.approx(
        float(kfac.moments()["wide"].activations.trace()) / 7
    )
    assert "1 x 8 of fixed samples" in str(report) and "no probe reached it" in str(report)
    private(model, 1.0, preconditioner=kfac)
    assert set(kfac.layers) == set(wanted) - set(report.unpreconditioned)


def test_a_preconditioner_of_another_model_is_refused():
    kfac = Kfac(network(), White(1, 4, 4), cross_entropy, batches=1)
    with pytest.raises(ValueError, match="it has factors for"):
        private(nn.Linear(4, 3), 1.0, preconditioner=kfac)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": 0}, "batches must be at least 1"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"refresh_every": 0}, "refresh_every must be at least 1"),
        ({"damping": 0.0}, "damping"),
        ({"sides": "GA"}, "sides must be one of AG, A, G, got 'GA'"),
        ({"sharing": "all"}, "sharing must be one of expand, reduce"),
        ({"diagonal": True, "rank": 2}, "a diagonal has no rank"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Kfac(network(), White(1, 4, 4), cross_entropy, **options)


def test_probes_that_are_not_finite_are_refused():
    probe = Fixed([torch.full((4, 1, 4, 4), torch.nan)], torch.zeros(4, dtype=torch.int64))
    kfac = Kfac(network(), probe, cross_entropy)
    with pytest.raises(ValueError, match="look at the probes"):
        kfac.refresh()
    assert kfac.refreshes == 0
