"""Norms and clipped sums of records in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import hessian, vmap

from benchmarks.cases.glm.data import (
    FEATURE_BOUND,
    GAMMA,
    GRADIENT_BOUND,
    HESSIAN_BOUND,
    Size,
    curvatures,
    exact_hessian,
    hessian_factors,
    make_problem,
    probabilities,
    records_of,
)
from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.glm import FeatureCovariance, Records, clipped_hessian_sum, record_norms
from dpkernels.ops.glm import clipped_sums as fused_sums

VMAP = "vmap(hessian), clip, sum"
# Columns of x x^T that are multiplied at a time where all of them would not fit.
PRODUCT_BYTES = 16 * 2**20


def _loss(theta: Tensor, x: Tensor, label: Tensor) -> Tensor:
    return -torch.log_softmax(theta @ x, 0).gather(0, label.unsqueeze(0)).squeeze(0)


def _vmap_hessian(x: Tensor, labels: Tensor, theta: Tensor) -> Outputs:
    """As the paper has it: every record's Hessian is there at once."""
    hessians = vmap(hessian(_loss), (None, 0, 0))(theta[0], x[0], labels[0])
    flat = hessians.reshape(len(hessians), -1)
    factors = (HESSIAN_BOUND / torch.linalg.vector_norm(flat, dim=1)).clamp_(max=1.0)
    width = theta[0].numel()
    return [(factors @ flat).reshape(1, width, width)]


def _blocks(x: Tensor, theta: Tensor, scaled: Tensor, out: Tensor) -> Outputs:
    """One product for each pair of classes, written to both of its places."""
    p = probabilities(x, theta)
    curvature = curvatures(p, hessian_factors(x, p))[0]
    classes, features = theta.shape[1:]
    blocks = out.view(classes, features, classes, features)
    for a in range(classes):
        for b in range(a, classes):
            torch.mul(x[0], curvature[:, a, b].unsqueeze(1), out=scaled)
            block = scaled.T @ x[0]
            blocks[a, :, b] = block
            if a != b:
                blocks[b, :, a] = block
    return [out]


def _product(x: Tensor, theta: Tensor, out: Tensor, rows: int) -> Outputs:
    """One product for all pairs of classes: weights [C C, B] times x x^T [B, d d], in parts."""
    p = probabilities(x, theta)
    curvature = curvatures(p, hessian_factors(x, p))[0]
    classes, features = theta.shape[1:]
    weights = curvature.reshape(-1, classes * classes).T
    blocks = out.view(classes, features, classes, features)
    for first in range(0, features, rows):
        some = x[0, :, first : first + rows]
        products = (some.unsqueeze(2) * x[0].unsqueeze(1)).reshape(x.shape[1], -1)
        sums = (weights @ products).view(classes, classes, some.shape[1], features)
        blocks[:, first : first + rows] = sums.permute(0, 2, 1, 3)
    return [out]


def hessian_case(size: Size, target: Target, *, with_vmap: bool) -> Case:
    """Clipped Hessian sum of one client."""
    rows = max(1, PRODUCT_BYTES // (4 * size.records * size.features))

    def out(inputs: Inputs) -> Tensor:
        return poisoned(1, size.width, size.width, like=inputs[0])

    plain: tuple[Form, ...] = (
        Form(
            "block of each pair of classes, kept",
            _blocks,
            lambda i: (i[0], i[2], torch.empty_like(i[0][0]), out(i)),
        ),
        Form("one product with x x^T, kept", _product, lambda i: (i[0], i[2], out(i), rows)),
    )
    if with_vmap:
        form = Form(VMAP, _vmap_hessian, lambda i: (i[0], i[1], i[2]), compilable=False)
        plain = (form, *plain)
    pairs = size.classes * (size.classes + 1) // 2
    return Case(
        op="glm_clipped_sums_",
        name=f"glm clipped Hessian sum, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * (size.width**2 + size.records * size.features),
        flops=size.records * pairs * size.features * (size.features + 1),
        bound="gemm",
        ours=Form(
            "dpkernels",
            lambda records, theta, out: [
                clipped_hessian_sum(records, theta, HESSIAN_BOUND, out=out)
            ],
            lambda i: (records_of(i), i[2], out(i)),
        ),
        plain=plain,
        truth=lambda i: [exact_hessian(i[0][0], i[2][0]).unsqueeze(0)],
        target=target,
    )


def _fused_plain(x: Tensor, labels: Tensor, theta: Tensor) -> Outputs:
    """Gradients and Hessians of all clients, pair by pair."""
    p = probabilities(x, theta)
    residual = p - torch.nn.functional.one_hot(labels, p.shape[2])
    norms = (residual.square().sum(2) * x.square().sum(2)).sqrt()
    weights = residual * (GRADIENT_BOUND / norms).clamp(max=1.0).unsqueeze(2)
    curvature = curvatures(p, hessian_factors(x, p))
    clients, classes, features = theta.shape
    out = x.new_empty(clients, classes, features, classes, features)
    for a in range(classes):
        for b in range(a, classes):
            block = torch.bmm((x * curvature[..., a, b].unsqueeze(2)).mT, x)
            out[:, a, :, b] = block
            if a != b:
                out[:, b, :, a] = block
    width = classes * features
    return [torch.bmm(weights.mT, x), out.reshape(clients, width, width)]


def fused_case(size: Size) -> Case:
    """Gradients and Hessians of many clients in one call."""

    def truth(inputs: Inputs) -> Outputs:
        x, labels, theta, _ = inputs
        p = probabilities(x.double(), theta.double())
        residual = p - torch.nn.functional.one_hot(labels, size.classes)
        norms = (residual.square().sum(2) * x.double().square().sum(2)).sqrt()
        weights = residual * (GRADIENT_BOUND / norms).clamp(max=1.0).unsqueeze(2)
        hessians = [exact_hessian(*client) for client in zip(x, theta, strict=True)]
        return [weights.mT @ x.double(), torch.stack(hessians)]

    def ours(records: Records, theta: Tensor) -> Outputs:
        result = fused_sums(
            records,
            theta,
            gradient_bound=GRADIENT_BOUND,
            hessian_bound=HESSIAN_BOUND,
        )
        return [result.gradients, result.hessians]

    pairs = size.classes * (size.classes + 1) // 2
    per_record = pairs * size.features * (size.features + 1) + 4 * size.width
    return Case(
        op="glm_clipped_sums_",
        name=f"glm clipped gradient and Hessian sums, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * size.clients * (size.width**2 + size.records * size.features),
        flops=size.clients * size.records * per_record,
        bound="gemm",
        ours=Form("dpkernels", ours, lambda i: (records_of(i), i[2])),
        plain=(Form("bmm of each pair of classes", _fused_plain, lambda i: tuple(i[:3])),),
        truth=truth,
    )


def _closed_norms(x: Tensor, labels: Tensor, theta: Tensor) -> Outputs:
    p = probabilities(x, theta)
    squares = x.square().sum(2)
    index = labels.unsqueeze(2)
    residual = p.scatter_add(2, index, torch.full_like(index, -1, dtype=p.dtype))
    gradient = residual.square().sum(2) * squares
    total = p.square().sum(2)
    products = total - 2 * (p.square() * p).sum(2) + total.square()
    return [gradient.flatten(), (products * squares.square()).flatten()]


def norms_case(size: Size) -> Case:
    """Squared norms of gradients and Hessians, from the closed forms on both sides."""
    count = size.clients * size.records
    return Case(
        op="glm_record_norms",
        name=f"glm record norms, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * count * size.features,
        flops=2 * count * size.width,
        bound="read",
        ours=Form(
            "dpkernels",
            lambda records, theta: list(record_norms(records, theta)),
            lambda i: (records_of(i), i[2]),
        ),
        plain=(Form("softmax, closed forms", _closed_norms, lambda i: tuple(i[:3])),),
        truth=lambda i: _closed_norms(i[0].double(), i[1], i[2].double()),
    )


def _covariances(x: Tensor, out: Tensor) -> Outputs:
    factors = (FEATURE_BOUND / x.square().sum(2, keepdim=True)).clamp_(max=1.0)
    torch.bmm((x * factors).mT, x, out=out)
    out.diagonal(dim1=1, dim2=2).add_(GAMMA)
    return [torch.linalg.cholesky_ex(out).L]


def covariance_case(size: Size) -> Case:
    """Clipped feature covariances of all clients, factorised."""

    def ours(records: Records) -> Outputs:
        factored = FeatureCovariance.factor(
            records,
            bound=FEATURE_BOUND,
            gamma=GAMMA,
        )
        return [factored.factors]

    def out(inputs: Inputs) -> Tensor:
        shape = (size.clients, size.features, size.features)
        return poisoned(*shape, like=inputs[0], dtype=inputs[0].dtype)

    count, d = size.clients * size.records, size.features
    return Case(
        op="glm_feature_covariance",
        name=f"glm feature covariance, {size}",
        dtype=torch.float32,
        parameters=size.parameters,
        make_inputs=lambda device, generator: make_problem(size, device, generator),
        bytes_moved=4 * (count * d + 2 * size.clients * d * d),
        flops=count * d * (d + 1) + size.clients * d**3 // 3,
        bound="gemm",
        ours=Form("dpkernels", ours, lambda i: (records_of(i),)),
        plain=(Form("bmm, cholesky, kept", _covariances, lambda i: (i[0], out(i))),),
        truth=lambda i: _covariances(i[0].double(), out([i[0].double()])),
    )
