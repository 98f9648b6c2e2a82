"""Several processes that take a step together: each adds its share of the noise, then sums meet.

W ranks each hold the clipped sum of their own samples. Each adds N(0, (sigma S)^2 / W) to it, from
a key of its own, and only then are the sums added up over the ranks, once for each logical step:

    sum_r (sum of rank r + N(0, (sigma S)^2 / W)) = sum of all samples + N(0, (sigma S)^2)

What leaves a process always carries noise. A rank's own part carries only its share, a noise
multiplier of sigma / sqrt(W): the ranks are one trusted party, and what the guarantee is about is
the total, which they all end up with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpkernels.engine.in_place import InPlace
from dpkernels.engine.sharding import is_sharded
from dpkernels.ops.noise import NoiseKey, add_gaussian_noise_

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Factors of the same probes differ by rounding where GPUs add up in any order: float32's 6e-8 times
# what the inverse root amplifies it by, the largest eigenvalue beside the damping, 1e5 say. Those
# of other probes differ by 1 / sqrt(2,048) for the default number of them, 2%, and far more where a
# side is wide; but by 0.2% in convolutions, where each has many positions: what is estimated says
# itself what from (``fingerprint``).
_ROUNDED = 0.01


class Ranks:
    """The processes that make up a step, and what they do together.

    group: of the processes; None, or a group of one, for a process alone, which sends nothing.
    device: where small tensors live that are sent: the parameters' own, as nccl wants it.

    Unit: one sample of any rank, added or removed. Seen: the total, not the parts of the ranks.
    Sensitivity: the sample is one rank's, so it is that of this rank's sum. Noise: N(0, std^2) on
    the total, in W independent shares. Sampling: the caller's business; ranks hold disjoint
    records, or else one record counts several times.

    If a rank fails, nothing is released with less noise: the total comes about only from all ranks,
    each of which has added its share before. A rank that refuses to release (``withdraw``) tells
    the others, who refuse too. A rank that is gone lets the others fail, or wait until the group's
    timeout. Parts that were not added up are dropped, and never become a ``grad``. A rank that
    fails after all have confirmed takes no further step: what it sends next could meet what the
    others still wait for, and end their wait without its share.
    """

    def __init__(
        self, group: ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                "make_private: process_group must hold this process, which is none of its members; "
                "pass the group that this process is in"
            )
        alone = group is None or dist.get_world_size(group) == 1
        self._group = None if alone else group
        self.size = 1 if alone else dist.get_world_size(group)
        self.rank = 0 if alone else dist.get_rank(group)
        self.device = torch.device("cpu" if alone else device)
        self._releasing = False

    def own_key(self, key: NoiseKey | None) -> NoiseKey:
        """Return this rank's key: from the operating system, or this rank's child of a seeded one.

        The same seed on every rank would make all shares the same number.
        """
        if key is None:
            return NoiseKey()
        return key if self._group is None or key.seed is None else key.spawn(self.size)[self.rank]

    def noisy_sum_(
        self,
        buffers: Sequence[Tensor],
        std: float,
        key: NoiseKey,
        scale: float = 1.0,
        unit: float = 1.0,
    ) -> None:
        """Make ``scale * (sum over all ranks of unit * buffer + N(0, std^2))`` of each, in place.

        buffers: float32 or float64, of the same sizes on all ranks, which end up with the same
            bits. Each is sent once, while noise is drawn for the next.
        key: this rank's own. unit: of this rank's buffers, a power of two.
        """
        if self._group is None:
            for buffer in buffers:
                add_gaussian_noise_(buffer, std / unit, key, scale=scale * unit)
            return
        share = std / math.sqrt(self.size)
        sent = []
        for buffer in buffers:
            add_gaussian_noise_(buffer, share / unit, key, scale=unit)
            sent.append(dist.all_reduce(buffer, group=self._group, async_op=True))
        for buffer, work in zip(buffers, sent, strict=True):
            assert work is not None
            work.wait()
            buffer *= scale

    def confirm(self, *facts: object) -> None:
        """Raise RuntimeError unless all ranks are about to release, under the same mechanism.

        facts: numbers that must be the same everywhere. One message of 24 bytes.
        """
        if self._group is None:
            return
        self._check_in_step()
        ready, least, most = self._vote(1, _number(facts))
        if not ready:
            raise RuntimeError(
                "optimizer.step(): another rank refused to release this step; its own error says "
                "why; nothing was released, and the samples of the step are forgotten"
            )
        if least != -most:
            raise RuntimeError(
                f"optimizer.step(): ranks disagree about this step, which is {facts} here (noise "
                "multiplier, sensitivity, expected batch size, steps so far); let schedules and "
                "checkpoints set the same on every rank; nothing was released"
            )
        self._releasing = True

    def withdraw(self) -> None:
        """Make ``confirm`` raise on the other ranks."""
        if self._group is not None and not self._releasing:
            self._vote(0, 0)

    def complete(self) -> None:
        """Note that all that was confirmed has been added up."""
        self._releasing = False

    def _check_in_step(self) -> None:
        if self._releasing:
            raise RuntimeError(
                "an earlier optimizer.step() failed on this rank while sums were added up, so that "
                "ranks may wait for different things; start all of them again, from a checkpoint"
            )

    def _vote(self, ready: int, number: int) -> list[int]:
        """Return the smallest of each over the ranks: of ``ready``, the number, and minus it."""
        ballot = torch.tensor([ready, number, -number], device=self.device)
        dist.all_reduce(ballot, dist.ReduceOp.MIN, group=self._group)
        smallest: list[int] = ballot.tolist()
        return smallest

    def gathered(self, own: Any = None) -> list[Any]:
        """Return what each rank passes, which must be of plain types; a rank waits for all.

        Raises RuntimeError after a step that failed while sums were added up, as ``confirm`` does.
        """
        if self._group is None:
            return [own]
        self._check_in_step()
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise ValueError, on every rank, for the first of the facts that ranks disagree about."""
        if self._group is None:
            return
        found = self.gathered(dict(facts))
        for name in dict.fromkeys(name for one in found for name in one):
            values = [one.get(name, "none") for one in found]
            if len(set(values)) > 1:
                each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"make_private: {name} must be the same on all ranks, got {each}; build the "
                    "same model from the same seed on all of them, or wrap it in "
                    "DistributedDataParallel, and pass the same arguments"
                )

    def check_close(self, sketches: Mapping[str, Sequence[float]]) -> None:
        """Raise ValueError, on every rank, for the first preconditioner that ranks disagree about.

        sketches: of each factor or scale, by layer and side, which are known to be the same.
        """
        if self._group is None:
            return
        first, *others = self.gathered({name: list(x) for name, x in sketches.items()})
        for name, wanted in first.items():
            for rank, found in enumerate(others, 1):
                apart, length = math.dist(wanted, found[name]), math.hypot(*wanted)
                # Not > so that NaN is refused.
                if not apart <= _ROUNDED * length:
                    raise ValueError(
                        f"make_private: the preconditioner's factor for {name} must be the same "
                        f"on all ranks, got {apart / (length or 1):.1%} of difference between "
                        f"rank 0 and rank {rank}; give it the same seed and the same probes on all "
                        "of them"
                    )


ALONE = Ranks()


def parameter_facts(model: nn.Module) -> dict[str, str]:
    """Return size, dtype and value (64 bits of a hash) of every parameter, trained or not.

    Of parameters that are sharded, values differ between ranks, and are left out.
    """
    facts = {}
    for name, parameter in model.named_parameters():
        described = f"{parameter.dtype} {list(parameter.shape)}"
        if not is_sharded(parameter):
            described += f" {_digest(parameter)}"
        facts[f"parameter {name}"] = described.removeprefix("torch.")
    return facts


def group_of(model: nn.Module, group: ProcessGroup | None) -> tuple[nn.Module, ProcessGroup | None]:
    """Return the model without DistributedDataParallel around it, and its processes."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return model, group
    own = model.process_group
    if group is not None and group is not own:
        raise ValueError(
            "make_private: process_group must be left out with DistributedDataParallel, which has "
            "its own; got another one"
        )
    return model.module, own


def bypass_reducer(model: nn.Module) -> Callable[[], None]:
    """Let DistributedDataParallel call its module straight away; return what undoes it.

    Its reducer then waits for no gradients: there are none before the step, and what it would add
    up has no noise. It neither moves inputs to a device nor copies buffers between ranks.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return lambda: None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if model._join_config.enable:
            raise RuntimeError(
                "DistributedDataParallel.join(): it waits for gradients that are not exchanged in "
                "private training; leave it out: a rank without samples calls optimizer.step() "
                "all the same"
            )
        return model.module(*args, **kwargs)

    model.forward = InPlace(model, forward)  # type: ignore[method-assign]
    return lambda: delattr(model, "forward")


def _number(facts: tuple[object, ...]) -> int:
    """Return 56 bits that tell facts apart, so that their negative is an int64 as well."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest())


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()
