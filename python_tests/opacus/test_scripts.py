"""Opacus' scripts do the same after the import has changed."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from dpkernels.ops.ghost.rounding import norm_limit
from python_tests.opacus.scripts import RECORDS, SCRIPTS, STEPS, Setting
from python_tests.optional_packages import optional_package

opacus = optional_package("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")

MODES = ("hooks", "functorch", "ew", "ghost")


def states_of(script, setting):
    """Return the model's state before the first step and after each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [state_of(model) for model in script(setting)]


def state_of(model):
    return {name.removeprefix("_module."): x.clone() for name, x in model.state_dict().items()}


def distance(state, other):
    assert state.keys() <= other.keys()
    return math.sqrt(sum(float((x - other[name]).square().sum()) for name, x in state.items()))


def assert_steps_agree(script, ours, theirs):
    """Assert that every step of ours, from where a step of theirs began, ends where that did.

    One step moves parameters by the learning rate times the average of clipped gradients, each of
    norm C at most. Opacus divides norms n above C by n + 1e-6, and ours may be high by a limit. On
    top comes rounding, of sums of at most RECORDS times 200 products for each element.
    """
    bound = theirs.max_grad_norm
    wrong = 1e-6 / bound + norm_limit(torch.float64, 1)
    largest = theirs.learning_rate * bound
    rounding = 2 * 200 * RECORDS * torch.finfo(torch.float64).eps
    wanted = states_of(script, theirs)
    moved = 0.0
    for step, model in enumerate(script(ours)):
        state = state_of(model)
        if step > 0:
            size = math.sqrt(sum(float(x.square().sum()) for x in state.values()))
            allowed = largest * (wrong + rounding) + rounding * size
            assert distance(state, wanted[step]) <= allowed, f"after step {step}"
            moved = max(moved, distance(wanted[step], wanted[step - 1]))
        model.load_state_dict(wanted[step])
    assert step == STEPS
    assert moved > largest / 10, "hardly anything was clipped: that is not a test of clipping"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_takes_the_steps_that_it_took_with_opacus(name):
    assert_steps_agree(SCRIPTS[name], Setting("dpkernels.opacus"), Setting("opacus"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_takes_the_steps_of_opacus(mode):
    assert_steps_agree(
        SCRIPTS["mnist"],
        Setting("dpkernels.opacus", grad_sample_mode=mode),
        Setting("opacus", grad_sample_mode="hooks"),
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_numbers(mode):
    states = states_of(SCRIPTS["mnist"], Setting("dpkernels.opacus", grad_sample_mode=mode))
    wanted = states_of(SCRIPTS["mnist"], Setting("dpkernels.opacus"))
    # The ghost criterion takes its average over losses of samples, in another order of additions.
    rounding = 4 * STEPS * RECORDS * torch.finfo(torch.float64).eps if mode == "ghost" else 0.0
    assert distance(states[-1], wanted[-1]) <= rounding


@pytest.mark.parametrize("name", ["mnist", "dcgan"])
def test_epsilon_is_that_of_opacus(name):
    spent = []
    alphas = opacus.accountants.RDPAccountant.DEFAULT_ALPHAS
    for package in ("dpkernels.opacus", "opacus"):
        setting = Setting(package, noise_multiplier=1.1, poisson_sampling=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in SCRIPTS[name](setting):
                pass
        accountant = setting.engine.accountant
        assert [steps for *_, steps in accountant.history] == [STEPS]
        # Ours set 2^-20 of delta aside for noise that cannot be drawn.
        left = 1.0 if package == "dpkernels.opacus" else 1 - 2**-20
        spent.append(accountant.get_epsilon(1e-5 * left, alphas=alphas))
    # Both break off, for orders that are not whole, a series whose terms have fallen to e^-30; of
    # its tail, which falls slowly, 1000 terms of that size are allowed for in each step. Ours are
    # raised by 1e-8 of themselves.
    assert spent[0] == pytest.approx(spent[1], abs=1000 * STEPS * math.exp(-30), rel=1e-8)
