"""``DPOptimizer``: the optimizer that ``make_private`` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.engine import Adaptive, Flat
from dpkernels.ops.checks import check_finite
from dpkernels.run.private_run import PrivateRun


class DPOptimizer(Optimizer):
    """A torch optimizer whose steps are private; ``PrivacyEngine.make_private`` makes it.

    Unit: one record, under the adjacency of the loader's sampler. Seen: the noisy gradients.
    Sensitivity: ``max_grad_norm``, twice that under replace-one. Noise: N(0, (noise_multiplier *
    max_grad_norm)^2), once for each step that is not skipped. Sampling: the loader's.

    original_optimizer: the caller's, which holds state and parameter groups.
    expected_batch_size: what sums are divided by if ``loss_reduction`` is ``mean``; that of all
        processes together, if there are several.
    step_hook: what ``attach_step_hook`` was given last.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        run: PrivateRun,
        *,
        noise_multiplier: float,
        expected_batch_size: float,
        loss_reduction: str,
    ) -> None:
        # Not Optimizer's own: state and groups are those of the original.
        if not isinstance(run, PrivateRun):
            raise TypeError(
                "DPOptimizer: PrivacyEngine.make_private makes it, which knows the model and the "
                f"loader; got {type(run).__name__} as its run"
            )
        self.original_optimizer = optimizer
        self.run = run
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = loss_reduction
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self._noise_multiplier = noise_multiplier
        self._skip_queue: list[bool] = []
        self._skipped_in = -1  # the batch of the loader whose step was skipped last
        self._handle = optimizer.register_step_pre_hook(self._after_noise)
        # Hooks that are registered here are the original's, which calls them: in steps that are not
        # skipped, after the noise.
        hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        vars(self).update(hooks)

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity of a step, as it is accounted for; a schedule may set it.

        With adaptive clipping a part of it goes to counting the samples within the bound.
        """
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self.run.training.noise_multiplier = gradient_noise(value, self.run.training.clipping)
        self._noise_multiplier = value

    @property
    def max_grad_norm(self) -> float:
        """The norm that a sample's gradient is clipped to; a schedule may set it."""
        return self.run.training.sensitivity

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not isinstance(self.run.training.clipping, Flat):
            raise ValueError(
                "DPOptimizer: max_grad_norm can be set for clipping='flat' only, this is "
                f"{self.run.training.clipping}"
            )
        self.run.training.clipping = Flat(float(value))

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def grad_samples(self) -> list[Tensor]:
        """There are none: gradients of samples are never written down one by one."""
        raise RuntimeError(
            "DPOptimizer.grad_samples: gradients of samples are never written down one by one, and "
            "have no noise; for norms, as a diagnostic that is not private, use "
            "dpkernels.make_private(keep_norms=True)"
        )

    @property
    def accumulated_iterations(self) -> int:
        """1: a step is about one batch of the loader, however many microbatches it comes in."""
        return 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the original optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """That of the original optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.original_optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the original optimizer."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.original_optimizer.defaults = value

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call ``fn(self)`` in every step, with the noisy gradient in place, before the update.

        The accountant is told of a step whatever is attached here.
        """
        self.step_hook = fn

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Say of the next step that has not been spoken of whether it is to be skipped.

        ``BatchMemoryManager`` does not need it: its loader knows which microbatch is the last.
        """
        self._skip_queue.append(do_skip)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless more of the batch is to come; return the closure's loss, if any.

        closure: it is called once, to compute the gradient of this step.
        """
        if not self.run.training.attached:
            raise RuntimeError(
                "DPOptimizer.step(): private training has ended; use original_optimizer, whose "
                "steps are not private, or make_private again"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loader = self.run.loader
        skip = self._skip_queue.pop(0) if self._skip_queue else not loader.is_last_microbatch
        if skip:
            self._skipped_in = loader.batches_handed_out
            return loss
        self._skipped_in = -1
        self.original_optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and forget samples, but for those of a batch that is not complete."""
        if self._is_incomplete():
            for parameter in self.params:
                parameter.grad = None
        else:
            self.original_optimizer.zero_grad(set_to_none)

    def end(self) -> None:
        """End private training: model and original optimizer are as they were, this one is done."""
        self.run.training.detach()
        self.run.close()
        self._handle.remove()

    def forget(self) -> None:
        """Forget samples as ``zero_grad`` does, and leave gradients alone."""
        if not self._is_incomplete():
            self.run.training.discard()

    def _is_incomplete(self) -> bool:
        """Return whether the last step was skipped, and its batch is still the loader's."""
        return self._skipped_in == self.run.loader.batches_handed_out

    def _after_noise(self, *_: Any) -> None:
        if self.step_hook is not None:
            self.step_hook(self)

    def state_dict(self) -> dict[str, Any]:
        """Return that of the original optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the original optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def run_state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run: noise, place in the data, noise and bound.

        Raises RuntimeError between backward() and step(): sums without noise are not written.
        """
        if self.run.training.samples:
            raise RuntimeError(
                "save_checkpoint: it cannot be called between backward() and step(), whose sums "
                "have no noise yet; call it after step()"
            )
        state = {"noise_multiplier": self.noise_multiplier, "run": self.run.state_dict()}
        if isinstance(self.run.training.clipping, Flat):
            state["max_grad_norm"] = self.max_grad_norm
        return state

    def load_run_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``run_state_dict`` was called, with noise that was never used."""
        self.run.load_state_dict(state["run"])
        self.noise_multiplier = state["noise_multiplier"]
        if "max_grad_norm" in state:
            self.max_grad_norm = state["max_grad_norm"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the model that is trained privately is known from the beginning."""
        raise RuntimeError(
            "DPOptimizer.add_param_group: parameters cannot be added in private training; pass "
            "them to the optimizer before make_private"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: a copy of the noise would repeat it."""
        raise TypeError(
            "DPOptimizer: it cannot be copied or pickled, as its noise and its place in the data "
            "are used once; use state_dict(), or save_checkpoint() for the whole run"
        )

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"


def gradient_noise(noise_multiplier: float, clipping: object) -> float:
    """Return what is left of ``noise_multiplier`` for gradients, in units of their bound.

    A step of adaptive clipping releases a count, too, of sensitivity 1/2 and noise s. Both together
    have the multiplier sigma if that of gradients is (sigma^-2 - (2 s)^-2)^(-1/2) (Andrew et al.
    2021, theorem 1).

    Raises ValueError where the count alone would need more noise than it has.
    """
    check_finite("make_private", "noise_multiplier", noise_multiplier, at_least=0.0)
    if not isinstance(clipping, Adaptive) or noise_multiplier == 0:
        return noise_multiplier
    if noise_multiplier >= 2 * clipping.count_std:
        raise ValueError(
            "make_private: noise_multiplier must be below 2 unclipped_num_std, which is "
            f"{2 * clipping.count_std:g}, got {noise_multiplier}; raise unclipped_num_std: the "
            "count of samples within the bound needs noise, too"
        )
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * clipping.count_std) ** -2)
