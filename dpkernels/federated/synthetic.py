"""synthetic(alpha, beta): clients that differ in what they hold and in what it means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpkernels.federated.partitions import Partition, Seed, stream_of
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True, eq=False)
class Synthetic:
    """Records of many clients, client after client.

    x: ``[N, features]`` float32. y: ``[N]`` int64. partition: which client has which rows.
    x_test, y_test: a held-out share of every client, likewise.
    """

    x: Tensor
    y: Tensor
    partition: Partition
    x_test: Tensor
    y_test: Tensor


def generate(
    alpha: float = 5.0,
    beta: float = 5.0,
    *,
    clients: int = 100,
    records: int = 500,
    features: int = 60,
    classes: int = 10,
    relabelled: float = 0.05,
    test_share: float = 0.2,
    seed: Seed = 0,
) -> Synthetic:
    """Draw a model and records for every client.

    The reading of Noble et al. (2022), whose data DP-FedNew takes at alpha = beta = 5: each
    coordinate has its own offset. For client i, with all normal numbers independent:

        v_i = sqrt(beta) N(0, I_d) + N(0, I_d)           the mean of its features
        W_i = sqrt(alpha) N(0, I_dC) + N(0, I_dC)        its weights; its bias b_i likewise
        x ~ N(v_i, diag(j^-1.2)), j = 1 to d             its records
        y = arg max (W_i^T x + b_i)

    then a share ``relabelled`` of records, each by itself, has a label drawn from all classes: one
    in ``classes`` of them keeps its own. (Li et al. (2020) draw one offset for all coordinates
    of a client instead.) A sum of two normal numbers is drawn as one.

    Even at alpha = beta = 0 clients have models of their own. alpha scales W_i and b_i alike, and
    an arg max does not see that: no record depends on it. It is there because results name it.

    records: of every client, of which round(test_share * records) are in the test part.
    alpha, beta: >= 0. relabelled: in [0, 1]. test_share: in (0, 1); both parts must get records.
    seed: 0 to 2^32 - 1, or a generator.

    Costs clients * records * features normal draws, in float64. Raises ValueError for what is out
    of range.
    """
    check_finite("synthetic", "alpha", alpha, at_least=0.0)
    check_finite("synthetic", "beta", beta, at_least=0.0)
    sizes = {"clients": clients, "records": records, "features": features, "classes": classes}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"synthetic: {name} must be an integer >= 1, got {size}")
    if not 0 <= relabelled <= 1:
        raise ValueError(f"synthetic: relabelled must be a share in [0, 1], got {relabelled}")
    test = round(test_share * records) if 0 < test_share < 1 else 0
    if not 0 < test < records:
        raise ValueError(
            f"synthetic: test_share must be in (0, 1) and leave some of a client's {records} "
            f"records in both parts, got {test_share}"
        )
    stream = stream_of(seed)
    means = np.sqrt(beta + 1) * stream.standard_normal((clients, 1, features))
    weights = np.sqrt(alpha + 1) * stream.standard_normal((clients, features, classes))
    biases = np.sqrt(alpha + 1) * stream.standard_normal((clients, 1, classes))
    deviations = np.arange(1, features + 1) ** -0.6
    x = means + deviations * stream.standard_normal((clients, records, features))
    y = (x @ weights + biases).argmax(-1)
    anew = stream.random_sample(y.shape) < relabelled
    y = np.where(anew, stream.randint(classes, size=y.shape), y)

    # A client's records are exchangeable, so that the last ones are as good as random ones.
    def part(rows: slice) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(x[:, rows]).float(), torch.from_numpy(y[:, rows]).long()
        return found[0].flatten(0, 1), found[1].flatten()

    (x_train, y_train), (x_test, y_test) = part(slice(records - test)), part(slice(-test, None))
    offsets = torch.arange(clients + 1) * (records - test)
    partition = Partition(torch.arange(len(y_train)), offsets)
    return Synthetic(x_train, y_train, partition, x_test, y_test)
