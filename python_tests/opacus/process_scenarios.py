"""What processes do that train one model together."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpkernels.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpkernels.opacus.utils.fsdp_utils import FSDP2Wrapper
from python_tests.engine.distributed.processes import error_of, full
from python_tests.opacus.small import classifier, made, train
from python_tests.run.processes import shared_folder

WRAPPERS = {
    "DPDDP": DifferentiallyPrivateDistributedDataParallel,
    "DDP": DistributedDataParallel,
    "FSDP2": FSDP2Wrapper,
}


def trained(wrapper, **changes):
    """Return parameters after an epoch, the records that this rank saw, and the run's numbers."""
    engine = PrivacyEngine(accountant="rdp")
    model = WRAPPERS[wrapper](classifier())
    mode = "ghost_fsdp" if wrapper == "FSDP2" else "hooks"
    model, optimizer, *_, loader = made(
        engine, module=model, grad_sample_mode=mode, sample_rate=0.5, **changes
    )
    seen = []
    for x, y in loader:
        seen.append(x)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": parameters(model),
        "seen": seen,
        "epsilon": engine.get_epsilon(1e-5),
        "history": engine.accountant.history,
        "expected_batch_size": optimizer.expected_batch_size,
    }


def without_noise():
    return {name: trained(name, noise_multiplier=0.0) for name in WRAPPERS}


def with_noise():
    return {name: trained(name) for name in WRAPPERS}


def refused():
    """Return what each rank says when one of them sends a part of its batch only."""
    model = DifferentiallyPrivateDistributedDataParallel(classifier())
    model, optimizer, loader = made(module=model, sample_rate=1.0)
    x, y = next(iter(loader))
    part = slice(0, -1) if dist.get_rank() == 0 else slice(None)
    cross_entropy(model(x[part]), y[part]).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), optimizer.run.training.steps
    return "", optimizer.run.training.steps


def one_order():
    model = DifferentiallyPrivateDistributedDataParallel(classifier())
    try:
        train(*made(module=model, poisson_sampling=False))
    except ValueError as error:
        return str(error)
    return ""


def a_group_of_one():
    """Return place, batch size and steps where each rank trains by itself in DDP."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = DistributedDataParallel(classifier(), process_group=groups[dist.get_rank()])
    model, optimizer, loader = made(module=model, sample_rate=1.0)
    train(model, optimizer, loader)
    training = optimizer.run.training
    return training.rank, training.world_size, loader.batch_size_now, training.steps


def in_microbatches():
    """Return what is said, and the steps taken, where batches come in microbatches."""
    found = {}
    for name, wrap in WRAPPERS.items():
        model, optimizer, loader = made(module=wrap(classifier()), sample_rate=0.5)
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
        )

        def run(manager=manager, model=model, optimizer=optimizer):
            with manager as split:
                train(model, optimizer, split)

        found[name] = error_of(run), optimizer.run.training.steps
    return found


def begun(wrapper):
    engine = PrivacyEngine(accountant="rdp")
    return engine, *made(engine, module=WRAPPERS[wrapper](classifier()), sample_rate=0.5)


def parameters(model):
    return [full(parameter) for parameter in model.parameters()]


def resumed(options=None):
    """Return files, and parameters and history before and after a checkpoint is loaded."""
    found = {}
    for name in WRAPPERS:
        path = shared_folder() / "x.pt"
        engine, model, optimizer, loader = begun(name)
        train(model, optimizer, loader)
        engine.save_checkpoint(
            path=path, module=model, optimizer=optimizer, torch_save_kwargs=options
        )
        dist.barrier()
        files = sorted(file.name for file in path.parent.iterdir())
        again, other, optimizer, loader = begun(name)
        again.load_checkpoint(path=path, module=other, optimizer=optimizer)
        loaded = parameters(other)
        train(other, optimizer, loader)
        found[name] = {
            "files": files,
            "saved": parameters(model),
            "loaded": loaded,
            "after": parameters(other),
            "history": again.accountant.history,
        }
    return found


def resumed_with_options():
    return resumed({"pickle_protocol": 2})


def cut_short():
    """Return the steps of what is loaded where one rank only has written the later of two."""
    path = shared_folder() / "x.pt"
    own = path.with_name(f"x.pt.rank{dist.get_rank()}")
    engine, model, optimizer, loader = begun("FSDP2")
    contents = []
    for _ in range(2):
        train(model, optimizer, loader)
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        contents.append(own.read_bytes())
    own.write_bytes(contents[0])
    if dist.get_rank() == 0:
        own.with_name(f"{own.name}.new").write_bytes(contents[1])
    engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    steps = optimizer.run.training.steps
    own.unlink()
    return steps, error_of(lambda: engine.load_checkpoint(path=path, module=model))


ALL = (without_noise, with_noise, refused, one_order, a_group_of_one, in_microbatches)
ALL += (resumed, resumed_with_options, cut_short)
