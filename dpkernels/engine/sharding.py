"""FSDP2 (``fully_shard``): parameters are shards, of which layers see the whole in their calls.

Captured layers take no gradient from autograd, so that FSDP has none to scatter. Clipped sums are
as large as the whole parameters on every rank, get their noise there, and are added up as anywhere
else; each rank then keeps its shard. That takes the memory of the unsharded gradients; parameters
and the optimizer's state stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from dpkernels.engine.layers.layer import Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_sharded(parameter: Tensor) -> bool:
    """Return whether it is a DTensor; the class itself takes 0.6 s to import."""
    return hasattr(parameter, "placements")


def sharding_group(model: nn.Module, group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the processes that a sharded model's samples are on, or ``group`` of any other model.

    Raises Unsupported unless ``fully_shard`` made the shards, on a mesh of all these processes with
    or without copies (HSDP).
    """
    sharded: dict[str, Any] = {n: p for n, p in model.named_parameters() if is_sharded(p)}
    if not sharded:
        return group
    covered = {id(p) for module in fsdp_modules(model) for p in module.parameters()}
    meshes = []
    for name, parameter in sharded.items():
        *copies, last = parameter.placements
        known = last.is_shard() and all(placement.is_replicate() for placement in copies)
        if id(parameter) not in covered or not known:
            raise Unsupported(
                f"parameter {name} is a DTensor with placements {parameter.placements}; only what "
                "fully_shard shards over all processes is covered, not tensor parallelism; call "
                "fully_shard on the plain model"
            )
        meshes.append(parameter.device_mesh)
    mesh = meshes[0]
    if any(other != mesh for other in meshes):
        raise Unsupported("parameters are sharded over several meshes; use one for all of them")
    if group is None:
        group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    if dist.get_world_size(group) != mesh.size():
        raise Unsupported(
            f"the model is sharded over {mesh.size()} processes, but the sums would be added up "
            f"over {dist.get_world_size(group)}; pass process_group, that of all of its processes"
        )
    return group


def gradient_of(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """Return ``total``, of the whole parameter's size, as its ``grad``: of a shard, that part."""
    total = total.to(parameter.dtype)
    if not is_sharded(parameter):
        return total
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    # All ranks have the total already: no data is sent. A copy, so that the rest can be given up.
    own: Tensor = distribute_tensor(total, like.device_mesh, like.placements, src_data_rank=None)
    return own.clone()


def guard_unsharded(
    model: nn.Module, guard: Callable[[str, Tensor], Callable[[], None]]
) -> Callable[[], None]:
    """Put ``guard`` on the whole parameters, which replace the shards while a module is called.

    guard: called once for each, with its name; returns what undoes it.
    """
    undo: list[Callable[[], None]] = []
    guarded: set[Tensor] = set()

    def watch(module: nn.Module, args: Any) -> None:
        for name, whole in module.named_parameters(prefix=names[module]):
            if whole.requires_grad and not is_sharded(whole) and whole not in guarded:
                guarded.add(whole)
                undo.append(guard(name, whole))

    names = {module: name for name, module in model.named_modules()}
    # After FSDP's own hook, which puts the parameters together.
    undo += [module.register_forward_pre_hook(watch).remove for module in fsdp_modules(model)]

    def detach() -> None:
        for one in undo:
            one()

    return detach


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ``fully_shard`` was called on: the model, or what is inside."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
