"""``sherman_morrison``: the step of DP-FedSOFIM, updates of an inverse, solves with a window.

d parameters, an inverse of n x n, a window of k gradients, all float32:

============================  ==================  ==============  =================================
operation                     bytes               flops           of the bytes
============================  ==================  ==============  =================================
``sofim_step_``               7 * 4 d             12 d            M, G read; M, G, theta read;
                                                                  M, theta written
``rank_one_inverse_update_``  3 * 4 n^2           6 n^2           H read for both products; read and
                                                                  written
the same, symmetric           2.5 * 4 n^2         5 n^2           half of H read for the product
``window_gram``               4 k d               d (k+1)(k+2)    window read once; half of the
                                                                  products, which are symmetric
``window_project``            4 (k + 1) d         2 k d           window and g read
``window_combine_``           4 (k + 2) d         2 k d           the same, and the result written
============================  ==================  ==============  =================================
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases.sherman_morrison.inverse import inverse_case
from benchmarks.cases.sherman_morrison.step import AGAINST, step_case
from benchmarks.cases.sherman_morrison.window import combine_case, gram_case, project_case
from benchmarks.registry import Case, Target

# Weights and biases of a 784-512-384-128-128-64-10 perceptron: 673,610 values.
MODEL = (401_408, 512, 196_608, 384, 49_152, 128, 16_384, 128, 8_192, 64, 640, 10)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the sizes of the claim, a model's tensors, and the parts of the other solves."""
    if quick:
        yield step_case((100_003,))
        yield step_case((3_000, 7, 500))
        yield from (inverse_case(130, symmetric) for symmetric in (True, False))
        yield from (case(5, 20_001) for case in (gram_case, project_case, combine_case))
        return
    for d in (1_000_000, 10_000_000, 50_000_000):
        yield step_case((d,), Target(1.8, AGAINST, percent_of_bound=70.0))
    yield step_case(MODEL)
    yield from (inverse_case(2_048, symmetric) for symmetric in (True, False))
    for k, d in ((16, 1_000_000), (64, 500_000)):
        yield from (case(k, d) for case in (gram_case, project_case, combine_case))
