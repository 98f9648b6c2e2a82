"""SOFIM: the dense inverse applied to the gradient, exact resumes, refusals that write nothing."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.postprocess import DiSK, Sofim
from python_tests.postprocess.training import accuracy, made, parameters_of, train

LR, RHO = 0.3, 0.5
SHAPES = [(3, 4), (), (5,), (0, 2)]
SIZE = sum(math.prod(shape) for shape in SHAPES)
# Of two float64 computations of one step from numbers about 1, with a matrix of condition
# 1 + |M|^2 / rho < 1e3: far above their rounding, far below any mistake.
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def gradients(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(2), dtype=dtype)


def set_gradient(params, gradient: Tensor) -> None:
    for p, part in zip(params, gradient.split([p.numel() for p in params]), strict=True):
        p.grad = part.reshape(p.shape).clone()


def steps(optimizer, params, rows) -> None:
    for row in rows:
        set_gradient(params, row)
        optimizer.step()


def flat(params) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params]).clone()


def dense_step(fisher: Tensor, gradient: Tensor, rho: float = RHO) -> Tensor:
    return torch.linalg.solve(rho * torch.eye(len(fisher), dtype=fisher.dtype) + fisher, gradient)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_it_is_the_dense_formula_over_all_parameters(beta) -> None:
    params, rows = parameters(), gradients(6)
    optimizer = Sofim(params, LR, beta=beta, rho=RHO)
    theta, mean = flat(params), torch.zeros(SIZE, dtype=torch.float64)
    for g in rows:
        steps(optimizer, params, [g])
        mean = beta * mean + (1 - beta) * g
        theta = theta - LR * dense_step(torch.outer(mean, mean), g)
        torch.testing.assert_close(flat(params), theta, **CLOSE)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_window_is_the_mean_of_outer_products(k) -> None:
    params, rows = parameters(), gradients(8)
    optimizer = Sofim(params, LR, rho=RHO, window=k)
    theta = flat(params)
    for t, g in enumerate(rows):
        steps(optimizer, params, [g])
        last = rows[max(0, t + 1 - k) : t + 1]
        theta = theta - LR * dense_step(last.T @ last / len(last), g)
        torch.testing.assert_close(flat(params), theta, **CLOSE)


def test_a_window_of_one_is_a_normalised_gradient_and_no_memory() -> None:
    one, none = parameters(), parameters()
    rows, theta = gradients(4), flat(one)
    steps(Sofim(one, LR, rho=RHO, window=1), one, rows)
    steps(Sofim(none, LR, rho=RHO, beta=0.0), none, rows)
    for g in rows:
        theta = theta - LR * g / (RHO + g.dot(g))
    torch.testing.assert_close(flat(one), theta, **CLOSE)
    torch.testing.assert_close(flat(none), theta, **CLOSE)


def test_a_repeated_gradient_is_the_same_fisher_matrix_at_any_length() -> None:
    g = gradients(1)
    moved = []
    for k in (1, 2, 5):
        params = parameters()
        optimizer = Sofim(params, LR, rho=RHO, window=k)
        places = [flat(params)]
        for _ in range(4):
            steps(optimizer, params, g)
            places.append(flat(params))
        moved.append(torch.stack(places).diff(dim=0))
    # Divided by how many there are, rho weighs the same in the first step and with a full window.
    for steps_of_k in moved:
        torch.testing.assert_close(steps_of_k, moved[0][:1].expand(4, SIZE), **CLOSE)


@pytest.mark.parametrize("window", [None, 3])
def test_the_preconditioner_is_between_its_bounds(window) -> None:
    # In the form that a step shows: G.G / (rho + largest eigenvalue) <= G.HG <= G.G / rho.
    params, rows = parameters(), gradients(8)
    optimizer = Sofim(params, 1.0, rho=RHO, window=window)
    mean = torch.zeros(SIZE, dtype=torch.float64)
    for t, g in enumerate(rows):
        before = flat(params)
        steps(optimizer, params, [g])
        mean = 0.9 * mean + 0.1 * g
        last = rows[max(0, t - 2) : t + 1]
        largest = mean.dot(mean) if window is None else torch.linalg.matrix_norm(last, 2) ** 2
        largest = largest if window is None else largest / len(last)
        form, square = g.dot(before - flat(params)), g.dot(g)
        assert square / (RHO + largest) * (1 - 1e-10) <= form <= square / RHO * (1 + 1e-10)


def test_both_bounds_are_reached() -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Sofim([p], 1.0, beta=0.5, rho=0.5)
    steps(optimizer, [p], torch.tensor([[2.0, -4.0]], dtype=torch.float64))
    # M = (1, -2) is along G: G / (rho + |M|^2).
    torch.testing.assert_close(p.detach(), torch.tensor([-2.0, 4.0]).double() / 5.5, **CLOSE)
    with torch.no_grad():
        p.zero_()
    steps(optimizer, [p], torch.tensor([[0.0, 2.0]], dtype=torch.float64))
    # M = (0.5, 0) is across G: G / rho.
    assert p.tolist() == [0.0, -4.0]


@pytest.mark.parametrize("window", [None, 2])
def test_groups_are_vectors_of_their_own(window) -> None:
    rows = gradients(4)
    together, alone = parameters(), parameters()
    groups = [{"params": together[:1]}, {"params": together[1:], "lr": 0.1, "rho": 2.0}]
    steps(Sofim(groups, LR, rho=RHO, window=window), together, rows)
    split = alone[0].numel()
    steps(Sofim(alone[:1], LR, rho=RHO, window=window), alone[:1], rows[:, :split])
    steps(Sofim(alone[1:], 0.1, rho=2.0, window=window), alone[1:], rows[:, split:])
    assert torch.equal(flat(together), flat(alone))


@pytest.mark.parametrize("window", [None, 2])
def test_schedules_reach_it(window) -> None:
    params = parameters()
    optimizer = Sofim(params, 1.0, window=window)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.0)
    steps(optimizer, params, gradients(1))
    scheduler.step()
    before = flat(params)
    steps(optimizer, params, gradients(2))
    assert torch.equal(flat(params), before)


@pytest.mark.parametrize("window", [None, 2])
def test_what_is_not_trained_is_left_out(window) -> None:
    frozen, plain = parameters(), parameters()
    frozen[0].requires_grad_(False)
    start, rows = frozen[0].detach().clone(), gradients(3)[:, frozen[0].numel() :]
    steps(Sofim(frozen, LR, window=window), frozen[1:], rows)
    steps(Sofim(plain[1:], LR, window=window), plain[1:], rows)
    assert torch.equal(frozen[0], start)
    assert torch.equal(flat(frozen[1:]), flat(plain[1:]))
    nothing = Sofim(frozen[:1], LR, window=window)
    nothing.step()
    assert torch.equal(frozen[0], start)


@pytest.mark.parametrize("window", [None, 3])
def test_a_closure_gives_gradient_and_loss(window) -> None:
    params, plain = parameters(), parameters()
    optimizer = Sofim(params, LR, window=window)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    wanted = flat(params).square().sum()
    torch.testing.assert_close(optimizer.step(closure).detach(), wanted, **CLOSE)
    steps(Sofim(plain, LR, window=window), plain, [2 * flat(plain)])
    assert torch.equal(flat(params), flat(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("taken", [0, 2, 7])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path, window, taken, dtype) -> None:
    rows = gradients(taken + 5, dtype)
    whole, resumed = parameters(dtype), parameters(dtype)
    first = Sofim(whole, LR, window=window)
    steps(first, whole, rows[:taken])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for p, q in zip(resumed, whole, strict=True):
        p.data.copy_(q)
    # Its own settings are those of the checkpoint, as for any optimizer of torch.
    second = Sofim(resumed, 9.0, beta=0.1, rho=9.0)
    second.load_state_dict(state)
    kept = copy.deepcopy(state)
    steps(first, whole, rows[taken:])
    steps(second, resumed, rows[taken:])
    assert torch.equal(flat(resumed), flat(whole))
    torch.testing.assert_close(state, kept, rtol=0, atol=0)  # what was loaded is not written


@pytest.mark.parametrize("window", [None, 3])
def test_a_copy_goes_its_own_way(window) -> None:
    params = parameters()
    optimizer = Sofim(params, LR, window=window)
    steps(optimizer, params, gradients(2))
    twin, twins = copy.deepcopy((optimizer, params))
    rows = gradients(4)[2:]
    steps(optimizer, params, rows)
    steps(twin, twins, rows)
    assert torch.equal(flat(twins), flat(params))


def contents(value) -> list[object]:
    """Return all that is in a state, tensors as lists."""
    if isinstance(value, dict):
        return [contents(x) for x in value.values()]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_that_is_not_finite_writes_nothing(window, bad, several) -> None:
    params, rows = parameters(), gradients(5)
    groups = [{"params": params[:1]}, {"params": params[1:]}] if several else params
    optimizer = Sofim(groups, LR, window=window)
    steps(optimizer, params, rows[:4])
    before = flat(params), contents(copy.deepcopy(optimizer.state_dict()))
    rows[4, -1] = bad  # in the last group
    with pytest.raises(ValueError, match="not finite"):
        steps(optimizer, params, rows[4:])
    assert torch.equal(flat(params), before[0])
    assert contents(optimizer.state_dict()) == before[1]
    steps(optimizer, params, gradients(1))
    assert flat(params).isfinite().all()


@pytest.mark.parametrize("window", [None, 2])
def test_a_step_that_overflows_moves_no_parameter(window) -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1e-15, 0.0])
    with pytest.raises(
        ValueError, match=r"lr H G overflows torch.float32|lr / rho must be a finite"
    ):
        Sofim([p], 1e38, rho=1e-30, window=window).step()
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("window", [None, 2])
def test_a_missing_gradient_is_refused_before_anything_is_written(window) -> None:
    params = parameters()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = Sofim(groups, LR, window=window)
    before = flat(params)
    set_gradient(params, gradients(1)[0])
    params[2].grad = None
    with pytest.raises(RuntimeError, match=r"shape \[5\] has no gradient; call backward\(\)"):
        optimizer.step()
    assert torch.equal(flat(params), before)


def test_a_window_stays_with_its_parameters() -> None:
    params = parameters()
    optimizer = Sofim(params, LR, window=2)
    steps(optimizer, params, gradients(1))
    before = flat(params)
    params[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="build a new Sofim after such a change"):
        optimizer.step()
    params[0].requires_grad_(True)
    optimizer.param_groups[0]["window"] = 3
    with pytest.raises(RuntimeError, match=r"began with 2 gradients.*but now 3"):
        optimizer.step()
    assert torch.equal(flat(params), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
        ({"lr": math.nan}, "lr must be a finite number >= 0"),
        ({"rho": 0.0}, "rho must be a finite number > 0"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"window": 0}, "window must be an integer >= 1"),
        ({"window": 2.5}, "window must be an integer >= 1"),
    ],
)
def test_numbers_out_of_range(arguments, message) -> None:
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=f"^Sofim: {message}"):
        Sofim([p], **{"lr": 0.1, **arguments})
    optimizer = Sofim([p], 0.1)
    with pytest.raises(ValueError, match=f"^Sofim: {message}"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], **arguments})
    assert len(optimizer.param_groups) == 1


class Shard(nn.Parameter):
    placements = ()


def test_parameters_that_are_no_vector_of_float32_or_float64() -> None:
    single, double = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())
    for dtype in (torch.float16, torch.bfloat16):
        half = nn.Parameter(torch.zeros(2, dtype=dtype))
        with pytest.raises(ValueError, match=f"got \\[2\\] {dtype}; keep a float32 copy"):
            Sofim([half], 0.1)
        half.requires_grad_(False)
        Sofim([single, half], 0.1)  # it is not trained
    with pytest.raises(ValueError, match=r"one vector of one dtype.*groups of their own"):
        Sofim([single, double], 0.1)
    Sofim([{"params": [single]}, {"params": [double]}], 0.1)
    with pytest.raises(ValueError, match=r"shape \[2\] is sharded"):
        Sofim([Shard(torch.zeros(2))], 0.1)
    later = nn.Linear(2, 1)
    optimizer = Sofim(later.parameters(), 0.1)
    later.half()
    with pytest.raises(ValueError, match=r"^Sofim.step: .*float16; keep a float32 copy"):
        optimizer.step()


@pytest.mark.parametrize("window", [None, 2])
def test_private_training_without_noise_is_the_dense_formula(window) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain = copy.deepcopy(model)
    clip, batch = 0.5, 6.0
    optimizer = Sofim(model.parameters(), LR, rho=RHO, window=window)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no noise
        dpkernels.make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=clip,
            expected_batch_size=batch,
            loss_reduction="sum",
        )
    theta = flat(plain.parameters())
    mean, seen = torch.zeros_like(theta), []
    for _ in range(4):
        x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        nn.utils.vector_to_parameters(theta, plain.parameters())
        total = torch.zeros_like(theta)
        for one, target in zip(x, y, strict=True):
            loss = nn.functional.cross_entropy(plain(one), target)
            sample = torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss, list(plain.parameters()))]
            )
            total += sample * min(1.0, clip / float(sample.norm()))
        g = total / batch
        mean, seen = 0.9 * mean + 0.1 * g, [*seen, g][-2:]
        rows = torch.stack(seen)
        fisher = torch.outer(mean, mean) if window is None else rows.T @ rows / len(rows)
        theta = theta - LR * dense_step(fisher, g)
    torch.testing.assert_close(flat(model.parameters()), theta, **CLOSE)


def by_momentum(params):
    return Sofim(params, 0.5)


def by_window(params):
    return Sofim(params, 0.5, window=5)


def filtered(params):
    return DiSK(Sofim(params, 0.5))


PRIVATE = [by_momentum, by_window, filtered]


@pytest.mark.parametrize("build", PRIVATE[:2])
def test_it_learns_what_is_easy_with_noise(build) -> None:
    run = made(build)
    before = accuracy(run)
    train(run, 60)
    # The classes are apart: of the mistakes at the beginning most can be had.
    assert 1 - accuracy(run) < (1 - before) / 3


@pytest.mark.parametrize("build", PRIVATE)
def test_a_private_run_resumes_bit_for_bit(build, tmp_path) -> None:
    whole, first = made(build), made(build)
    train(whole, 11)
    train(first, 7)
    first.save(tmp_path / "run.pt")
    resumed = made(build)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seed
        resumed.load(tmp_path / "run.pt")
    train(resumed, 11)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.parametrize("build", PRIVATE[:2])
def test_a_resume_without_the_state_is_another_run(build) -> None:
    whole, first = made(build), made(build)
    train(whole, 8)
    train(first, 5)
    first.training.optimizer.state.clear()
    train(first, 8)
    assert not torch.equal(parameters_of(first), parameters_of(whole))


@pytest.mark.parametrize("build", [partial(Sofim, lr=0.5), by_window])
def test_epsilon_is_that_of_the_training(build) -> None:
    other = made(lambda params: torch.optim.SGD(params, 0.5))
    run = made(build)
    for each in (other, run):
        train(each, 3)
    assert run.epsilon(1e-5) == other.epsilon(1e-5) > 0
