"""Folding puts every parameter where FedCEO has it, copies nothing, and comes back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.federated.folding import fold, folded_layers, unfold
from dpkernels.federated.problem import Layer
from dpkernels.ops import tsvd


def laid_out(*shapes: tuple[int, ...]) -> tuple[Layer, ...]:
    """Return layers of these shapes, one after the other."""
    layers, begin = [], 0
    for i, shape in enumerate(shapes):
        layers.append(Layer(f"p{i}", begin, shape))
        begin += math.prod(shape)
    return tuple(layers)


def uploads_of(layers: tuple[Layer, ...], clients: int) -> Tensor:
    """Return ``[clients, D]``, every element another number."""
    size = layers[-1].begin + math.prod(layers[-1].shape)
    return torch.arange(clients * size, dtype=torch.float32).view(clients, size)


LENET = laid_out(
    *((32, 3, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1600), (512,), (512, 512), (512,)),
    *((10, 512), (10,)),
)


def test_lenet_folds_to_the_paper_s_shapes() -> None:
    size = sum(math.prod(layer.shape) for layer in LENET)
    folded = fold(LENET, torch.zeros(1, size).expand(10, size))
    assert [tuple(x.shape) for x in folded[::2]] == [
        *((75, 32, 10), (800, 64, 10), (1600, 512, 10), (512, 512, 10), (512, 10, 10)),
    ]
    assert [tuple(x.shape) for x in folded[1::2]] == [(1, n, 10) for n in (32, 64, 512, 512, 10)]


def test_elements_are_where_they_should_be() -> None:
    layers = laid_out((4, 3), (4,), (5, 2, 3, 3), ())
    uploads = uploads_of(layers, 3)
    linear, vector, conv, scalar = fold(layers, uploads)
    for k in range(3):
        weights = [uploads[k, x.begin : x.begin + math.prod(x.shape)] for x in layers]
        assert torch.equal(linear[..., k], weights[0].view(4, 3).T)
        assert torch.equal(vector[..., k], weights[1].view(1, 4))
        assert torch.equal(conv[..., k], weights[2].view(5, 18).T)
        assert scalar[0, 0, k] == uploads[k, -1]


def test_nothing_is_copied_and_the_uploads_are_not_written() -> None:
    layers = laid_out((4, 3), (4,), (5, 2, 3, 3))
    storage = uploads_of(layers, 6)
    for uploads in (storage, storage[::2], storage.T.contiguous().T):
        folded = fold(layers, uploads)
        for tensor in folded:
            assert tensor.untyped_storage().data_ptr() == uploads.untyped_storage().data_ptr()
        before = uploads.clone()
        out = unfold(layers, [x + 1 for x in folded], uploads)
        assert torch.equal(uploads, before) and torch.equal(out, before + 1)


shapes = st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, clients=st.integers(1, 5), data=st.data())
def test_unfold_is_the_inverse(
    shapes: list[tuple[int, ...]], clients: int, data: st.DataObject
) -> None:
    layers = laid_out(*shapes)
    weights = sum(len(shape) > 1 for shape in shapes)
    last = data.draw(st.none() | st.integers(0, weights))
    uploads = uploads_of(layers, clients)
    folded = fold(layers, uploads, last)
    assert torch.equal(unfold(layers, folded, uploads, last), uploads)
    # Only the chosen layers are taken from the tensors.
    changed = unfold(layers, [torch.full_like(x, -1) for x in folded], uploads, last)
    first = folded_layers(layers, last)[0].begin if folded else uploads.shape[1]
    assert torch.equal(changed[:, :first], uploads[:, :first]) and (changed[:, first:] == -1).all()


def test_last_takes_weights_with_their_biases() -> None:
    assert [x.name for x in folded_layers(LENET, 2)] == ["p6", "p7", "p8", "p9"]
    assert folded_layers(LENET, 5) == LENET and folded_layers(LENET, 0) == ()


def test_a_server_step_changes_what_is_thresholded_only() -> None:
    layers = laid_out((6, 4), (6,))
    uploads = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    tensors = tsvd.soft_threshold(fold(layers, uploads), [1e-6, 0.0]).tensors
    out = unfold(layers, list(tensors), uploads)
    assert torch.equal(out[:, 24:], uploads[:, 24:])
    # Every singular value of a slice moves by 1e-6; rounding is of the size of eps |uploads|.
    assert (out - uploads).abs().max() < 1e-5


def test_refusals() -> None:
    layers = laid_out((4, 3), (4,))
    uploads = uploads_of(layers, 2)
    with pytest.raises(ValueError, match=r"fold: uploads must be \[K, D\], got \[16\]"):
        fold(layers, uploads[0])
    with pytest.raises(ValueError, match=r"fold: layer p1 ends at 16, beyond uploads \[2, 15\]"):
        fold(layers, uploads[:, :15])
    with pytest.raises(ValueError, match=r"fold: last must be in 0 ... 1, .*got 2"):
        fold(layers, uploads, last=2)
    with pytest.raises(ValueError, match="unfold: 1 tensors for 2 folded layers"):
        unfold(layers, fold(layers, uploads)[:1], uploads)
    with pytest.raises(ValueError, match=r"unfold: layer p0 folds to \[3, 4, 2\], got \[1, 4, 2\]"):
        unfold(layers, fold(layers, uploads)[::-1], uploads)
