"""The cases of the benchmarks: all operations, plain forms that are right, and what is refused."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.accuracy import allowed_error, largest_error
from benchmarks.cases import noise
from benchmarks.cases.clip import half, several, single
from benchmarks.registry import all_cases
from benchmarks.timing import Spread
from dpkernels import backend

CPU = torch.device("cpu")


@pytest.mark.parametrize("quick", [False, True])
def test_every_operation_has_a_case(quick):
    assert {case.op for case in all_cases(CPU, quick=quick)} == set(backend.operations())


def test_every_target_names_a_form_of_its_case():
    for case in all_cases(CPU):
        names = [form.name for form in case.plain]
        assert len(set(names)) == len(names)
        assert case.target.against is None or case.target.against in names


def test_allowed_error_is_twice_that_of_plain_plus_an_ulp():
    truth = [torch.tensor([1.0, -4.0], dtype=torch.float64)]
    plain = [torch.tensor([1.5, -4.0])]
    assert allowed_error(plain, truth) == 2 * 0.5 + 4 * torch.finfo(torch.float32).eps
    assert largest_error(plain, truth) == 0.5
    assert largest_error([torch.tensor([float("nan"), -4.0])], truth) == float("inf")


def test_spread_has_the_quantiles():
    spread = Spread.of([float(n) for n in range(101)])
    quantiles = (spread.p10, spread.p25, spread.median, spread.p75, spread.p90)
    assert quantiles == (10, 25, 50, 75, 90) and spread.count == 101


def powers_of_two(batch: int, width: int, generator: torch.Generator) -> Tensor:
    """Return rows of 1, 4 or 16 ones and zeros: norms 1, 2 and 4, so no form has to round."""
    rows = torch.zeros(batch, width)
    for row in rows:
        ones = min(
            4 ** int(torch.randint(3, (), generator=generator)), 4 ** int(np.log2(width) / 2)
        )
        row[torch.randperm(width, generator=generator)[:ones]] = 1.0
    return rows


def clipped_at_two(norms: Tensor) -> Tensor:
    return (2.0 / norms).clamp(max=1.0)


WIDTHS = [300, 4, 17, 1]
BLOCK = [4 * 322 * 3]  # three rows, so that of 16 the last block has one
FLAT_FORMS = [
    *[(form, [322]) for form in single.single_forms(clipped_at_two, BLOCK)],
    *[(form, WIDTHS) for form in several.list_forms(clipped_at_two, BLOCK)],
    *[(form, WIDTHS) for form in half.half_forms(clipped_at_two, BLOCK)],
]


@pytest.mark.parametrize(("form", "widths"), FLAT_FORMS, ids=lambda v: getattr(v, "name", ""))
def test_plain_clipped_sums_are_right(form, widths):
    rows = powers_of_two(16, 322, torch.Generator().manual_seed(1))
    norms = rows.sum(1).sqrt()
    wanted = (clipped_at_two(norms).unsqueeze(1) * rows).sum(0).split(widths)
    outputs = form.run(*form.arguments([part.contiguous() for part in rows.split(widths, dim=1)]))
    assert len(outputs) == len(wanted)
    assert all(torch.equal(out, exact) for out, exact in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize(
    "form",
    several.per_layer_forms([clipped_at_two] * len(WIDTHS), BLOCK),
    ids=lambda form: form.name,
)
def test_plain_per_layer_sums_are_right(form):
    generator = torch.Generator().manual_seed(1)
    tensors = [powers_of_two(16, width, generator) for width in WIDTHS]
    outputs = form.run(*form.arguments(tensors))
    for out, g in zip(outputs, tensors, strict=True):
        factors = clipped_at_two(g.sum(1).sqrt())
        assert torch.equal(out, (factors.unsqueeze(1) * g).sum(0))


def repeated(z: Tensor) -> Tensor:
    return torch.cat([z[: z.numel() // 2]] * 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda z: z, None),
        (lambda z: z + 0.1, "mean"),
        (lambda z: 1.1 * z, "variance"),
        (lambda z: z.clamp(-2, 2) * 1.0656, "fourth moment"),
        (repeated, "correlation"),
        (lambda z: z.new_full(z.shape, float("nan")), "mean"),
    ],
)
def test_noise_of_another_distribution_is_refused(change, reason):
    generator = torch.Generator().manual_seed(3)
    x, z = torch.randn(2, 40_000, generator=generator)
    found = noise._looks_normal([x], [x + noise.STD * change(z)])
    assert (found is None) if reason is None else (found is not None and reason in found)
