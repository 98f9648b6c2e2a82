"""Linear systems with clipped Hessians: Cholesky, conjugate gradients, feature covariance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dpkernels.ops import glm
from dpkernels.ops.glm import FeatureCovariance
from python_tests.conftest import CPP, running_on
from python_tests.ops.glm_cases import HESSIAN_BOUND, Problem, autograd_sums, problem, solved
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("glm_clipped_sums_", "glm_newton", "glm_feature_covariance")
# Those that torch.linalg and torch.bmm serve on GPUs.
WITHOUT_TRITON = ("glm_solve", "glm_newton_cg")
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(params=["reference", *CPP])
def on_cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on the backends that every operation has."""
    with running_on(request.param, (*OPERATIONS, *WITHOUT_TRITON)):
        yield request.param


def right_hand_sides(data: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (data.clients, *data.theta.shape[-2:])
    return torch.randn(shape, generator=generator).to(data.x.dtype)


def matrices(clients: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return positive semi-definite matrices of half rank."""
    generator = torch.Generator().manual_seed(n)
    roots = torch.randn(clients, n, n // 2, generator=generator, dtype=torch.float64)
    return (roots @ roots.mT / n).to(dtype)


# Around the block rows of 64, and around the two vectors of a strip.
@pytest.mark.parametrize("n", [1, 2, 31, 63, 64, 65, 81, 130, 200])
def test_solutions_are_as_accurate_as_those_of_torch(on_cpu: str, n: int) -> None:
    # Many: what is asked for must not hang on the luck of a few.
    hessians = matrices(24, n, torch.float32)
    v = torch.randn(24, n, generator=torch.Generator().manual_seed(1))
    gamma = torch.tensor([0.5, 1.0, 0.1], dtype=torch.float64).repeat(8)
    exact = solved(hessians.double(), v.double(), gamma)
    assert_as_accurate(glm.solve(hessians, v, gamma), solved(hessians, v, gamma), exact)


@pytest.mark.parametrize("n", [3, 65, 130])
def test_float64_solutions_leave_a_float64_residual(on_cpu: str, n: int) -> None:
    hessians, v = matrices(2, n), torch.ones(2, n, dtype=torch.float64)
    damped = hessians + 0.5 * torch.eye(n, dtype=torch.float64)
    actual, plain = glm.solve(hessians, v, 0.5), solved(hessians, v, 0.5)

    def image(y: Tensor) -> Tensor:
        return (damped @ y.unsqueeze(2)).squeeze(2)

    assert_as_accurate(image(actual), image(plain), v)


def test_only_one_triangle_is_read(cpp: str) -> None:
    hessians = matrices(2, 70, torch.float32)
    v = torch.ones(2, 70)
    wanted = glm.solve(hessians, v, 1.0)
    below = hessians.clone()
    below[:, *torch.tril_indices(70, 70, -1)] = torch.nan
    assert torch.equal(glm.solve(below, v, 1.0), wanted)


def test_shapes_of_right_hand_sides(on_cpu: str) -> None:
    hessians, v = matrices(3, 12, torch.float32), torch.randn(3, 4, 3)
    actual = glm.solve(hessians, v, 1.0)
    assert actual.shape == v.shape
    assert torch.equal(actual.flatten(1), glm.solve(hessians, v.flatten(1), 1.0))
    strided = hessians.mT.contiguous().mT
    assert torch.equal(glm.solve(strided, v, 1.0), actual)
    assert glm.solve(torch.zeros(0, 5, 5), torch.zeros(0, 5), 1.0).shape == (0, 5)


@pytest.mark.parametrize("value", [-1.0, torch.nan])
@pytest.mark.parametrize("place", [0, 66])
def test_a_matrix_that_is_not_positive_definite_names_its_client(
    on_cpu: str, value: float, place: int
) -> None:
    hessians = matrices(4, 70, torch.float32)
    hessians[2, place, place] = value
    hessians[2, place, :place] = hessians[2, :place, place] = 0.0
    with pytest.raises(ValueError, match=rf"solve: the matrix of client 2 .*pivot {place + 1}\)"):
        glm.solve(hessians, torch.ones(4, 70), 0.5)


def newton(data: Problem, v: Tensor, gamma: float | Tensor, scale: float | Tensor = 1.0) -> Tensor:
    return glm.newton_step(
        data.records, data.theta, v, hessian_bound=HESSIAN_BOUND, gamma=gamma, scale=scale
    ).solutions


# The last two need no matrix at all.
SHAPES = [
    (3, 5, [4, 0, 7]),
    (5, 7, [30, 9]),
    (2, 33, [17, 1]),
    (1, 4, [3]),
    (4, 3, [0]),
]


def check_newton(data: Problem) -> None:
    """Hold a Newton step to the float64 Hessians of autograd."""
    v = right_hand_sides(data)
    exact = solved(autograd_sums(data.to(torch.float64))[1], v.double(), 0.3)
    plain = solved(autograd_sums(data)[1], v, 0.3)
    assert_as_accurate(newton(data, v, 0.3), plain, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_steps_solve_with_the_clipped_sums_of_autograd(
    backend: str, shape: tuple[int, int, list[int]]
) -> None:
    check_newton(problem(*shape))


def test_newton_steps_of_more_records_than_one_product_takes(cpp: str) -> None:
    check_newton(problem(3, 4, [300, 257]))


def test_newton_steps_in_float64(backend: str) -> None:
    data = problem(4, 6, [9, 20], torch.float64)
    v = right_hand_sides(data)
    hessians = autograd_sums(data)[1]
    damped = hessians + 0.3 * torch.eye(24, dtype=torch.float64)
    actual, plain = newton(data, v, 0.3), solved(hessians, v, 0.3)

    def image(y: Tensor) -> Tensor:
        return (damped @ y.flatten(1).unsqueeze(2)).reshape(v.shape)

    # Twice what the solver of torch leaves, plus what a last digit of H is worth.
    slack = torch.finfo(torch.float64).eps * (damped.abs().sum(2).max() * actual.abs().max())
    error = (image(actual) - v).abs().max()
    assert error <= 2 * (image(plain) - v).abs().max() + slack


def test_damping_and_scale_of_every_client(backend: str) -> None:
    data = problem(3, 4, [6, 3])
    v = right_hand_sides(data)
    gamma = torch.tensor([0.2, 0.7], dtype=torch.float64)
    scale = torch.tensor([1 / 6, 1 / 3], dtype=torch.float64)
    hessians = autograd_sums(data.to(torch.float64))[1] * scale[:, None, None]
    plain = solved(hessians.float(), v, gamma)
    assert_as_accurate(newton(data, v, gamma, scale), plain, solved(hessians, v.double(), gamma))


def test_a_damping_that_is_lost_in_rounding_names_the_client(backend: str) -> None:
    data = problem(3, 8, [6, 1])
    gamma = torch.tensor([1.0, 1e-40], dtype=torch.float64)
    with pytest.raises(ValueError, match="newton_step: the matrix of client 1 is not positive"):
        newton(data, right_hand_sides(data), gamma)


def test_newton_steps_leave_out_what_is_not_finite(backend: str) -> None:
    data = problem(3, 4, [6, 3])
    broken, zeroed = data.x.clone(), data.x.clone()
    broken[1, 2], zeroed[1] = torch.nan, 0.0
    v = right_hand_sides(data)
    results = [
        glm.newton_step(
            Problem(x, data.labels, data.offsets, data.theta).records,
            data.theta,
            v,
            hessian_bound=HESSIAN_BOUND,
            gamma=0.3,
        )
        for x in (broken, zeroed)
    ]
    assert torch.equal(results[0].solutions, results[1].solutions)
    assert (~results[0].hessian_sq_norms.isfinite()).sum() == 1


def cg(data: Problem, v: Tensor, **limits: float) -> glm.CgStep:
    return glm.newton_step_cg(
        data.records, data.theta, v, hessian_bound=HESSIAN_BOUND, gamma=0.3, **limits
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (6, 10, [130, 40])], ids=str)
def test_conjugate_gradients_reach_the_tolerance(
    on_cpu: str, shape: tuple[int, int, list[int]], dtype: torch.dtype
) -> None:
    data = problem(*shape, dtype)
    v = right_hand_sides(data)
    result = cg(data, v, tolerance=1e-4, max_iterations=200)
    exact = autograd_sums(data.to(torch.float64))[1]
    exact += 0.3 * torch.eye(exact.shape[1], dtype=torch.float64)
    image = (exact @ result.solutions.double().flatten(1).unsqueeze(2)).reshape(v.shape)
    residuals = (image - v).flatten(1).norm(dim=1) / v.double().flatten(1).norm(dim=1)
    assert (residuals <= 1.01e-4).all() and (result.iterations < 200).all()
    eps = torch.finfo(dtype).eps
    # The residual is a difference of vectors of about |v|, so it is known to some ulps of one.
    assert ((result.residuals - residuals).abs() <= 64 * eps).all()


def test_every_client_stops_by_itself(on_cpu: str) -> None:
    data = problem(4, 6, [0, 1, 40])
    v = right_hand_sides(data)
    together = cg(data, v, tolerance=1e-5)
    assert together.iterations[0] == 1, "gamma I takes one iteration"
    assert together.iterations[0] < together.iterations[1] < together.iterations[2]
    for client, (count, theta) in enumerate(zip([0, 1, 40], data.theta, strict=True)):
        x, labels, _ = data.client(client)
        alone = cg(Problem(x, labels, [0, count], theta), v[client : client + 1], tolerance=1e-5)
        assert alone.iterations[0] == together.iterations[client]


def test_limits_of_conjugate_gradients(on_cpu: str) -> None:
    data = problem(4, 6, [20, 30])
    v = right_hand_sides(data)
    nothing = cg(data, v, max_iterations=0)
    assert not nothing.solutions.any() and not nothing.iterations.any()
    assert torch.equal(nothing.residuals, torch.ones(2, dtype=torch.float64))
    three = cg(data, v, tolerance=0.0, max_iterations=3)
    assert three.iterations.tolist() == [3, 3]
    assert (three.residuals < 1).all() and (three.residuals > 1e-5).all()
    v[0] = 0.0
    zero = cg(data, v)
    assert zero.iterations[0] == 0 and zero.residuals[0] == 0 and not zero.solutions[0].any()
    assert zero.iterations[1] > 0


@pytest.mark.parametrize("shape", [(3, 5, [4, 0, 7]), (2, 33, [70, 1]), (4, 1, [9])], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_feature_covariance_solves_for_all_classes(
    backend: str, shape: tuple[int, int, list[int]], scale: float
) -> None:
    data = problem(*shape)
    v = right_hand_sides(data)
    features = shape[1]

    def covariances(dtype: torch.dtype) -> Tensor:
        sums = []
        for client in range(data.clients):
            x = data.client(client)[0].to(dtype)
            factors = (0.5 / x.square().sum(1)).clamp(max=1.0)
            sums.append((x * factors.unsqueeze(1)).mT @ x)
        return torch.stack(sums) * scale + 0.1 * torch.eye(features, dtype=dtype)

    def solution(dtype: torch.dtype) -> Tensor:
        whole = torch.stack(
            [torch.kron(torch.eye(shape[0], dtype=dtype), k) for k in covariances(dtype)]
        )
        return solved(whole, v.to(dtype), 0.0)

    factored = FeatureCovariance.factor(data.records, bound=0.5, gamma=0.1, scale=scale)
    actual = factored.solve(v)
    assert_as_accurate(actual, solution(torch.float32), solution(torch.float64))
    wanted = data.x.double().square().sum(1).square()
    assert_as_accurate(factored.sq_norms.float(), wanted.float(), wanted)
    assert torch.equal(factored.solve(v), actual), "a factorisation serves more than one round"


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    data = problem(4, 9, [30, 3, 20, 0, 11])
    v = right_hand_sides(data)

    def results() -> list[Tensor]:
        hessians = matrices(5, 36, torch.float32)
        solutions = [newton(data, v, 0.3), *cg(data, v), glm.solve(hessians, v, 0.3)]
        return [*solutions, FeatureCovariance.factor(data.records, bound=0.5, gamma=0.1).factors]

    several = results()
    torch.set_num_threads(1)
    for actual, wanted in zip(several, results(), strict=True):
        assert torch.equal(actual, wanted)
