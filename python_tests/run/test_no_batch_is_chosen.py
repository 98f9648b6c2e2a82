"""Every batch that is drawn makes one step, whole: none is left out, or put off, by its content."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dpkernels
from dpkernels.privacy.samplers import FixedSizeSampler, PoissonSampler, ShuffledSampler
from dpkernels.run import PrivateLoader, PrivateRun

RECORDS = 40
SAMPLERS: dict[str, Callable[[], object]] = {
    "poisson": lambda: PoissonSampler(RECORDS, 0.2),
    "fixed size": lambda: FixedSizeSampler(RECORDS, 8),
    "shuffled": lambda: ShuffledSampler(RECORDS, 8),
}
SAMPLED = ["poisson", "fixed size"]


class Indices(Dataset):
    """Records that are their own indices; ``broken`` ones cannot be read."""

    def __init__(self) -> None:
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("this record cannot be read")
        return torch.tensor([float(index)])


def made(kind: str, **options) -> PrivateRun:
    sampler = SAMPLERS[kind]()
    model = nn.Linear(1, 2)
    training = dpkernels.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=8,
        loss_reduction="sum",
    )
    accountant = "gaussian" if kind == "shuffled" else "rdp"
    return PrivateRun(training, PrivateLoader(Indices(), sampler, **options), accountant=accountant)


def records(batch) -> list[int]:
    return batch.flatten().int().tolist()


def backward(run: PrivateRun, batch) -> None:
    run.training.model(batch).sum().backward()


def step(run: PrivateRun, batch) -> None:
    backward(run, batch)
    run.training.optimizer.step()


def refused(run: PrivateRun, what: Callable[[], object], match: str) -> None:
    """Assert that ``what`` raises, releases nothing, and tells nothing of the records."""
    before = run.training.steps, run.training.noise_key.counter, run.accountant.steps
    with pytest.raises(RuntimeError, match=match) as error:
        what()
    assert (run.training.steps, run.training.noise_key.counter, run.accountant.steps) == before
    assert not re.search(r"\d", str(error.value))


def first_with_records(run: PrivateRun) -> Iterator[torch.Tensor]:
    """Take steps on empty batches; return an iterator that begins with one that is not."""
    while True:
        for batch in (batches := iter(run.loader)):
            if len(batch):
                return itertools.chain([batch], batches)
            step(run, batch)


def by_break(run: PrivateRun) -> None:
    for batch in run.loader:
        backward(run, batch)
        break


def by_abandoning_an_iterator(run: PrivateRun) -> None:
    next(iter(run.loader))


def by_exception(run: PrivateRun) -> None:
    with pytest.raises(FloatingPointError):  # noqa: PT012
        for _ in run.loader:
            raise FloatingPointError


def by_ctrl_c(run: PrivateRun) -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for batch in run.loader:
            backward(run, batch)
            raise KeyboardInterrupt


def by_looking_at_all(run: PrivateRun) -> None:
    with torch.no_grad():
        for batch in run.loader:
            run.training.model(batch)


def by_a_step_that_fails(run: PrivateRun) -> None:
    def fail(*_):
        raise MemoryError

    for batch in run.loader:
        backward(run, batch)
        if run.loader.is_last_microbatch:
            break
    stop = run.training.before_release(fail)
    with pytest.raises(MemoryError):
        run.training.optimizer.step()
    stop()


WAYS = [
    by_break,
    by_abandoning_an_iterator,
    by_exception,
    by_ctrl_c,
    by_looking_at_all,
    by_a_step_that_fails,
]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 3}], ids=str)
def test_a_batch_that_has_no_step_comes_first_however_it_was_left(kind, leave, options):
    check_comes_first(made(kind, **options), leave)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("leave", [by_break, by_looking_at_all])
def test_a_batch_that_has_no_step_comes_before_what_workers_fetched_ahead(kind, leave):
    check_comes_first(made(kind, num_workers=1, prefetch_factor=3), leave)


def check_comes_first(run: PrivateRun, leave: Callable[[PrivateRun], None]) -> None:
    """Assert that the first batch, and the second, come again until they have their step."""

    def whole_batch(batches) -> list[int]:
        found = []
        while True:
            microbatch = next(batches)
            found += records(microbatch)
            backward(run, microbatch)
            if run.loader.is_last_microbatch:
                return found

    first = whole_batch(iter(run.loader))
    for _ in range(2):
        leave(run)
        batches = iter(run.loader)
        assert whole_batch(batches) == first
    run.training.optimizer.step()
    assert run.training.steps == 1
    # The same holds in the middle of an epoch.
    second = whole_batch(batches)
    leave(run)
    assert whole_batch(iter(run.loader)) == second
    run.training.optimizer.step()
    assert run.training.steps == run.loader.batches_handed_out == 2


@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_cannot_be_chosen_by_what_is_in_them(kind):
    run = made(kind)
    for _ in range(20):
        for batch in run.loader:
            if 0 not in records(batch):
                break
            step(run, batch)
    # At most those of a beginning that all held record 0: then the same one comes again for ever.
    waiting = next(iter(run.loader))
    assert 0 not in records(waiting)
    assert run.loader.batches_handed_out == run.training.steps + 1


@pytest.mark.parametrize("kind", SAMPLERS)
def test_looking_on_until_a_batch_pleases_does_not_make_it_the_one_to_step_on(kind):
    run = made(kind)
    batches = first_with_records(run)
    next(batches)
    refused(run, lambda: step(run, next(b for b in batches if len(b))), "a batch has no step")


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_left_out_in_an_epoch_is_refused_and_comes_again(kind):
    run = made(kind)
    skipped = []

    def skip_losses_that_are_not_finite():
        for batch in itertools.chain(first_with_records(run), *[run.loader] * 9):
            if len(batch) and not skipped:
                skipped.extend(records(batch))
                run.training.optimizer.zero_grad()
                continue
            step(run, batch)

    with pytest.raises(RuntimeError, match="Whether there is a step must not depend"):
        skip_losses_that_are_not_finite()
    batch = next(iter(run.loader))
    assert records(batch) == skipped
    step(run, batch)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("spoil", ["zero_grad", "no backward", "a part"])
def test_noise_in_place_of_samples_is_refused(kind, spoil):
    run = made(kind)
    batch = next(first_with_records(run))
    if spoil == "zero_grad":
        backward(run, batch)
        run.training.optimizer.zero_grad()
    elif spoil == "a part":
        backward(run, batch[: len(batch) // 2])
    refused(run, run.training.optimizer.step, "does not have all samples")
    again = next(iter(run.loader))
    assert records(again) == records(batch)
    step(run, again)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_microbatch_taken_back_is_missed(kind):
    run = made(kind, max_physical_batch_size=1)

    def loop():
        for batch in itertools.chain(*[run.loader] * 20):
            backward(run, batch)
            if not run.loader.is_last_microbatch:
                run.training.optimizer.zero_grad()
            else:
                run.training.optimizer.step()

    with pytest.raises(RuntimeError, match="does not have all samples"):
        loop()
    assert run.training.steps == run.accountant.steps


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_cannot_be_read_does_not_make_its_batch_another(kind, workers):
    run = made(kind, num_workers=workers)
    # An empty batch has the shape of the first record, so that one can be read.
    run.loader.dataset.broken = set(range(1, RECORDS))
    found = []
    for _ in range(5):
        with pytest.raises(OSError, match="cannot be read"):  # noqa: PT012
            for batch in itertools.chain(*[run.loader] * 9):
                step(run, batch)
        found.append(run.loader.waiting.records)
    assert found[0] and all(again == found[0] for again in found)
    run.loader.dataset.broken = set()
    assert records(next(iter(run.loader))) == found[0]


@pytest.mark.parametrize("kind", SAMPLED)
def test_going_back_to_a_checkpoint_does_not_lose_the_batch_that_waits(kind, tmp_path):
    run = made(kind)
    batches = iter(run.loader)
    step(run, next(batches))
    run.save(tmp_path / "run.pt")
    step(run, next(batches))
    waiting = records(next(batches))
    run.load(tmp_path / "run.pt")
    for _ in range(2):
        batch = next(iter(run.loader))
        assert records(batch) == waiting
    step(run, batch)
    assert run.training.steps == 2 and run.loader.batches_handed_out == 2


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_checkpoint_is_before_the_batch_that_waits_and_does_not_say_who_is_in_it(kind, tmp_path):
    run = made(kind)
    batches = first_with_records(run)
    step(run, next(batches))
    place = run.loader.state_dict()
    by_looking_at_all(run)
    waiting = records(next(iter(run.loader)))
    now = run.loader.state_dict()
    if kind == "shuffled":
        assert now == place
    assert now["batches_handed_out"] == place["batches_handed_out"] == run.training.steps
    assert str(waiting)[1:-1] not in json.dumps(run.loader.state_dict())
    run.save(tmp_path / "run.pt")
    resumed = made(kind)
    resumed.load(tmp_path / "run.pt")
    if kind == "shuffled":
        assert records(next(iter(resumed.loader))) == waiting
    assert resumed.training.steps == run.training.steps
    assert resumed.epsilon(1e-5) == run.epsilon(1e-5)


@pytest.mark.parametrize("kind", SAMPLED)
def test_leaving_after_so_many_steps_leaves_epochs_as_long_as_they_are(kind):
    run = made(kind)
    for _ in range(4):
        for k, batch in enumerate(run.loader):
            if k == 3:
                break
            step(run, batch)
    assert run.training.steps == 12
    seen = 0
    for batch in run.loader:
        step(run, batch)
        seen += 1
    assert seen == len(run.loader) and run.accountant.steps == 12 + seen


def test_a_shuffled_epoch_left_anywhere_has_every_record_once():
    run = made("shuffled")
    seen = []
    while run.training.steps < len(run.loader):
        for k, batch in enumerate(run.loader):
            if k == 2:
                break
            seen += records(batch)
            step(run, batch)
    assert sorted(seen) == list(range(RECORDS))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_that_is_void_takes_no_batch_from_the_next(persistent):
    run = made("shuffled", num_workers=1, persistent_workers=persistent)
    old = iter(run.loader)
    step(run, next(old))
    new = iter(run.loader)
    seen = records(next(new))
    with pytest.raises(RuntimeError, match="iterate once at a time"):
        next(old)
    run.training.optimizer.zero_grad()
    batch = next(iter(run.loader))
    seen += records(batch)
    assert seen[:8] == seen[8:]
    step(run, batch)


def test_samples_of_another_loader_get_that_reason():
    run = made("fixed size")
    strange = torch.zeros(8, 1)
    refused(run, lambda: step(run, strange), "come from another loader")
    step(run, next(iter(run.loader)))
    refused(run, lambda: step(run, strange[:3]), "come from another loader")
    refused(run, lambda: step(run, strange), "or samples from another loader")
    next(iter(run.loader))
    refused(run, lambda: step(run, torch.zeros(9, 1)), "come from another loader")
