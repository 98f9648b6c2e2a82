"""The operators of ``roots``: bad input refused with the reason, opcheck, torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dpkernels
from dpkernels.ops import roots
from python_tests.conftest import running_on
from python_tests.ops import root_cases as cases

OPERATIONS = cases.OPERATIONS
operators = torch.ops.dpkernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that there are; no operation of this room has a Triton version."""
    with running_on(request.param, OPERATIONS):
        yield request.param


def calls() -> dict[str, Any]:
    """Return every way to hand matrices to this room."""
    return {
        "eigh": roots.eigh,
        "inverse_root": lambda m: roots.inverse_root(m, damping=0.1),
    }


@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_elements_are_refused_and_named(
    backend: str, call: str, n: int, value: float
) -> None:
    good, bad = torch.eye(4), torch.eye(n).repeat(3, 1, 1)
    bad[2, n - 1, 0] = value
    message = rf"{call}: matrix 1 of the list \(number 2 of its batch, {n} x {n}\) has NaN or Inf"
    with pytest.raises(ValueError, match=message):
        calls()[call]([good, bad])


@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("n", [3, 70])
def test_matrices_that_are_not_symmetric_are_refused(backend: str, call: str, n: int) -> None:
    bad = torch.eye(n)
    bad[0, n - 1] = 0.5
    with pytest.raises(ValueError, match=rf"matrix 1 .*{n} x {n}\) is not symmetric: .* 0.5"):
        calls()[call]([torch.eye(2), bad])


WRONG = {
    r"must be \[n, n\] or \[b, n, n\], got \[3, 4\]": lambda: torch.ones(3, 4),
    r"must be \[n, n\] or \[b, n, n\], got \[3\]": lambda: torch.ones(3),
    r"must be \[n, n\] or \[b, n, n\], got \[1, 1, 2, 2\]": lambda: torch.ones(1, 1, 2, 2),
    "must be float32 or float64, got torch.float16": lambda: torch.eye(3).half(),
    "must be float32 or float64, got torch.int64": lambda: torch.eye(3).long(),
    "must share dtype and device, got .*float32 .* and .*float64": lambda: [
        torch.eye(3),
        torch.eye(3).double(),
    ],
}


@pytest.mark.parametrize("call", calls())
@pytest.mark.parametrize("message", WRONG)
def test_wrong_shapes_and_dtypes_are_refused(call: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{call}: .*{message}"):
        calls()[call](WRONG[message]())


def test_wrong_settings_are_refused() -> None:
    a = torch.eye(3)
    unknown: Any = "magic"
    with pytest.raises(ValueError, match="method must be one of auto, ql, jacobi, lapack"):
        roots.eigh(a, method=unknown)
    with pytest.raises(ValueError, match="method must be one of auto, eigh, tridiagonal, newton"):
        roots.inverse_root(a, damping=1.0, method=unknown)
    for damping in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="damping must be a finite number >= 0"):
            roots.inverse_root(a, damping=damping)
    with pytest.raises(ValueError, match="one for each of 1 matrices, got 2"):
        roots.inverse_root(a, damping=[1.0, 2.0])
    with pytest.raises(ValueError, match="power must be a finite number"):
        roots.inverse_root(a, power=float("nan"), damping=1.0)
    for power in (-1.5, 0.0, 0.5):
        with pytest.raises(ValueError, match="tridiagonal needs -1 <= power < 0"):
            roots.inverse_root(a, power=power, damping=1.0, method="tridiagonal")
    for power in (-0.3, 0.5, -2.0):
        with pytest.raises(ValueError, match="newton_schulz needs power = -1/p"):
            roots.inverse_root(a, power=power, damping=1.0, method="newton_schulz")
    with pytest.raises(ValueError, match="rank must be >= 0, got -1"):
        roots.low_rank_inverse_root([a], -1, damping=1.0)
    with pytest.raises(ValueError, match="must be a list of"):
        roots.low_rank_inverse_root(a, 1, damping=1.0)
    with pytest.raises(ValueError, match=r"matrix 0 .* is singular .*damping > 0"):
        roots.low_rank_inverse_root([torch.diag(torch.tensor([1.0, 0.0]))], 2, damping=0.0)


def test_operators_called_directly_check_for_themselves(cpp: str) -> None:
    a = torch.eye(3)[None]
    with pytest.raises(ValueError, match=r"must be \[b, n, n\]"):
        operators.eigh([a[0]], "auto")
    with pytest.raises(ValueError, match="share one dtype"):
        operators.eigh([a, a.double()], "auto")
    with pytest.raises(ValueError, match="method must be auto, ql, jacobi or lapack, got no"):
        operators.eigh([a], "no")
    with pytest.raises(ValueError, match="damping must have 1 numbers, got 2"):
        operators.inverse_root([a], -0.5, [1.0, 2.0], "auto")


def test_newton_schulz_is_plain_pytorch() -> None:
    with (
        dpkernels.use_backend("cpp"),
        pytest.raises(dpkernels.backend.BackendUnavailable, match="no compiled CPU"),
    ):
        roots.inverse_root(torch.eye(3), damping=1.0, method="newton_schulz")


def lists(dtype: torch.dtype) -> list[list[Tensor]]:
    """Return lists of batches: none, one, and several with an empty and a strided one."""
    batches = [cases.second_moment(n, 9, dtype, batch=3) for n in (4, 1, 70)]
    strided = batches[2].mT
    return [[], batches[:1], [batches[0], batches[0][:0], batches[0][:, :0, :0], strided]]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    for matrices in lists(dtype):
        damping = [0.1] * len(matrices)
        torch.library.opcheck(operators.eigh.default, (matrices, "auto"))
        torch.library.opcheck(operators.inverse_root.default, (matrices, -0.5, damping, "auto"))
        torch.library.opcheck(operators.inverse_root_newton.default, (matrices, 2, damping))


def everything(matrices: list[Tensor]) -> list[Tensor]:
    """Every operator of the room in one graph, with arithmetic around it."""
    values, vectors = roots.eigh([m * 2 for m in matrices])
    rebuilt = [x * v.unsqueeze(-2) @ x.mT for v, x in zip(values, vectors, strict=True)]
    root = roots.inverse_root(rebuilt, damping=0.5)
    newton = roots.inverse_root(matrices[0], damping=0.5, method="newton_schulz")
    return [*(r + 1 for r in root), newton]


def test_no_graph_break_and_the_same_result() -> None:
    matrices = [cases.second_moment(n, 9, torch.float32, batch=b) for n, b in ((5, 3), (70, 2))]
    if dpkernels.explain("eigh").chosen != "cpp":
        pytest.skip("the reference reads values to refuse bad ones, which is a graph break")
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(matrices), everything(matrices), rtol=0, atol=0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_there_is_no_triton_version_and_info_says_so(operation: str) -> None:
    reasons = dpkernels.explain(operation, "cuda").reasons
    assert "no Triton implementation" in reasons["triton"]
