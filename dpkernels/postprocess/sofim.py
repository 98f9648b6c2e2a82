"""SOFIM: a natural gradient whose Fisher matrix is made of released gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dpkernels.ops.checks import check_finite
from dpkernels.ops.sherman_morrison import GradientWindow, sofim_step_

_DTYPES = (torch.float32, torch.float64)


class Sofim(Optimizer):
    """The server's step of DP-FedSOFIM, after the noise of any private training.

    M <- beta M + (1 - beta) G;  theta <- theta - lr H G  with  H = (rho I + M M^T)^-1

    M starts at zero and is not corrected for it, as in the paper. Across M this is SGD at the rate
    lr / rho; along M the step is shorter by rho / (rho + |M|^2), hence
    I / (rho + |M|^2) <= H <= I / rho. M M^T is the outer product of a mean gradient, not the
    Fisher matrix of the model: where |M|^2 is far below rho, all of it is SGD.

    With ``window=k`` the Fisher matrix is the mean over the last gradients,

    H = (rho I + F)^-1,  F = (1 / n) sum of G_i G_i^T over the last n gradients, G among them,

    n = k, or the number of steps while there were fewer. It is divided by n, not by k, so that rho
    means the same from the first step on: F estimates the second moment of a gradient at any n.
    k = 1 is beta = 0: theta <- theta - lr G / (rho + |G|^2). Noise of standard deviation s on each
    of d elements makes |G_i|^2 about d s^2 and the G_i nearly orthogonal, so that H G is about
    G / (rho + d s^2 / n): the noise alone shortens the step, which lr has to make up for.

    It is post-processing: it sees released gradients and no data. Unit, view, sensitivity, noise
    and sampling are those of what releases the gradient; epsilon is the same with any optimizer.

    params: tensors, float32 or float64, or groups of them. A group is one vector, with one M.G and
        one |M|^2 over all of its parameters, and must have one dtype and one device. Groups are
        separate vectors (H is block-diagonal), because each may have its own lr, beta, rho and
        window; the paper's H is that of a single group.
    lr: the step size, >= 0; schedules may change it between steps.
    beta: in [0, 1), the decay of M. A window has no use for it.
    rho: > 0, the damping of the Fisher matrix.
    window: k >= 1, how many gradients the Fisher matrix is made of; None for M M^T.

    Cost: without a window, one number for each parameter, about 12 flops and 7 elements of memory
    traffic (``sofim_step_``). With a window, k numbers for each parameter, 6 k flops and 3 k + 16
    elements of traffic. Several groups: each gradient is read once more (see ``step``).

    Raises ValueError for numbers out of range, for half-precision parameters (keep a float32 copy
    of them and step that), for several dtypes in a group, and for shards of FSDP2, whose products
    would miss those of other processes.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        beta: float = 0.9,
        rho: float = 0.5,
        window: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "rho": rho, "window": window})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, a vector of its own; raises ValueError as the class does."""
        checked = {**self.defaults, **param_group}
        check_finite("Sofim", "lr", checked["lr"], at_least=0.0)
        check_finite("Sofim", "rho", checked["rho"], above=0.0)
        if not 0 <= checked["beta"] < 1:
            raise ValueError(f"Sofim: beta must be in [0, 1), got {checked['beta']}")
        window = checked["window"]
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(
                f"Sofim: window must be an integer >= 1, or None for the moving average, got "
                f"{window}"
            )
        super().add_param_group(param_group)
        try:
            _check_vector("Sofim", _trained(self.param_groups[-1]))
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that require grad; return the loss of ``closure``, if given.

        Raises RuntimeError if one of them has no gradient (M.G is over all of them), or if others
        require grad than when the window began; ValueError for a gradient that is not finite. All
        of that is looked at before anything is written, in any group. A step that overflows the
        parameters' dtype (lr / rho too large) raises ValueError and leaves the parameters of its
        group as they were; a window has taken the gradient in by then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [_gradients(group) for group in self.param_groups]
        for group in self.param_groups:
            self._check_window(group)
        if len(gradients) > 1:
            # What does the work refuses such a gradient, too, but after the groups before it.
            _check_gradients(gradients)
        for group, grads in zip(self.param_groups, gradients, strict=True):
            if not grads:
                continue
            if group["window"] is None:
                self._step_by_momentum(group, grads)
            else:
                self._step_by_window(group, grads)
        return loss

    def _step_by_momentum(self, group: dict[str, Any], grads: list[Tensor]) -> None:
        params = _trained(group)
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        sofim_step_(
            [p.detach() for p in params],
            [self.state[p]["momentum"] for p in params],
            grads,
            beta=group["beta"],
            rho=group["rho"],
            lr=float(group["lr"]),
        )

    def _step_by_window(self, group: dict[str, Any], grads: list[Tensor]) -> None:
        params = _trained(group)
        g = torch.cat([x.reshape(-1) for x in grads]).to(params[0].dtype)
        step = self._window(group, g).precondition(g, group["rho"]).mul_(float(group["lr"]))
        if not step.isfinite().all():
            raise ValueError(
                f"Sofim.step: lr H G overflows {g.dtype} at lr = {float(group['lr']):g} and rho = "
                f"{group['rho']:g}; parameters were left as they were: raise rho, .1 to 10 is usual"
            )
        for p, part in zip(params, step.split([p.numel() for p in params]), strict=True):
            p.sub_(part.view(p.shape))

    def _window(self, group: dict[str, Any], like: Tensor) -> _FisherWindow:
        """Return the gradients of the group; they are kept as state of its first parameter."""
        state = self.state[group["params"][0]]
        if "window" not in state:
            state["window"] = _FisherWindow(group["window"], like, _trained_places(group))
        window: _FisherWindow = state["window"]
        return window

    def _check_window(self, group: dict[str, Any]) -> None:
        """Raise RuntimeError if the window was begun with another length or other parameters."""
        found = [self.state[p].get("window") for p in group["params"][:1] if p in self.state]
        window = found[0] if found else None
        trained = _trained_places(group)
        if window is not None and (window.size, window.trained) != (group["window"], trained):
            raise RuntimeError(
                f"Sofim.step: the window began with {window.size} gradients of the parameters "
                f"{window.trained} of its group, but now {group['window']} of {trained} are asked "
                "for (those that require grad); build a new Sofim after such a change"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return momentum or windows, and the groups' settings: tensors, numbers, lists, dicts."""
        found = super().state_dict()
        found["state"] = {
            key: {
                name: value.saved() if name == "window" else value for name, value in state.items()
            }
            for key, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a checkpoint, bit for bit; products in a window stay float64."""
        super().load_state_dict(state_dict)
        saved = (key for group in state_dict["param_groups"] for key in group["params"])
        own = (p for group in self.param_groups for p in group["params"])
        for key, p in zip(saved, own, strict=True):
            # torch shares tensors with the state_dict, and rounds them to the parameter's dtype.
            for name, value in state_dict["state"].get(key, {}).items():
                if name == "window":
                    self.state[p][name] = _FisherWindow.loaded(value, p.device)
                else:
                    self.state[p][name] = value.to(p, copy=True)


class _FisherWindow(GradientWindow):
    """The last gradients of a group, and ``(rho I + mean of G_i G_i^T)^-1 G``.

    size: how many are kept. like: ``[d]``, a gradient; its dtype and device are the window's.
    trained: which parameters of the group the gradients are of.
    """

    def __init__(self, size: int, like: Tensor, trained: list[int]) -> None:
        super().__init__(size, like.numel(), rho=1.0, dtype=like.dtype, device=like.device)
        self.size = size
        self.trained = trained

    def precondition(self, g: Tensor, rho: float) -> Tensor:
        """Take ``g`` in and return its natural gradient, both ``[d]``."""
        count = min(len(self) + 1, self.size)
        # (rho I + W^T W / n)^-1 = n (n rho I + W^T W)^-1, which push() factorises anew.
        self.rho = count * rho
        self.push(g)
        return self.solve(g).mul_(count)

    def saved(self) -> dict[str, Any]:
        """Return what ``loaded`` makes the same window of.

        The products are saved as well: summed anew, in another order, they might differ by an ulp.
        """
        return {
            "size": self.size,
            "trained": list(self.trained),
            "rows": self.rows,
            "gram": self.gram,
            "next": self._next,
        }

    @classmethod
    def loaded(cls, saved: dict[str, Any], device: torch.device) -> _FisherWindow:
        """Return a copy of the window that was saved; the next ``precondition`` factorises."""
        rows = saved["rows"].to(device)
        window = cls(saved["size"], rows.new_empty(rows.shape[1]), list(saved["trained"]))
        window._filled, window._next = len(rows), saved["next"]
        window.rows.copy_(rows)
        window.gram.copy_(saved["gram"])
        return window


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.requires_grad]


def _trained_places(group: dict[str, Any]) -> list[int]:
    return [place for place, p in enumerate(group["params"]) if p.requires_grad]


def _check_vector(op: str, params: list[Tensor]) -> None:
    """Raise ValueError unless the parameters of a group can be one vector."""
    for p in params:
        if p.dtype not in _DTYPES:
            raise ValueError(
                f"{op}: params must be float32 or float64, got {list(p.shape)} {p.dtype}; keep a "
                "float32 copy of half-precision parameters and step that"
            )
        if p.dtype != params[0].dtype:
            raise ValueError(
                f"{op}: a group is one vector of one dtype, got {params[0].dtype} and {p.dtype}; "
                "put them into groups of their own"
            )
        if hasattr(p, "placements"):  # a DTensor, whose class takes 0.6 s to import
            raise ValueError(
                f"{op}: a parameter of shape {list(p.shape)} is sharded, and M.G would miss the "
                "other shards; train replicas (DDP), or take another optimizer"
            )


def _gradients(group: dict[str, Any]) -> list[Tensor]:
    """Return the gradients of what is trained; raise if one is missing or cannot be taken."""
    params = _trained(group)
    _check_vector("Sofim.step", params)
    found = []
    for p in params:
        if p.device != params[0].device:
            raise ValueError(
                f"Sofim.step: a group is one vector on one device, got {params[0].device} and "
                f"{p.device}; put them into groups of their own"
            )
        if p.grad is None:
            raise RuntimeError(
                f"Sofim.step: a parameter of shape {list(p.shape)} has no gradient; call "
                "backward() first, or requires_grad_(False) what is not trained"
            )
        found.append(p.grad)
    return found


def _check_gradients(groups: list[list[Tensor]]) -> None:
    for index, grads in enumerate(groups):
        if grads and not torch.stack([g.isfinite().all() for g in grads]).all():
            raise ValueError(
                f"Sofim.step: a gradient of group {index} is not finite; nothing was written: look "
                "for the overflow before the noise, or skip this step"
            )
