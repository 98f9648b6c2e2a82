"""The operators under ``torch.library.opcheck`` and ``torch.compile``: no graph break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import dpkernels
from dpkernels import backend as backends
from dpkernels.ops import clip
from dpkernels.ops.noise import add_gaussian_noise_, add_row_noise_
from python_tests.conftest import running_on
from python_tests.ops import clip_cases as cases

OPERATIONS = (*cases.OPERATIONS, "add_gaussian_noise_", "add_row_noise_")

operators = torch.ops.dpkernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["reference", "cpp"])
def compilable(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on the backends that can be compiled for CPU tensors."""
    with running_on(request.param, OPERATIONS):
        yield request.param


def lists(batch: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return gradients as one tensor, and as several, of which one is empty and one strided."""
    grads = [cases.gradients(batch, width, dtype) for width in (5, 0, 33)]
    return [grads[:1], [*grads[:2], cases.LAYOUTS["transposed"](grads[2])]]


def buffers(grads: list[Tensor]) -> list[Tensor]:
    """Return zeros to sum ``grads`` into."""
    return [torch.zeros(g.shape[1], dtype=cases.sum_dtype(g.dtype)) for g in grads]


@pytest.mark.parametrize(("batch", "dtype"), [(0, torch.float32), *((7, d) for d in cases.DTYPES)])
def test_opcheck_of_the_clip_operators(batch: int, dtype: torch.dtype) -> None:
    check = torch.library.opcheck
    sums = cases.sum_dtype(dtype)
    for grads in lists(batch, dtype):
        layers = len(grads)
        for per_tensor in (False, True):
            check(operators.row_sq_norms.default, (grads, per_tensor))
        for rows in {1, layers}:
            norms = torch.rand(rows, batch, dtype=torch.float64) + 0.5
            bounds = [1.0] * rows
            factors = torch.rand(rows, batch, dtype=sums)
            out = buffers(grads)
            check(operators.clip_factors.default, (norms, bounds, rows == 1, 0.01, sums))
            check(operators.weighted_row_sum_.default, (out, grads, factors, True))
            check(operators.clip_and_sum_.default, (out, grads, bounds, False, 0.01, rows == 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_of_the_noise_operators(dtype: torch.dtype) -> None:
    strided = torch.zeros(8, 6, dtype=dtype)[:, ::2]
    for xs in ([], [torch.zeros(65, dtype=dtype)], [torch.zeros((), dtype=dtype), strided]):
        arguments = (xs, 1.5, -(2**63) + 1, 2**40, 0.5)
        torch.library.opcheck(operators.add_gaussian_noise_.default, arguments)
    for x in (torch.zeros(0, 5, dtype=dtype), torch.zeros(4, 80, dtype=dtype)[:, 5:70]):
        streams = torch.arange(2 * len(x)).view(2, -1) - torch.tensor([[2**62], [0]])
        torch.library.opcheck(operators.add_row_noise_.default, (x, 1.5, *streams, 0.5))


def norms_and_factors(grads: Any) -> Tensor:
    """Both operators that return what they compute, and a list form of each."""
    flat = clip.clip_factors(clip.row_sq_norms(grads), 1.0, "automatic")
    layers = clip.clip_factors(clip.row_sq_norms(grads, per_tensor=True), [1.0, 2.0], "per_layer")
    return flat + layers.sum(0)


def weighted(grads: Any) -> Any:
    """Weighted sums of a list."""
    factors = torch.linspace(0, 1, grads[0].shape[0], dtype=cases.sum_dtype(grads[0].dtype))
    return clip.weighted_row_sum(grads, factors)


def weighted_into(grads: Any) -> Any:
    """Weighted sum of one tensor, added to a buffer that is made in the graph."""
    out = torch.ones(grads[0].shape[1], dtype=cases.sum_dtype(grads[0].dtype))
    factors = torch.ones(grads[0].shape[0], dtype=out.dtype)
    clip.weighted_row_sum(grads[0] * 2, factors, out=out, accumulate=True)
    return out * 3


def clipped(grads: Any) -> Any:
    """Clipped sum of one tensor."""
    result = clip.clip_and_sum(grads[0] + 1, 1.0)
    return result.sum, result.factors, result.sq_norms, result.nonfinite()


def clipped_layers(grads: Any) -> Any:
    """Clipped sums of a list, accumulated twice, then noise."""
    out = [torch.zeros(g.shape[1], dtype=cases.sum_dtype(g.dtype)) for g in grads]
    clip.clip_and_sum(grads, [1.0, 2.0], "per_layer", out=out)
    clip.clip_and_sum(grads, 0.5, "automatic", out=out, accumulate=True)
    add_gaussian_noise_(out, clip.sensitivity([1.0, 2.0], "per_layer"), 3, 4, scale=0.5)
    return out


def noisy_rows(grads: Any) -> Any:
    """Noise for every row, of streams that are made in the graph."""
    rows = grads[0].float() * 2
    counters = torch.arange(len(rows))
    add_row_noise_(rows, 0.5, counters // 2 - 2, counters, scale=3.0)
    return rows - 1


FUNCTIONS = [norms_and_factors, weighted, weighted_into, clipped, clipped_layers, noisy_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_graph_break_and_the_same_result(
    compilable: str, function: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for batch in (6, 9):
        grads = [cases.gradients(batch, width, dtype) for width in (33, 5)]
        torch.testing.assert_close(compiled(grads), function(grads), rtol=0, atol=0)


@pytest.mark.parametrize("compilable", ["cpp"], indirect=True)
def test_inductor_compiles_the_whole_flow(compilable: str) -> None:
    grads = [cases.gradients(8, width, torch.float32) for width in (33, 5)]
    compiled = torch.compile(clipped_layers, fullgraph=True)
    torch.testing.assert_close(compiled(grads), clipped_layers(grads), rtol=0, atol=0)


def test_a_buffer_from_outside_is_written(compilable: str) -> None:
    def accumulate(grads: Tensor, out: Tensor) -> None:
        clip.clip_and_sum(grads, 1.0, out=out, accumulate=True)
        add_gaussian_noise_(out, 0.5, 1, 2)

    grads = cases.gradients(6, 17, torch.float32)
    eager, compiled = torch.ones(17), torch.ones(17)
    accumulate(grads, eager)
    torch.compile(accumulate, fullgraph=True, backend="aot_eager")(grads, compiled)
    assert torch.equal(eager, compiled) and not torch.equal(eager, torch.ones(17))


def test_counters_and_keys_do_not_compile_again(compilable: str) -> None:
    counting = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, key: int, counter: int) -> None:
        add_gaussian_noise_(x, 1.0, key, counter, scale=0.5)

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    start = 2**61 + 12345
    for index in range(12):
        for key in (17 + index, -(2**62) - index):
            eager, x = torch.ones(70), torch.ones(70)
            step(eager, key, start + index)
            compiled(x, key, start + index)
            assert torch.equal(x, eager)
    # Once with the first numbers as constants, then with symbols: of either sign of the key.
    assert counting.frame_count <= 3


@pytest.mark.parametrize(
    ("counters", "match"), [([5, 5], "same key and counter"), ([5, -1], "a negative one")]
)
def test_a_compiled_function_refuses_streams_too(
    compilable: str, counters: list[int], match: str
) -> None:
    compiled = torch.compile(add_row_noise_, fullgraph=True, backend="aot_eager")
    keys, x = torch.tensor([3, 3]), torch.ones(2, 70)
    compiled(x, 1.0, keys, torch.tensor([5, 6]))
    before = x.clone()
    with pytest.raises((ValueError, RuntimeError), match=match):
        compiled(x, 1.0, keys, torch.tensor(counters))
    assert torch.equal(x, before)


def test_changing_batch_sizes_do_not_compile_again(compilable: str) -> None:
    counting = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(clipped, fullgraph=True, backend=counting)
    for batch in (4, 6, 7, 11, 13, 19, 33):
        compiled([cases.gradients(batch, 5, torch.float32)])
    assert counting.frame_count <= 2


class Graphs:
    """A compiler that runs graphs as they are and remembers which of our operators were in them."""

    def __init__(self) -> None:
        self.operators: list[set[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Record the names of dpkernels operators in ``graph``."""
        targets = (str(node.target) for node in graph.graph.nodes)
        self.operators.append({t.split(".")[1] for t in targets if t.startswith("dpkernels.")})
        return graph.forward


@pytest.mark.skipif(backends.extension is None, reason="needs two backends that can be compiled")
def test_use_backend_around_a_compiled_function_changes_what_runs() -> None:
    graphs = Graphs()
    compiled = torch.compile(clipped, fullgraph=True, backend=graphs)
    grads = [cases.gradients(6, 5, torch.float32)]
    compiled(grads)
    with dpkernels.use_backend("reference"):
        compiled(grads)
    compiled(grads)
    with dpkernels.use_backend("cpp"):
        compiled(grads)
    assert graphs.operators[:2] == [{"clip_and_sum_"}, set()]
    assert set() not in graphs.operators[2:]


@pytest.mark.skipif(backends.extension is None, reason="needs two backends that can be compiled")
def test_use_backend_in_a_compiled_function_changes_what_runs() -> None:
    graphs = Graphs()

    def both(grads: Tensor) -> tuple[Tensor, Tensor]:
        with dpkernels.use_backend("reference"):
            norms = clip.row_sq_norms(grads)
        return norms, clip.clip_and_sum(grads, 1.0).factors

    compiled = torch.compile(both, fullgraph=True, backend=graphs)
    compiled(cases.gradients(6, 5, torch.float32))
    assert graphs.operators == [{"clip_and_sum_"}]


def test_a_request_that_cannot_be_served_raises_under_compile() -> None:
    compiled = torch.compile(clipped, backend="aot_eager")
    with (
        dpkernels.use_backend("cuda"),
        pytest.raises(Exception, match="backend 'cuda' was asked for"),
    ):
        compiled([cases.gradients(6, 5, torch.float32)])


def test_bad_input_raises_under_compile(compilable: str) -> None:
    def negative(grads: Tensor) -> Any:
        return clip.clip_and_sum(grads, -1.0).sum

    with pytest.raises(Exception, match="max_norm must be a finite number > 0"):
        torch.compile(negative, backend="aot_eager")(torch.ones(3, 4))


def test_operators_called_directly_refuse_shared_memory(cpp: str) -> None:
    buffer, grads = torch.zeros(20), torch.ones(4, 10)
    ops = torch.ops.dpkernels
    with pytest.raises(ValueError, match="shares memory"):
        ops.clip_and_sum_([buffer[:10], buffer[5:15]], [grads, grads], [1.0], False, 0.01, False)
    with pytest.raises(ValueError, match="shares memory"):
        ops.clip_and_sum_([grads[1]], [grads], [1.0], False, 0.01, False)
    factors = torch.ones(1, 4)
    with pytest.raises(ValueError, match="shares memory"):
        ops.weighted_row_sum_([factors[0]], [torch.ones(4, 4)], factors, False)
    with pytest.raises(ValueError, match="shares memory"):
        ops.add_gaussian_noise_([buffer[:10], buffer[9:]], 1.0, 1, 1, 1.0)
    assert not buffer.any() and torch.equal(grads, torch.ones(4, 10))


def test_fake_tensors_have_no_addresses_to_compare() -> None:
    with FakeTensorMode():
        out = torch.empty(6)
        assert clip.clip_and_sum(torch.empty(3, 6), 1.0, out=out).sum is out
