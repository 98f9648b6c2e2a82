"""``PrivacyEngine``: model, optimizer and loader made private, and what that has cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpkernels.engine import Ranks
from dpkernels.opacus import checkpoint
from dpkernels.opacus.accountants import create_accountant
from dpkernels.opacus.accountants.statements import for_run
from dpkernels.opacus.accountants.utils import noise_for
from dpkernels.opacus.arguments import (
    Processes,
    check_arguments,
    check_can_begin,
    whole_number,
)
from dpkernels.opacus.attach import attach
from dpkernels.opacus.clipping import clipping_of, gradient_noise
from dpkernels.opacus.data_loader import (
    DPDataLoader,
    check_rand_on_empty,
    private_loader,
    sampling_of,
)
from dpkernels.opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from dpkernels.opacus.grad_sample.pairing import withdraw
from dpkernels.opacus.optimizers.optimizer import DPOptimizer
from dpkernels.opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from dpkernels.opacus.validators import ModuleValidator
from dpkernels.privacy.mechanism import Poisson, gaussian_step
from dpkernels.run.private_run import PrivateRun

# What Opacus' accountants take, which ours do not need.
_OF_ACCOUNTANTS = {"alphas", "delta_error", "eps_error", "epsilon_tolerance"}


class PrivacyEngine:
    """Makes training private, and adds up what it costs.

    Unit: one record of the loader's data set. Adjacency: add/remove under Poisson sampling, replace
    one without it. Seen: every noisy gradient, so every model. Sensitivity and noise: those of
    ``DPOptimizer``. Sampling: Poisson at the rate 1 / len(data_loader), or, with
    ``poisson_sampling=False``, each record once an epoch without amplification.

    accountant: ``prv`` (privacy loss distributions), ``rdp``, ``gdp`` (exact, without sampling
        only), or a name given to ``register_accountant``.
    secure_mode: must be False. Keys come from the operating system's entropy always, but noise is
        drawn from them by Philox, which is not a cryptographic generator, and added in floating
        point: the promise of this mode is not kept here.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        if secure_mode:
            raise ValueError(
                "secure_mode must be False: noise is drawn by Philox, with keys from the operating "
                "system's entropy, which is not a cryptographic generator, and floating-point "
                "addition does not hide the low bits of what it is added to; if you need both, "
                "do not use this noise"
            )
        self.accountant = create_accountant(accountant)
        self.secure_mode = secure_mode
        self.dataset: Any = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return (model, optimizer, loader), or with the ghost modes (.., criterion, loader).

        module: any model whose inputs and layers have samples as their first axis. Several calls of
            it before one backward pass are taken to be about the same samples. In
            ``DistributedDataParallel``, ours or torch's, or sharded by ``FSDP2Wrapper``, it is
            trained by all processes together, each on records of its own. If it is in private
            training already, wrapped or not, that ends: its optimizer takes no more steps, and the
            accountant goes on.
        optimizer: any ``torch.optim`` optimizer over its trained parameters.
        criterion: of the ghost modes; cross entropy if None. What is returned for it gives plain
            losses.
        data_loader: over a map-style data set, shuffled or not. With a ``generator``, a seed is
            drawn from it for the sampling, with a warning: for tests.
        noise_multiplier: noise over sensitivity, >= 0; 0 gives no privacy.
        max_grad_norm: the norm that gradients of samples are clipped to.
        loss_reduction: whether the loss is the ``mean`` or the ``sum`` over samples. Gradients are
            divided by the expected batch size for ``mean``, and by nothing for ``sum``.
        clipping: ``flat``, ``per_layer`` (a bound for each parameter may be passed) or
            ``adaptive`` (kwargs: target_unclipped_quantile, clipbound_learning_rate, max_clipbound,
            min_clipbound, unclipped_num_std).
        batch_first: False for inputs ``[T, B, ...]``: see ``dpkernels.opacus.batch_second``.
        noise_generator: a seed is drawn from it, with a warning: for tests. For the same model the
            same seed gives other noise the second time.
        grad_sample_mode: any of Opacus' but ``no_op``; all give the same numbers.
        wrap_model: whether the model is returned inside of a ``GradSampleModule``, or a hold on it.
        sample_rate: of Poisson sampling; 1 / len(data_loader) if None.
        expected_batch_size: what gradients are divided by; len(dataset) * sample_rate if None.
            Both by default take the number of records for public: pass both if it is not.

        Raises ValueError or TypeError, naming the argument, before anything is changed.
        """
        check_arguments(
            grad_sample_mode, criterion, loss_reduction, sample_rate, expected_batch_size
        )
        check_rand_on_empty(rand_on_empty)
        if isinstance(optimizer, DPOptimizer):
            withdraw(optimizer)
            optimizer = optimizer.original_optimizer
        processes = Processes.of(module)
        check_can_begin(processes.inside)
        self.validate(module=processes.inside, optimizer=optimizer, data_loader=data_loader)
        clip = clipping_of(clipping, max_grad_norm, kwargs, optimizer, loss_reduction)
        noise = gradient_noise(noise_multiplier, clip)
        sampling = sampling_of(data_loader, poisson_sampling, sample_rate)
        loader = private_loader(data_loader, sampling, Ranks(processes.group))
        expected = expected_batch_size or _whole_if_close(loader.expected_batch_size)
        accountant = for_run(self.accountant)
        # None of it, but the accountant says now, not in the first step, if it cannot account it.
        accountant.compose(gaussian_step(noise_multiplier, loader.sampling), 0)
        attached = attach(
            processes,
            optimizer,
            noise_multiplier=noise,
            clipping=clip,
            layer_bounds=max_grad_norm if isinstance(max_grad_norm, Sequence) else None,
            expected_batch_size=expected,
            loss_reduction=loss_reduction,
            generator=noise_generator,
            batch_first=batch_first,
        )
        with ExitStack() as undo:
            # Whatever fails from here on leaves nothing changed.
            undo.callback(attached.end)
            private = DPOptimizer.of_run(
                optimizer,
                PrivateRun(attached.training, loader, accountant=accountant),
                attached,
                processes.inside,
                noise_multiplier=noise_multiplier,
                expected_batch_size=expected,
                loss_reduction=loss_reduction,
            )
            undo.callback(private.end)
            self._note_dataset(loader)
            undo.pop_all()
        held = _held(module, private, wrap_model, batch_first)
        if "ghost" not in grad_sample_mode:
            return held, private, loader
        criterion = criterion or nn.CrossEntropyLoss(reduction=loss_reduction)
        loss = DPLossFastGradientClipping(held, private, criterion, loss_reduction)
        return held, private, loss, loader

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        poisson_sampling: bool = True,
        sample_rate: float | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return what ``make_private`` does, with the noise that ``epochs`` need for a budget.

        target_epsilon, target_delta: the budget of all ``epochs``; what was spent before comes on
            top.
        kwargs: the other arguments of ``make_private``.
        """
        if len(self.accountant) > 0:
            warnings.warn(
                "make_private_with_epsilon: a part of the budget is spent already, and the noise "
                "is for what comes: epsilon will be larger than target_epsilon",
                stacklevel=2,
            )
        epochs = whole_number("make_private_with_epsilon", "epochs", epochs)
        for name in _OF_ACCOUNTANTS & kwargs.keys():
            del kwargs[name]
        sampling = sampling_of(data_loader, poisson_sampling, sample_rate)
        batches = round(1 / sampling.rate) if isinstance(sampling, Poisson) else len(data_loader)
        return self.make_private(
            data_loader=data_loader,
            noise_multiplier=noise_for(
                target_epsilon,
                target_delta,
                epochs * batches,
                sampling,
                self.accountant.mechanism(),
            ),
            poisson_sampling=poisson_sampling,
            sample_rate=sample_rate,
            **kwargs,
        )

    def get_epsilon(self, delta: float) -> float:
        """Return the epsilon that has been spent, at ``delta``."""
        return self.accountant.get_epsilon(delta)

    def is_compatible(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> bool:
        """Return whether ``module`` can be trained privately as it is."""
        return ModuleValidator.is_valid(module)

    def validate(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data_loader: DataLoader[Any] | None = None,
    ) -> None:
        """Raise UnsupportedModuleError if ``module`` cannot be trained privately as it is."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` whose BatchNorms are GroupNorms, if nothing else is wrong."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: checkpoint.Destination,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Write the state of all of them and of the accountant; with an optimizer, of the run.

        checkpoint_dict: the caller's own, to be written, too.

        Call it after ``step()``. Keys of the noise are not written, so that nobody can read them.
        Of several processes all may call it, or one; those of a sharded model must all, and write a
        file each: ``path`` with ``.rank0`` and so on.
        """
        checkpoint.save(
            path,
            module,
            self.accountant,
            optimizer,
            _schedulers(noise_scheduler, grad_clip_scheduler),
            checkpoint_dict,
            module_state_dict_kwargs,
            torch_save_kwargs,
        )

    def load_checkpoint(
        self,
        *,
        path: checkpoint.Destination,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Put back what ``save_checkpoint`` wrote, here or in Opacus; return the rest of it.

        The run goes on at the same epsilon, with the next batch, and with noise never used before.
        A noise multiplier or clipping norm that is not the one the checkpoint's optimizer was given
        stays, with a warning.
        """
        return checkpoint.load(
            path,
            module,
            self.accountant,
            optimizer,
            _schedulers(noise_scheduler, grad_clip_scheduler),
            module_load_dict_kwargs,
            torch_load_kwargs,
        )

    def _note_dataset(self, loader: DPDataLoader) -> None:
        if self.dataset is not None and self.dataset is not loader.dataset:
            warnings.warn(
                "make_private: this PrivacyEngine has accounted for another data set before; its "
                "epsilon is for somebody who is in both. Make a PrivacyEngine for each, unless it "
                "is the same data",
                stacklevel=3,
            )
        self.dataset = loader.dataset


def _held(
    module: nn.Module, optimizer: DPOptimizer, wrap_model: bool, batch_first: bool
) -> GradSampleModule | GradSampleHooks:
    """Return the model as it is used from now on, or a hold on it."""
    held: GradSampleModule | GradSampleHooks
    if isinstance(module, GradSampleModule):
        held = module
    elif wrap_model:
        held = GradSampleModule(module, strict=False)
    else:
        held = GradSampleHooks(module, strict=False)
    held.batch_first, held.loss_reduction = batch_first, optimizer.loss_reduction
    held._attach(optimizer.end, optimizer.forget)
    return held


def _whole_if_close(size: float) -> float:
    """Return a whole number for one that misses it by rounding: 98 * (1 / 49) is below 2."""
    return float(round(size)) if math.isclose(size, round(size), rel_tol=1e-12) else size


def _schedulers(noise: Any, grad_clip: Any) -> dict[str, Any]:
    return {
        "noise_scheduler_state_dict": noise,
        "grad_clip_scheduler_state_dict": grad_clip,
    }
