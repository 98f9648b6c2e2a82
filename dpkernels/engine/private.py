"""``make_private``: an ordinary training loop becomes a private one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.engine.capture import Capture, flattened
from dpkernels.engine.clipping import Clipping, Flat, NoisyCount
from dpkernels.engine.distributed import Ranks, bypass_reducer, group_of, parameter_facts
from dpkernels.engine.hooks import discard_with, hook_into
from dpkernels.engine.in_place import make_plain
from dpkernels.engine.layers.tied import tie
from dpkernels.engine.lifting import Lifting
from dpkernels.engine.report import Report
from dpkernels.engine.rules import check_optimizer, check_plain, layers_of
from dpkernels.engine.sharding import is_sharded, sharding_group
from dpkernels.engine.sides import FixedSides, Preconditioner, load_state_of, sketches_of, state_of
from dpkernels.engine.step import Mechanism, Reduction, Seen, Step
from dpkernels.ops.checks import check_finite
from dpkernels.ops.noise import UNREACHABLE_MASS, NoiseKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SeveralCalls = Literal["refuse", "same samples"]


class PrivateTraining:
    """A model and an optimizer in private training; ``make_private`` makes it.

    Unit: one sample (index of the first axis), added or removed. Seen: the noisy gradients, so all
    models. Sensitivity of the sum: ``sensitivity``. Noise: N(0, (sigma * sensitivity)^2), once for
    each ``optimizer.step()``, in independent shares of all ranks if there are several. Sampling is
    the caller's, and the accountant's, business.

    Between ``backward()`` and ``step()`` parameters have no ``grad``: sums without noise are not
    handed out. Afterwards ``grad`` is the noisy gradient.

    attached: whether steps are private; not any more after ``detach()``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: Step,
        capture: Capture,
        detach: Callable[[], None],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._step = step
        self._capture = capture
        self._undo = detach
        self._elements = sum(p.numel() for layer in self.layers.values() for p in layer)
        self.attached = True

    @property
    def sensitivity(self) -> float:
        """How far the clipped sum of the next step can move when one sample comes or goes."""
        return self._step.clipping.sensitivity(self._step.names)

    @property
    def noise_multiplier(self) -> float:
        """Noise divided by sensitivity; it may be set between two steps, by a schedule."""
        return self._step.mechanism.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        check_finite("PrivateTraining", "noise_multiplier", value, at_least=0.0)
        self._check_between_steps("noise_multiplier")
        self._step.mechanism = dataclasses.replace(self._step.mechanism, noise_multiplier=value)

    @property
    def clipping(self) -> Clipping:
        """How gradients are clipped; it may be set between two steps, by a schedule."""
        return self._step.clipping

    @clipping.setter
    def clipping(self, value: Clipping) -> None:
        self._check_between_steps("clipping")
        value.sensitivity(self._step.names)
        self._step.clipping = value

    @property
    def layers(self) -> dict[str, tuple[nn.Parameter, ...]]:
        """The trained parameters by layer, under the names that ``PerLayer`` knows."""
        return {layer.name: tuple(layer.parameters.values()) for layer in self._step.layers}

    @property
    def expected_batch_size(self) -> float:
        """The public number that sums, of all ranks together, are divided by."""
        return self._step.mechanism.expected_batch_size

    @property
    def unreachable_mass(self) -> float:
        """Probability that exact noise of a step lies beyond what ``ops.noise`` draws, at most.

        Every rank draws for every element, and for the count of adaptive clipping.
        """
        return (self._elements + 1) * self.world_size * UNREACHABLE_MASS

    @property
    def extra_query(self) -> NoisyCount | None:
        """What adaptive clipping asks of the samples in every step, beside the sum."""
        return self._step.clipping.extra_query()

    @property
    def void(self) -> str | None:
        """Why there is no guarantee whatever the noise, if so: the preconditioner knows."""
        return self._step.void

    @property
    def steps(self) -> int:
        """How many noisy gradients have been released."""
        return self._step.taken

    @property
    def world_size(self) -> int:
        """How many processes make up a step."""
        return self._step.ranks.size

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self._step.ranks.rank

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the parameters, which every call puts together."""
        return any(is_sharded(parameter) for parameter in self.model.parameters())

    @property
    def ranks(self) -> Ranks:
        """The processes that make up a step."""
        return self._step.ranks

    @property
    def samples(self) -> int:
        """How many samples of this rank the next step has so far. Private: it shows the data."""
        return self._step.seen.samples

    @property
    def microbatches(self) -> int:
        """How many backward passes the next step has so far."""
        return self._step.seen.microbatches

    @property
    def noise_key(self) -> NoiseKey:
        """Where the noise comes from: of this rank's share, if there are several."""
        return self._step.key

    @property
    def nonfinite_samples(self) -> int:
        """How many samples of this rank were dropped so far. Private: it depends on the data."""
        return self._step.seen.nonfinite()

    def sample_norms(self) -> dict[str, Tensor]:
        """Return norms of the last microbatch's gradients, ``[B]`` for each layer, before clipping.

        Not private: a diagnostic on the data itself, which must not be published or acted upon.
        Raises RuntimeError unless ``make_private(..., keep_norms=True)``.
        """
        if self._step.seen.sq_norms is None:
            raise RuntimeError(
                "sample_norms: there are none; pass keep_norms=True to make_private, and call "
                "backward()"
            )
        norms = self._step.seen.sq_norms.sqrt()
        return dict(zip(self._step.names, norms, strict=True))

    def report(self) -> Report:
        """Return what each layer's rule, formula and cost are; shapes as of the first backward."""
        return Report.of(self._step)

    def before_release(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` in every step before noise is drawn; return what ends that.

        If it raises, nothing is released, on no rank, and the step's samples are forgotten.
        """
        listeners = self._step.before_release
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    def _check_between_steps(self, name: str) -> None:
        if self._step.seen.microbatches:
            raise RuntimeError(
                f"PrivateTraining.{name}: it cannot be set between backward() and step(), whose "
                "noise is for all samples of the step; set it after step() or zero_grad()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the model's and the optimizer's state.

        With a seeded key, each rank has a state of its own; else that of any rank is good for all.
        """
        bound = getattr(self._step.clipping, "max_norm", None)
        return {
            "steps": self._step.taken,
            "noise_key": self._step.key.state_dict(),
            "rank": self.rank,
            "world_size": self.world_size,
            "noise_multiplier": self.noise_multiplier,
            "nonfinite_samples": self.nonfinite_samples,
            "preconditioner": state_of(self._step.preconditioner),
            "void": self.void,
            "max_norm": dict(bound) if isinstance(bound, Mapping) else bound,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint, without unfinished microbatches.

        Noise is never repeated, but for a seeded key: it goes on where the checkpoint was. Raises
        ValueError for a seeded key of another rank, which would draw that rank's noise.
        """
        place = state.get("rank", 0), state.get("world_size", 1)
        if state["noise_key"]["seed"] is not None and place != (self.rank, self.world_size):
            raise ValueError(
                f"PrivateTraining.load_state_dict: state has the seeded key of rank {place[0]} of "
                f"{place[1]}, but this is rank {self.rank} of {self.world_size}, whose noise must "
                "be its own; save and load one state for each rank"
            )
        self._step.discard()
        self._step.key.load_state_dict(state["noise_key"])
        self._step.taken = state["steps"]
        self.noise_multiplier = state["noise_multiplier"]
        self._step.seen = Seen(dropped=state["nonfinite_samples"])
        load_state_of(self._step.preconditioner, state["preconditioner"])
        self._step.remember_void(state.get("void"))
        clipping: Any = self._step.clipping
        if self.extra_query is not None:
            clipping.max_norm = state["max_norm"]
        elif state["max_norm"] is not None:
            self._step.clipping = dataclasses.replace(clipping, max_norm=state["max_norm"])

    def end_calls(self) -> None:
        """Say that calls of the model from now on are about other samples than those before.

        With ``several_calls="same samples"``, calls on two batches are then refused in one backward
        pass, as they are without it.
        """
        self._capture.end_calls()

    def discard(self) -> None:
        """Forget microbatches since the last step, as ``optimizer.zero_grad()`` does."""
        self._step.discard()

    def detach(self) -> None:
        """Give model and optimizer back as they were: plain, without privacy."""
        if self.attached:
            self.attached = False
            self._step.discard()
            self._undo()


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    noise_multiplier: float,
    max_grad_norm: float | Clipping,
    expected_batch_size: float,
    loss_reduction: Reduction,
    preconditioner: Preconditioner | None = None,
    noise_key: NoiseKey | None = None,
    loss_scale: float = 1.0,
    keep_norms: bool = False,
    several_calls: SeveralCalls = "refuse",
    process_group: ProcessGroup | None = None,
) -> PrivateTraining:
    """Make ``loss.backward()`` and ``optimizer.step()`` compute private gradients.

    model: any ``nn.Module`` whose inputs and layers have samples as their first axis. The first
        call tries that out, and that samples stay apart (``dpkernels.engine.first_call``).
        ``DistributedDataParallel`` of such a model, or one that ``fully_shard`` (FSDP2) has
        sharded, is trained by all of its processes together.
    optimizer: any ``torch.optim`` optimizer over its trained parameters.
    noise_multiplier: sigma >= 0; 0 gives no privacy, and says so.
    max_grad_norm: C, the norm that every sample's gradient is clipped to; or one of
        ``dpkernels.clipping``: ``Flat``, ``PerLayer``, ``Automatic``, ``Adaptive``.
    expected_batch_size: samples of a logical step, as expected (q times the number of records under
        Poisson sampling), of all processes together: a public number that the noisy sum is divided
        by.
    loss_reduction: ``mean`` if the loss is an average over the samples of its backward pass,
        ``sum`` if it is a sum (or ``backward`` gets a vector of losses and ones). An average over
        something that differs between samples (``ignore_index``, class weights) is not a mean over
        samples: it makes gradients depend on each other, and must be summed instead. A matter of
        privacy, which is not checked: with the wrong one, a sample's clipped gradient depends on
        how many others there are.
    preconditioner: factors, or a scale for every element, of each layer's gradient, applied before
        it is clipped: ``dpkernels.precondition.Kfac`` and ``AdaDPS`` estimate them from probes,
        ``FixedSides`` takes them.
    noise_key: from the operating system's entropy if None. Of a seeded one, each rank takes a child
        of its own.
    loss_scale: what the loss is multiplied by before ``backward()``, against underflow in float16.
        ``torch.amp.GradScaler`` is not for private training, and is refused: its scale follows
        gradients before they are clipped. A fixed number takes its place.
    keep_norms: make ``sample_norms()`` available; not private.
    several_calls: what two calls of the model in one backward pass are about. ``same samples`` says
        that index i is one person in all of them: their gradients are added before they are
        clipped. They must be of the same size, and it must be true: halves of a batch are about
        different people.
    process_group: of processes that train copies of a plain model together: each backward pass is
        over a rank's own samples, and ``optimizer.step()`` is a step of all. Parameters must have
        the same values everywhere. None: this process alone, or the processes of the model.

    Every rank must take every step, with or without samples (and under FSDP2 as many forward and
    backward passes as the others, if need be with none: ``x[:0]``). Arguments, and what the
    preconditioner has for each layer, are compared between ranks here, once. How a step fails in
    one of several processes: ``dpkernels.engine.Ranks``.

    Any number of backward passes (microbatches) make up one logical step; none at all makes a step
    of noise. A backward pass that asks for gradients of inputs alone (``torch.autograd.grad(loss,
    x)``) is none of them. Raises Unsupported or ValueError before anything is changed.

    What the engine cannot see from the model, and the guarantee rests on:

    - A loss outside of the model is a sum or mean of losses of single samples. A contrastive loss,
      a loss divided by a count of the batch (``ignore_index``), or class weights mix samples.
    - Hooks on gradients or outputs, and custom autograd functions, do not mix samples.
    - The model itself is called. Layers that are called one by one take the number of samples from
      what they are given, and are not tried out. Nor is a model sharded by ``fully_shard``: try it
      out before it is sharded.
    - The forward pass is the same function later as in the first call with such arguments, and
      keeps nothing of the samples in Python attributes or by writing to ``tensor.data``.
    - One index of the batch is one person; a person with several records counts several times.
    - The batch is not crafted against float32: a record's own terms are at most C, rounding
      included, but without it the others' partial sums round differently. For N records in one
      backward pass that adds about sqrt(N) 2^-24 C as a rule, and N^2 2^-24 C if all conspire.
    """
    op = "make_private"
    check_finite(op, "noise_multiplier", noise_multiplier, at_least=0.0)
    check_finite(op, "expected_batch_size", expected_batch_size, above=0.0)
    check_finite(op, "loss_scale", loss_scale, above=0.0)
    for name, value, choices in (
        ("loss_reduction", loss_reduction, get_args(Reduction)),
        ("several_calls", several_calls, get_args(SeveralCalls)),
    ):
        if value not in choices:
            raise ValueError(f"{op}: {name} must be one of {', '.join(choices)}, got {value!r}")
    check_plain(model)
    inner, group = group_of(model, process_group)
    modules = layers_of(inner)
    layers = flattened(modules)
    groups = tie(layers)
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters.values()))
    check_optimizer(layers, (p for group in optimizer.param_groups for p in group["params"]))
    clipping = (
        Flat(float(max_grad_norm)) if isinstance(max_grad_norm, int | float) else max_grad_norm
    )
    mechanism = Mechanism(noise_multiplier, expected_batch_size, loss_reduction, loss_scale)
    ranks = Ranks(sharding_group(inner, group), parameters[0].device)
    if noise_multiplier == 0:
        warnings.warn(f"{op}: noise_multiplier=0 adds no noise: not private", stacklevel=2)
    step = Step(
        layers,
        groups,
        parameters,
        mechanism,
        clipping,
        FixedSides({}) if preconditioner is None else preconditioner,
        ranks.own_key(noise_key),
        ranks,
    )
    step.keep_norms = keep_norms
    clipping.sensitivity(step.names)
    step.check_preconditioner()
    if ranks.size > 1:
        ranks.check_same(_facts(step, several_calls) | parameter_facts(inner))
        ranks.check_close(_sketches(step))
    capture = Capture(step.layer_complete, step.pass_complete, several_calls == "same samples")
    if not any(map(is_sharded, inner.parameters())):  # every run is one of all ranks
        capture.lift(Lifting(inner, modules), step.replace)
    make_plain(model)
    undo = [
        capture.attach(inner, modules),
        bypass_reducer(model),
        hook_into(optimizer, step, parameters),
        *(discard_with(whole, step) for whole in {model, inner}),
    ]

    def detach() -> None:
        for one in undo:
            one()

    return PrivateTraining(model, optimizer, step, capture, detach)


def _sketches(step: Step) -> dict[str, list[float]]:
    """Return what tells the ranks' factors apart, by layer and side."""
    return {
        f"{name} ({side})": sketch
        for name in step.names
        for side, sketch in sketches_of(step.preconditioner.sides(name)).items()
    }


def _fingerprint(preconditioner: Preconditioner) -> str:
    own: Callable[[], str] | None = getattr(preconditioner, "fingerprint", None)
    return "" if own is None else own()


def _facts(step: Step, several_calls: SeveralCalls) -> dict[str, str]:
    """Return what all ranks must agree on, beside the parameters."""
    clipping = step.clipping
    sensitivity = clipping.sensitivity(step.names)
    sides = [f"{name}: {step.preconditioner.sides(name).describe()}" for name in step.names]
    return {field: repr(value) for field, value in vars(step.mechanism).items()} | {
        # Others may have a repr that says where in memory they are.
        "max_grad_norm": repr(clipping if dataclasses.is_dataclass(clipping) else sensitivity),
        "several_calls": several_calls,
        "preconditioner": ", ".join(sides),
        "what the preconditioner is estimated from": _fingerprint(step.preconditioner),
        "why there is no guarantee": repr(step.void),
    }
