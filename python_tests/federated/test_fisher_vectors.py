"""Fisher information that travels as a vector comes back as it was, and nothing is dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.federated.fisher_vectors import FisherLayout, packed_fisher, unpacked_fisher
from dpkernels.federated.model import _layers
from dpkernels.fisher import fisher_information
from python_tests.federated.fedfisher_cases import NETWORKS, inputs, network


def layout_of(model, kind):
    return FisherLayout(kind, tuple(_layers(model)))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_packed_fisher_comes_back_and_has_the_norm_of_its_blocks(name, kind):
    model = network(name)
    fisher, layout = (
        fisher_information(model, [inputs(name, 20)], kind=kind),
        layout_of(model, kind),
    )
    vector = packed_fisher(layout, fisher)
    back = unpacked_fisher(layout, vector, fisher.records)
    assert vector.shape == (layout.size,)
    assert back.layers.keys() == fisher.layers.keys()
    assert set(back.covered()) == {name for name, _ in model.named_parameters()}
    squares = 0.0
    for key, one in fisher.layers.items():
        for side in ("a", "g") if kind == "kronecker" else ("values",):
            expected = getattr(one, side)
            torch.testing.assert_close(
                getattr(back.layers[key], side), expected, rtol=1e-14, atol=0
            )
            squares += float(expected.square().sum())
    torch.testing.assert_close(float(vector.square().sum()), squares)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_parts_cover_every_element_once(kind):
    layout = layout_of(network("convolutional"), kind)
    found = torch.zeros(layout.size)
    for part in layout.parts:
        found[part.slice] += 1
    assert found.eq(1).all()
    assert [part.module for part in layout.parts[:2]] == (
        ["0", "0"] if kind == "kronecker" else ["0", "2"]
    )


def test_what_has_no_factors_is_left_to_the_mean():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    layout = layout_of(model, "kronecker")
    fisher = fisher_information(model, [inputs("linear", 12)])
    back = unpacked_fisher(layout, packed_fisher(layout, fisher))
    assert set(back.without) == {"1.weight", "1.bias"}
    assert {part.module for part in layout.parts} == {"0", "2"}


def test_a_layer_that_the_server_expects_and_the_client_has_not_is_refused():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

        def forward(self, tokens):
            return self.head(self.embedding(tokens).mean(1))

    model = Embedded()
    fisher = fisher_information(model, [torch.randint(7, (6, 5))])
    with pytest.raises(ValueError, match=r"'embedding\.weight' has none of what the server"):
        packed_fisher(layout_of(model, "kronecker"), fisher)
    with pytest.raises(ValueError, match="a vector of 3 elements is wanted, got 2"):
        unpacked_fisher(
            FisherLayout("diagonal", layout_of(nn.Linear(2, 1), "diagonal").layers), torch.zeros(2)
        )
