"""Opacus trains what ours train, within the same budget."""

from __future__ import annotations

import pytest

from dpkernels.repro.opacus_peer import MODES, train_with_opacus
from dpkernels.train.options import filled_in
from python_tests.optional_packages import optional_package
from python_tests.train.files import write_imdb

optional_package("opacus")


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_tokens_is_trained_within_the_budget(tmp_path, mode):
    write_imdb(tmp_path / "imdb")
    given = {"dataset": "imdb", "model": "bert", "batch_size": 8, "epochs": 1, "epsilon": 4.0}
    report = train_with_opacus(filled_in({**given, "data_dir": str(tmp_path), "seed": 0}), mode)
    assert "words of a text, hashed" in report["data"]
    # Opacus searches noise until epsilon is within 0.01 of the budget.
    assert 3.99 <= report["privacy"]["epsilon"] <= 4 and report["privacy"]["steps"] == 3
