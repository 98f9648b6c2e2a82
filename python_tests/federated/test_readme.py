"""The README's federated scripts run as they stand, within their budget."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch import nn

README = Path(__file__).resolve().parents[2] / "README.md"


def script_with(words: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (script,) = [block for block in blocks if words in block]
    return script


def test_the_readmes_federated_script_learns_within_its_budget(capsys):
    exec(compile(script_with("Federation("), "README.md", "exec"), {})
    accuracy, epsilon = map(float, capsys.readouterr().out.split())
    assert accuracy > 0.8
    assert 1.9 < epsilon <= 2.0


def test_the_readmes_merge_finds_what_linear_models_agree_on():
    torch.manual_seed(0)
    first = nn.Linear(6, 3)
    models = [first, copy.deepcopy(first)]
    inputs = [torch.randn(40, 6), torch.randn(20, 6)]
    inputs[0][:, :3] = inputs[1][:, 3:] = 0.0  # each client sees three features, and learns those
    with torch.no_grad():
        models[0].weight[:, 3:] += torch.randn(3, 3)
        models[1].weight[:, :3] -= torch.randn(3, 3)
    wanted = torch.cat([models[1].weight[:, :3], models[0].weight[:, 3:]], 1).detach().clone()
    names = {"models": models, "inputs": inputs, "model": nn.Linear(6, 3)}
    exec(compile(script_with("fisher_information"), "README.md", "exec"), names)

    def far(weight):  # what all classes share changes no prediction
        difference = weight - wanted
        return float((difference - difference.mean(0)).norm())

    mean = (models[0].weight + models[1].weight) / 2
    # Fifty iterations in float32 end at 2e-7 of the mean's distance.
    assert far(names["model"].weight) < 1e-3 * far(mean)
