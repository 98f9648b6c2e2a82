"""The two-layer network of FedFisher's Theorem 1: data, clients and server, all in float64.

f(W, x) = m^-1/2 sum_r a_r relu(w_r . x) (8), a_r = +-1 fixed, W trained on 1/2 (f - y)^2. With
phi(W, x) = df/dW, a client's full Fisher is F_i = mean_j phi_ij phi_ij^T at its own W_i (Claim 2).

Appendix D states the data and all step sizes. It leaves open, and here is chosen:

- the factor m^-1/2 stands both in (8) and in its a_r: taken once, as the theorem needs it;
- N(0, 1/2) and N(b_i, Sigma) name variances;
- the server's number of steps: the limit of Lemma 1 is computed, and any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

KAPPA = 0.5  # variance of the first weights
_VARIANCES = (1.0, 2**-1.2)  # of the inputs, before they are brought to norm 1


@dataclass(frozen=True)
class Scene:
    """Clients' data and the network that all start from.

    inputs: ``[M, n, 2]`` of norm 1. labels: ``[M, n]``. weights: ``[m, 2]``, W_0.
    signs: ``[m]``, a_r.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    signs: Tensor


def draw(
    seed: int, width: int, *, shared: bool = False, clients: int = 2, records: int = 100
) -> Scene:
    """Return the data and the network of Appendix D; a seed's data are the same at every width.

    Client i: u, v ~ N(0, 1); slope ~ N(u, I); centre ~ N(v, I); x ~ N(centre, diag(1, 2^-1.2)),
    brought to norm 1; y = slope . x. The clients label the same x differently.

    shared: all label with the first client's slope, a control that the paper does not have.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    slopes = normal(clients, 1) + normal(clients, 2)
    centres = normal(clients, 1) + normal(clients, 2)
    deviations = torch.tensor(_VARIANCES, dtype=torch.float64).sqrt()
    inputs = centres[:, None] + deviations * normal(clients, records, 2)
    inputs /= inputs.norm(dim=-1, keepdim=True)
    if shared:
        slopes = slopes[:1].expand(clients, 2)
    weights = math.sqrt(KAPPA) * normal(width, 2)
    signs = 2.0 * torch.randint(0, 2, (width,), generator=generator).double() - 1
    return Scene(inputs, (inputs @ slopes[..., None]).squeeze(-1), weights, signs)


def least_eigenvalue(inputs: Tensor) -> float:
    """Return lambda_0 of Definition 1 for inputs ``[..., 2]`` of norm 1, all clients' together.

    H[k, l] = x_k . x_l (pi - angle(x_k, x_l)) / (2 pi), the closed form of the expectation.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    cosines = (rows @ rows.T).clamp(-1, 1)
    kernel = cosines * (math.pi - cosines.acos()) / (2 * math.pi)
    return float(torch.linalg.eigvalsh(kernel)[0])


def outputs(weights: Tensor, signs: Tensor, inputs: Tensor) -> Tensor:
    """Return f ``[..., n]`` for weights ``[..., m, p]``, signs ``[m]``, inputs ``[..., n, p]``."""
    return (inputs @ weights.mT).relu() @ signs / math.sqrt(len(signs))


def features(weights: Tensor, signs: Tensor, inputs: Tensor) -> Tensor:
    """Return phi = df/dW ``[..., n, m p]``: a_r m^-1/2 1{w_r . x > 0} x. Shapes as ``outputs``."""
    active = (inputs @ weights.mT > 0) * (signs / math.sqrt(len(signs)))
    return (active[..., None] * inputs[..., None, :]).flatten(-2)


def loss(weights: Tensor, scene: Scene) -> float:
    """Return L(W), the mean over all clients' records of 1/2 (f - y)^2; weights ``[m, 2]``.

    With ``[M, m, 2]`` each client's records are given to its own model: the local loss.
    """
    missed = outputs(weights, scene.signs, scene.inputs) - scene.labels
    return float(missed.square().mean()) / 2


def _turn(vectors: Tensor) -> Tensor:
    """Return the direction of vectors ``[..., 2]`` as a number that rises with the angle.

    It runs from -2 to 2, and a right angle is 1 of it: opposite vectors differ by exactly half.
    """
    x, y = vectors.unbind(-1)
    return torch.copysign(1 - x / (x.abs() + y.abs()), y)


def descend(
    weights: Tensor,
    signs: Tensor,
    inputs: Tensor,
    labels: Tensor,
    *,
    rate: float,
    marks: Collection[int],
) -> dict[int, Tensor]:
    """Run full-batch gradient descent on B clients at once; return weights at the marked steps.

    In the plane each input divides the neurons' directions in two halves, so n inputs divide them
    into at most 2 n cells, and neurons of one cell are active for the same inputs. These are an
    arc of the inputs sorted by direction: their sum of errors x_j is a difference of two prefix
    sums, and so is the sum of a_r w_r over the neurons that are active for an input. A neuron
    costs a search for its cell: O(B (m log n + n)) a step, not O(B m n).

    Args:
        weights: ``[B, m, 2]`` float64, no row zero; not changed.
        signs: ``[B, m]``.
        inputs: ``[B, n, 2]``.
        labels: ``[B, n]``.
        rate: eta.
        marks: numbers of steps, at least 1.

    Returns:
        ``[B, m, 2]`` by number of steps.
    """
    batch, width, _ = weights.shape
    records = inputs.shape[1]
    outer = (signs / math.sqrt(width))[..., None]
    turns, order = _turn(inputs).sort(dim=1)
    inputs = inputs.gather(1, order[..., None].expand_as(inputs))
    labels = labels.gather(1, order)
    edges, low, high = _cells(turns)
    # Clients lie one behind the other: 2 n + 1 cells, and as many places for prefix sums.
    places = 2 * records + 1
    first = places * torch.arange(batch)[:, None]
    low, high = (low + first).flatten(), (high + first).flatten()
    weights, found = weights.clone(), {}
    for step in range(1, max(marks) + 1):
        cells = (torch.searchsorted(edges, _turn(weights), right=True) + first).flatten()
        pulls = weights.new_zeros(batch * places, 2)
        pulls.index_add_(0, cells, (outer * weights).flatten(0, 1))
        change = torch.zeros_like(pulls)
        change.index_add_(0, low, pulls).index_add_(0, high, pulls, alpha=-1)
        sums = change.view(batch, places, 2)[:, :-1].cumsum(1)
        active = sums[:, :records] + sums[:, records:]
        errors = (active * inputs).sum(-1) - labels
        slopes = (errors[..., None] * inputs).repeat(1, 2, 1).cumsum(1)
        prefix = torch.cat([slopes.new_zeros(batch, 1, 2), slopes], 1).flatten(0, 1)
        arcs = prefix.index_select(0, high) - prefix.index_select(0, low)
        gradient = arcs.index_select(0, cells).view_as(weights)
        weights.addcmul_(outer, gradient, value=-rate / records)
        if step in marks:
            found[step] = weights.clone()
    return found


def _cells(turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where cells of directions end, and which inputs a neuron in each is active for.

    turns: ``[B, n]``, the inputs' directions, sorted. Returns edges ``[B, 2 n]`` sorted, and low
    and high ``[B, 2 n + 1]``: a neuron in cell c is active for the inputs low[c] to high[c] - 1 of
    the inputs twice around.
    """
    both = torch.cat([turns - 1, turns + 1], 1)
    edges = torch.where(both < -2, both + 4, torch.where(both >= 2, both - 4, both)).sort(1).values
    ends = edges.new_full((len(edges), 1), 2.0)
    middles = (torch.cat([-ends, edges], 1) + torch.cat([edges, ends], 1)) / 2
    begin = torch.where(middles < -1, middles + 3, middles - 1)
    around = torch.cat([turns, turns + 4], 1)
    return edges, torch.searchsorted(around, begin), torch.searchsorted(around, begin + 2)


@dataclass(frozen=True)
class Server:
    """FedFisher's quadratic sum_i (W - W_i)^T F_i (W - W_i), in the span of its N = M n features.

    With the rows of Phi being phi_ij / sqrt(n) at W_i, sum_i F_i = Phi^T Phi, and as f is
    homogeneous phi_ij . W_i = f(W_i, x_ij): the quadratic is |Phi W - z|^2 with z the clients' own
    predictions over sqrt(n). A thin singular value decomposition of Phi, O(N^2 d), gives every
    iterate of gradient descent; nothing of d x d is formed, and nothing is squared.

    start: ``[d]``, the mean of W_i. values: ``[k]``, singular values of Phi above rounding.
    directions: ``[k, d]``. misses: ``[k]``, z - Phi start along the left singular vectors.
    shape: of one model.
    """

    start: Tensor
    values: Tensor
    directions: Tensor
    misses: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, models: Tensor, signs: Tensor, inputs: Tensor) -> Server:
        """Return the server's problem for models ``[M, m, p]``, inputs ``[M, n, p]``."""
        scale = math.sqrt(inputs.shape[1])
        rows = (features(models, signs, inputs) / scale).flatten(0, 1)
        targets = outputs(models, signs, inputs).flatten() / scale
        start = models.mean(0).flatten()
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        kept = values > max(rows.shape) * torch.finfo(rows.dtype).eps * values[0]
        misses = left.T @ (targets - rows @ start)
        return cls(start, values[kept], right[kept], misses[kept], models.shape[1:])

    @property
    def largest(self) -> float:
        """The largest eigenvalue of sum_i F_i."""
        return float(self.values[0]) ** 2

    def limit(self) -> Tensor:
        """Return W* of (7), ``[m, p]``: the solution nearest to the mean, Lemma 1's limit."""
        return self._moved(self.misses / self.values)

    def after(self, steps: int, rate: float) -> Tensor:
        """Return the iterate ``[m, p]`` of Lemma 1 after ``steps``: O(N d), however many.

        Along a singular vector of value s it is (1 - (1 - rate s^2)^steps) of the way to W*.

        Raises ValueError if ``rate`` exceeds 1 / ``largest``.
        """
        if rate * self.largest > 1:
            raise ValueError(
                f"after: rate must be at most 1 / largest = {1 / self.largest:g}, got {rate:g}"
            )
        left = steps * torch.log1p(-rate * self.values.square())
        return self._moved(-torch.expm1(left) * self.misses / self.values)

    def _moved(self, along: Tensor) -> Tensor:
        return (self.start + along @ self.directions).view(self.shape)
