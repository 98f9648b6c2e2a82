"""Every kind of model, every form of factors and every optimizer go together in private runs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from dpkernels.precondition import PrivateData
from dpkernels.privacy.mechanism import NotPrivate
from python_tests.precondition.runs import MODELS, OPTIMIZERS, made, outcome, train

FORMS = {
    "full": {},
    "rank": {"rank": 2},
    "diagonal": {"diagonal": True},
    "reduce": {"sharing": "reduce"},
    "normalised": {"normalise": "factors"},
    "adadps": {"adadps": True},
}
# Every model with every form, every optimizer with every form, and every model with every optimizer
# that is not plain.
CASES = sorted(
    {(model, form, "sgd") for model in MODELS for form in FORMS}
    | {("mlp", form, optimizer) for form in FORMS for optimizer in OPTIMIZERS}
    | {(model, "full", optimizer) for model in MODELS for optimizer in OPTIMIZERS}
)


@pytest.mark.parametrize(("model", "form", "optimizer"), CASES, ids=map(" - ".join, CASES))
def test_a_run_with_refreshes_resumes_bit_for_bit(model, form, optimizer, tmp_path: Path) -> None:
    whole, kfac = made(model, optimizer, **FORMS[form])
    train(whole, 5)
    assert kfac.refreshes == 3
    first, _ = made(model, optimizer, **FORMS[form])
    train(first, 3)
    first.save(tmp_path / "run.pt")
    resumed, again = made(model, optimizer, **FORMS[form], seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seed
        resumed.load(tmp_path / "run.pt")
    train(resumed, 5)
    wanted, got = outcome(whole, kfac), outcome(resumed, again)
    assert wanted.keys() == got.keys()
    assert any(("scale" if form == "adadps" else "left") in name for name in wanted)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert all(value.isfinite().all() for value in wanted.values())
    assert resumed.epsilon(1e-3) == whole.epsilon(1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_models_are_trained_with_float32_factors(model) -> None:
    run, kfac = made(model, "disk adambc", dtype=torch.bfloat16)
    start = outcome(run, kfac)
    train(run, 3)
    end = outcome(run, kfac)
    for name, value in end.items():
        factor = name.endswith(("left", "right"))
        assert value.dtype == (torch.float32 if factor else torch.bfloat16)
        assert value.isfinite().all()
        if not factor:
            assert torch.equal(value, start[name]) == ("frozen" in name), name


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_goes_on_with_an_oracles_factors_has_no_epsilon(steps, tmp_path: Path) -> None:
    records = MODELS["mlp"][1].batch(20, torch.Generator())
    oracle = PrivateData(TensorDataset(*records[0], records[1]), not_private=True)
    first, _ = made("mlp", probe=oracle)
    train(first, steps)
    first.save(tmp_path / "run.pt")
    resumed, kfac = made("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seed
        resumed.load(tmp_path / "run.pt")
    train(resumed, steps + 3)
    assert kfac.refreshes > 1  # from synthetic probes, at parameters that the oracle's led to
    with pytest.raises(NotPrivate, match="estimated from private records"):
        resumed.epsilon(1e-3)
