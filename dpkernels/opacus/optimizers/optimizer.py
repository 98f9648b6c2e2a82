"""``DPOptimizer``: the optimizer that ``make_private`` returns, or that is built by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.engine import Clipping, Flat, PrivateTraining
from dpkernels.opacus.arguments import Processes, check_can_begin
from dpkernels.opacus.attach import Attached, attach
from dpkernels.opacus.clipping import clipping_by_hand, gradient_noise
from dpkernels.opacus.grad_sample.pairing import Wrapped, add_optimizer
from dpkernels.opacus.holding import hold, let_go
from dpkernels.ops.checks import check_finite
from dpkernels.run.private_run import PrivateRun


class DPOptimizer(Optimizer):
    """A torch optimizer whose steps are private.

    Unit: one record, under the adjacency of the loader's sampler. Seen: the noisy gradients.
    Sensitivity: ``max_grad_norm``, twice that under replace-one. Noise: N(0, (noise_multiplier *
    max_grad_norm)^2), once for each step that is not skipped. Sampling: the loader's.

    ``PrivacyEngine.make_private`` makes it and accounts for its steps. Built by hand, it belongs
    to the ``GradSampleModule`` (or ``GradSampleHooks``) of its parameters. Sampling and accounting
    are the caller's business then: attach ``accountant.get_optimizer_hook_fn(sample_rate)``. All
    backward passes between two steps make up one step, and ``expected_batch_size`` is that of all
    of them together.

    original_optimizer: the caller's, which holds state and parameter groups.
    noise_multiplier, max_grad_norm: as ``make_private`` takes them.
    expected_batch_size: what sums are divided by if ``loss_reduction`` is ``mean``; that of all
        processes together, if there are several.
    generator: its seed is drawn, with a warning, when private training begins: for tests.
    options: of adaptive clipping, all five of them, as ``make_private`` takes them.
    step_hook: what ``attach_step_hook`` was given last.
    given: noise multiplier and clipping norm as the caller gave them, whatever schedules make of
        them.
    run: what accounts for steps, of an optimizer that ``make_private`` made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **options: Any,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"DPOptimizer: loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}"
            )
        if loss_reduction == "mean" and expected_batch_size is None:
            raise ValueError(
                "DPOptimizer: expected_batch_size must be a number for loss_reduction='mean', got "
                "None; pass how many samples a step has, as expected"
            )
        if expected_batch_size is not None:
            check_finite("DPOptimizer", "expected_batch_size", expected_batch_size, above=0.0)
        if secure_mode:
            raise ValueError(
                "DPOptimizer: secure_mode must be False; see PrivacyEngine for the reason"
            )
        clipping = clipping_by_hand(max_grad_norm, options, optimizer, loss_reduction)
        gradient_noise(noise_multiplier, clipping)
        self._set(optimizer, noise_multiplier, expected_batch_size, loss_reduction, clipping)
        self._bounds = max_grad_norm if isinstance(max_grad_norm, Sequence) else None
        self._generator = generator
        self.given = self._now()
        add_optimizer(self)

    @classmethod
    def of_run(
        cls,
        optimizer: Optimizer,
        run: PrivateRun,
        attached: Attached,
        model: nn.Module,
        *,
        noise_multiplier: float,
        expected_batch_size: float,
        loss_reduction: str,
    ) -> DPOptimizer:
        """Return the optimizer of a private training that a run accounts for."""
        self = cls.__new__(cls)
        clipping = run.training.clipping
        self._set(optimizer, noise_multiplier, expected_batch_size, loss_reduction, clipping)
        self.run = run
        self._begin(attached, model)
        self.given = self._now()
        return self

    def _set(
        self,
        optimizer: Optimizer,
        noise_multiplier: float,
        expected_batch_size: float | None,
        loss_reduction: str,
        clipping: Clipping,
    ) -> None:
        # Not Optimizer's own: state and groups are those of the original.
        self.original_optimizer = optimizer
        self.run: PrivateRun | None = None
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = loss_reduction
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self._noise_multiplier = noise_multiplier
        self._clipping = clipping  # until private training begins
        self._attached: Attached | None = None
        self._model: nn.Module | None = None
        self._skip_queue: list[bool] = []
        self._skipped_in = -1  # the batch of the loader whose step was skipped last
        # Hooks that are registered here are the original's, which calls them: in steps that are not
        # skipped, after the noise.
        hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        vars(self).update(hooks)

    def _now(self) -> dict[str, float]:
        return {"noise_multiplier": self.noise_multiplier, "max_grad_norm": self.max_grad_norm}

    def attach(self, model: Wrapped) -> None:
        """Begin private training of the wrapped model that has the parameters of this optimizer.

        Raises ValueError or Unsupported for a model that cannot be trained privately.
        """
        if model.loss_reduction != self.loss_reduction:
            raise ValueError(
                f"DPOptimizer: loss_reduction is {self.loss_reduction!r}, but that of the model's "
                f"{type(model).__name__} is {model.loss_reduction!r}; make them the same"
            )
        processes = Processes.of(model._module)
        check_can_begin(processes.inside)
        attached = attach(
            processes,
            self.original_optimizer,
            noise_multiplier=gradient_noise(self._noise_multiplier, self._clipping),
            clipping=self._clipping,
            layer_bounds=self._bounds,
            expected_batch_size=self.expected_batch_size or 1.0,
            loss_reduction=self.loss_reduction,
            generator=self._generator,
            batch_first=model.batch_first,
        )
        self._begin(attached, processes.inside)
        model._attach(self.end, self.forget)

    def _begin(self, attached: Attached, model: nn.Module) -> None:
        self._attached, self._model = attached, model
        self._handle = self.original_optimizer.register_step_pre_hook(self._after_noise)
        hold(model, self.end, lambda: self.run is not None and self.run.waits)

    @property
    def training(self) -> PrivateTraining:
        """The private training whose steps these are.

        Raises RuntimeError if no wrapped model of these parameters was ever there.
        """
        if self._attached is None:
            raise RuntimeError(
                "DPOptimizer: no model is wrapped whose parameters these are, so that gradients "
                "would have no noise; train GradSampleModule(model) with it, or use "
                "PrivacyEngine.make_private"
            )
        return self._attached.training

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity of a step, as it is accounted for; a schedule may set it.

        With adaptive clipping a part of it goes to counting the samples within the bound.
        """
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        noise = gradient_noise(value, self._current_clipping)
        if self._attached is not None:
            self._attached.training.noise_multiplier = noise
        self._noise_multiplier = value

    @property
    def _current_clipping(self) -> Clipping:
        return self._clipping if self._attached is None else self._attached.training.clipping

    @property
    def max_grad_norm(self) -> float:
        """The norm that a sample's gradient is clipped to; a schedule may set it."""
        if self._attached is not None:
            return self._attached.training.sensitivity
        # A name for each layer is not known yet, and not needed for one number.
        return self._clipping.sensitivity(("the model",))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not isinstance(self._current_clipping, Flat):
            raise ValueError(
                "DPOptimizer: max_grad_norm can be set for clipping='flat' only, this is "
                f"{self._current_clipping}"
            )
        if self._attached is None:
            self._clipping = Flat(float(value))
        else:
            self._attached.training.clipping = Flat(float(value))

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
        """1: a step is about one batch, however many microbatches it comes in."""
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
        if not self.training.attached:
            raise RuntimeError(
                "DPOptimizer.step(): private training has ended; use original_optimizer, whose "
                "steps are not private, or make_private again"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._skip_queue:
            skip = self._skip_queue.pop(0)
        else:
            skip = self.run is not None and not self.run.loader.is_last_microbatch
        if skip:
            self._skipped_in = self._batch
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
        if self._attached is None or self._model is None:
            return
        model, self._model = self._model, None
        self._attached.end()
        if self.run is not None:
            self.run.close()
        self._handle.remove()
        let_go(model)

    def forget(self) -> None:
        """Forget samples as ``zero_grad`` does, and leave gradients alone."""
        if not self._is_incomplete():
            self.training.discard()

    @property
    def _batch(self) -> int:
        """Which batch of the loader this is; always the same without a loader."""
        return 0 if self.run is None else self.run.loader.batches_handed_out

    def _is_incomplete(self) -> bool:
        """Return whether the last step was skipped, and its batch is still the loader's."""
        return self._skipped_in == self._batch

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
        if self.training.samples:
            raise RuntimeError(
                "save_checkpoint: it cannot be called between backward() and step(), whose sums "
                "have no noise yet; call it after step()"
            )
        own = {"training": self.training.state_dict()} if self.run is None else {}
        return (
            own
            | self._now()
            | {
                "given": self.given,
                "run": None if self.run is None else self.run.state_dict(),
            }
        )

    def load_run_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``run_state_dict`` was called, with noise that was never used.

        A seeded generator is for tests: it goes on where the checkpoint was, with the same noise.

        Noise and bound go on where a schedule, or adaptive clipping, had brought them, if this
        optimizer was given the same ones as that of the checkpoint. If not, the caller has changed
        them: what the caller gave stays, with a warning.
        """
        # A copy: that of adaptive clipping changes when the state is loaded.
        clipping: Any = copy.copy(self.training.clipping)
        sigma = self.noise_multiplier
        if self.run is not None and state["run"] is not None:
            self.run.load_state_dict(state["run"])
        else:
            self.training.load_state_dict((state["run"] or state)["training"])
        given = state.get("given", state)
        if given["noise_multiplier"] == self.given["noise_multiplier"]:
            sigma = state["noise_multiplier"]
        else:
            _warn_kept("noise_multiplier", sigma, state["noise_multiplier"])
        if given.get("max_grad_norm", self.given["max_grad_norm"]) != self.given["max_grad_norm"]:
            _warn_kept("max_grad_norm", self.given["max_grad_norm"], state["max_grad_norm"])
            self.training.clipping = clipping
        self.noise_multiplier = sigma

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


def _warn_kept(name: str, kept: float, saved: float) -> None:
    warnings.warn(
        f"load_checkpoint: {name} stays {kept:g}, which the optimizer was given; the checkpoint "
        f"has {saved:g}. Set optimizer.{name} = {saved:g} to go on with that",
        stacklevel=5,
    )
