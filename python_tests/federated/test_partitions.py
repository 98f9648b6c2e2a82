"""Every scheme deals every record once, keeps its promise about classes, and follows its seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.federated.partitions import (
    PARTITIONS,
    Partition,
    by_class,
    dirichlet,
    iid,
    parse,
    shards,
)

SPECS = ["iid", "dirichlet:0.1", "dirichlet:1e-5", "classes:12", "shards:2"]

label_lists = st.lists(st.integers(0, 11), max_size=60).map(
    lambda found: torch.tensor(found, dtype=torch.int64)
)


def unequal_labels(*counts):
    """Return labels of classes that occur so often, in no order."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


def classes_of(partition, labels):
    return [labels[partition.indices(i)].unique().tolist() for i in range(partition.clients)]


@pytest.mark.parametrize("spec", SPECS)
@given(labels=label_lists, clients=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_every_record_is_at_one_client_and_the_seed_decides(spec, labels, clients, seed):
    partition = parse(spec)(labels, clients, seed)
    assert partition.clients == clients and len(partition.sizes) == clients
    assert partition.order.sort().values.tolist() == list(range(len(labels)))
    again = parse(spec)(labels, clients, seed)
    assert torch.equal(again.order, partition.order)
    assert torch.equal(again.offsets, partition.offsets)


@pytest.mark.parametrize("spec", SPECS)
def test_other_seeds_give_other_partitions_and_a_generator_moves_on(spec):
    labels = unequal_labels(30, 50, 20)
    one, other = (parse(spec)(labels, 5, seed) for seed in (0, 1))
    assert not torch.equal(one.order, other.order)
    generator = torch.Generator().manual_seed(7)
    first, second = (parse(spec)(labels, 5, generator) for _ in range(2))
    assert not torch.equal(first.order, second.order)
    again = parse(spec)(labels, 5, torch.Generator().manual_seed(7))
    assert torch.equal(again.order, first.order)


@given(count=st.integers(0, 200), clients=st.integers(1, 30))
def test_equal_shares_differ_by_one_record(count, clients):
    sizes = iid(count, clients, 0).sizes
    assert sizes.sum() == count and sizes.max() - sizes.min() <= 1


def test_clients_may_be_empty():
    partition = iid(3, 5, 0)
    assert sorted(partition.sizes.tolist()) == [0, 0, 1, 1, 1]
    records = partition.of(torch.randn(3, 2), torch.tensor([0, 1, 0]))
    assert records.clients == 5 and records.most == 1
    # About ten clients want the class of two records.
    assert 0 in dirichlet(unequal_labels(2, 80), 20, 0.01, 0).sizes


def test_small_alpha_means_few_classes_and_large_alpha_equal_shares():
    labels = torch.arange(10).repeat(1000)

    def share_of_the_largest_class(alpha):
        shares = []
        for seed in range(5):
            partition = dirichlet(labels, 10, alpha, seed)
            for i in range(10):
                counts = labels[partition.indices(i)].bincount(minlength=10)
                if counts.sum() > 0:
                    shares.append((counts.max() / counts.sum()).item())
        return sum(shares) / len(shares)

    few, some, equal = map(share_of_the_largest_class, (0.01, 1.0, 1000.0))
    assert few > 0.75 > 0.5 > some > 0.2 > 0.13 > equal
    sizes = dirichlet(labels, 10, 1e6, 0).sizes.double()
    assert (sizes / 1000 - 1).abs().max() < 0.02


def test_a_class_is_cut_in_proportion_to_its_column():
    """The mean of a client's share of a class is 1 / clients, whatever alpha is."""
    labels = torch.zeros(1000, dtype=torch.int64)
    sizes = torch.stack([dirichlet(labels, 4, 0.3, seed).sizes for seed in range(200)]).double()
    # One class: a taste in classes is 1 for every client, so that shares are equal.
    assert (sizes - 250).abs().max() <= 1
    two = unequal_labels(600, 400)
    shares = torch.stack(
        [two[dirichlet(two, 4, 0.3, seed).indices(0)].bincount(minlength=2) for seed in range(400)]
    ).double() / torch.tensor([600, 400])
    torch.testing.assert_close(shares.mean(0), torch.full((2,), 0.25).double(), atol=0.05, rtol=0)


@given(
    labels=label_lists,
    clients=st.integers(1, 30),
    most=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_no_client_has_more_classes_than_it_may(labels, clients, most, seed):
    present = len(labels.unique())
    if clients * most < present:
        with pytest.raises(ValueError, match=f"{most} classes each cannot hold the {present} clas"):
            by_class(labels, clients, most, seed)
        return
    partition = by_class(labels, clients, most, seed)
    assert partition.order.sort().values.tolist() == list(range(len(labels)))
    assert max(map(len, classes_of(partition, labels))) <= most
    if most >= 2 and clients >= present:
        assert partition.sizes.max() - partition.sizes.min() <= 1


def test_one_class_each_where_there_are_as_many_clients_as_classes():
    labels = unequal_labels(5, 50, 500)
    partition = by_class(labels, 3, 1, 0)
    assert sorted(classes_of(partition, labels)) == [[0], [1], [2]]
    assert sorted(partition.sizes.tolist()) == [5, 50, 500]
    # Further clients go where most records are: the largest client is as small as can be.
    assert sorted(by_class(labels, 8, 1, 0).sizes.tolist()) == [5, 50, *[83] * 4, 84, 84]


def test_fewer_clients_than_classes_hold_all_of_them():
    labels = unequal_labels(1, 1, 10, 10)
    partition = by_class(labels, 2, 2, 0)
    assert partition.sizes.tolist() == [11, 11]
    assert max(map(len, classes_of(partition, labels))) == 2


def test_shards_are_of_neighbouring_labels():
    labels = unequal_labels(*[100] * 10)
    partition = shards(labels, 50, 2, 0)
    assert (partition.sizes == 20).all()
    assert max(map(len, classes_of(partition, labels))) == 2
    assert min(map(len, classes_of(partition, labels))) >= 1
    # 100 shards of 10 records, each of one class: all 10 shards of a class are dealt.
    held = torch.stack([labels[partition.indices(i)].bincount(minlength=10) for i in range(50)])
    assert (held % 10 == 0).all() and (held.sum(0) == 100).all()


def test_records_of_a_client_are_its_rows_of_the_table():
    x, y = torch.randn(7, 3), torch.arange(7)
    partition = Partition.of_parts([torch.tensor([5, 1]), torch.tensor([], dtype=torch.int64)])
    records = partition.of(x, y, bias=True)
    assert torch.equal(records.x, torch.cat([x[[5, 1]], torch.ones(2, 1)], 1))
    assert records.labels.tolist() == [5, 1] and records.spans.tolist() == [[0, 2], [2, 2]]
    with pytest.raises(ValueError, match="up to 5, got 4 rows"):
        partition.of(x[:4], y[:4])
    with pytest.raises(IndexError, match="client must be 0 to 1, got 2"):
        partition.indices(2)


@given(
    labels=label_lists,
    clients=st.integers(1, 9),
    taken=st.sets(st.integers(0, 59)),
)
def test_rows_that_are_taken_out_leave_the_others_where_they_were(labels, clients, taken):
    count = len(labels)
    rows = torch.tensor(sorted(row for row in taken if row < count), dtype=torch.int64)
    left = [row for row in range(count) if row not in taken]
    before = iid(count, clients, 0)
    after = before.without(rows, count)
    for i in range(clients):
        kept = [row for row in before.indices(i).tolist() if row not in taken]
        assert [left[row] for row in after.indices(i).tolist()] == kept


@pytest.mark.parametrize(
    ("order", "offsets", "message"),
    [
        ([0, 1, 1], [0, 3], "a row once at most, got rows that repeat"),
        ([0, -1], [0, 2], "rows >= 0, got -1"),
        ([0, 1], [0, 1], "from 0 to 2, the length of order"),
        ([0, 1], [0, 2, 1, 2], "must not decrease"),
        ([], [0], "for at least 1 client"),
    ],
)
def test_what_is_no_partition_is_refused(order, offsets, message):
    with pytest.raises(ValueError, match=message):
        Partition(torch.tensor(order, dtype=torch.int64), torch.tensor(offsets))


LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(3, 0, 0), "iid: clients must be an integer >= 1, got 0"),
        (lambda: iid(-1, 2, 0), "iid: count must be an integer >= 0, got -1"),
        (lambda: iid(3, 2, -1), r"seed must be an integer from 0 to 2\^32 - 1, got -1"),
        (lambda: dirichlet(LABELS, 2, 0.0, 0), "alpha must be a finite number > 0, got 0.0"),
        (lambda: dirichlet(LABELS.float(), 2, 1.0, 0), r"labels must be \[N\] int64, got .*long"),
        (lambda: shards(LABELS - 1, 2, 1, 0), "labels must be classes 0, 1, ..., got -1"),
        (lambda: shards(LABELS, 2, 0, 0), "shards_per_client must be an integer >= 1, got 0"),
        (lambda: by_class(LABELS, 2, 0, 0), "classes_per_client must be an integer >= 1, got 0"),
        (lambda: by_class(LABELS, 2, 1, 0), "the 3 classes of labels; take more clients"),
        (lambda: Partition(LABELS.int(), LABELS), "order must be one axis of int64, got .*int32"),
    ],
)
def test_errors_name_what_was_wanted_and_what_was_got(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "one of iid, dirichlet, classes, shards, got ''"),
        ("label", "one of iid, dirichlet, classes, shards, got 'label'"),
        ("iid:2", "iid takes no number, got '2'; write iid"),
        ("dirichlet", "takes alpha > 0, got ''; write dirichlet:0.1"),
        ("dirichlet:-1", "alpha of dirichlet must be a finite number > 0, got -1"),
        ("dirichlet:nan", "alpha of dirichlet must be a finite number > 0, got nan"),
        ("classes:0", "classes takes an integer >= 1, .*got '0'; write classes:2"),
        ("shards:two", "shards takes an integer >= 1, .*got 'two'; write shards:2"),
    ],
)
def test_a_specification_that_means_nothing_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_the_command_line_names_the_functions():
    labels = unequal_labels(30, 50, 20, 10)
    expected = {
        "iid": iid(len(labels), 6, 1),
        "dirichlet:0.3": dirichlet(labels, 6, 0.3, 1),
        "classes:2": by_class(labels, 6, 2, 1),
        "shards:3": shards(labels, 6, 3, 1),
    }
    assert {spec.split(":")[0] for spec in expected} == PARTITIONS.keys()
    for spec, partition in expected.items():
        assert torch.equal(parse(spec)(labels, 6, 1).order, partition.order)
