"""The benchmarks' peak memory is that of the call, whoever allocates it."""

import mmap

import numpy as np
import torch

from benchmarks import memory

CPU = torch.device("cpu")
MEGABYTE = 1_000_000


# The first and the last page of a block may be resident already.
TWO_PAGES = 2 * mmap.PAGESIZE


def test_memory_sees_the_peak_and_not_the_sum_of_tensors():
    def call():
        first = torch.ones(2 * MEGABYTE)
        del first
        return torch.ones(MEGABYTE)

    call()
    assert memory.peak_extra_memory(call, CPU).allocated == 8 * MEGABYTE


def test_memory_sees_what_pytorch_did_not_allocate():
    def call():
        return np.ones(20 * MEGABYTE, dtype=np.uint8)

    call()
    peak = memory.peak_extra_memory(call, CPU)
    assert peak.allocated == 0
    assert peak.resident is not None and peak.resident >= 20 * MEGABYTE - TWO_PAGES


def test_memory_sees_nothing_where_nothing_is_allocated():
    x = torch.ones(MEGABYTE)

    def call():
        x.mul_(1.0)

    call()
    peak = memory.peak_extra_memory(call, CPU)
    assert peak.allocated < 100  # the scalar
    assert peak.resident is not None and peak.resident < x.nbytes
