"""Private training as a user of ``torchrun`` writes it: two classes, one model, several ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpkernels

RECORDS, STEPS, RATE = 512, 20, 0.125


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(2, (RECORDS // world,), generator=generator)
    centres = 3.0 * (2 * labels - 1).unsqueeze(1)
    x = centres + torch.randn(len(labels), 8, generator=generator)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=RATE * RECORDS,
        loss_reduction="mean",
    )
    for _ in range(STEPS):
        chosen = torch.rand(len(labels)) < RATE
        optimizer.zero_grad()
        if chosen.any():
            nn.functional.cross_entropy(model(x[chosen]), labels[chosen]).backward()
        optimizer.step()
    right = float((model(x).argmax(1) == labels).float().mean())
    # The values, to the last bit.
    values = [p.double().sum().item() for p in model.parameters()]
    # In one piece: ranks share the output.
    print(f"rank {rank}: {right} {values}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Gloo's threads outlive destroy_process_group (torch 2.13, with DDP alone, too), and one that
    # frees a tensor while the interpreter ends aborts the process now and then.
    os._exit(0)
