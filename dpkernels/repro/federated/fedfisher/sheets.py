"""FedFisher's tables and figures of accuracy: which cells they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dpkernels.repro.federated.fedfisher.figures import ALPHAS, CIFAR, FASHION, TABLE_2, TABLE_4
from dpkernels.repro.federated.fedfisher.figures import TABLE_5 as FIGURES_5
from dpkernels.repro.federated.fedfisher.scene import VALIDATION, Merging, Scene
from dpkernels.repro.federated.fedfisher.study import Cell, Row, Sheet
from dpkernels.repro.federated.runs import settings

MODELS = {FASHION: "lenet", CIFAR: "cnn5x5"}
_PAPERS_EPOCHS = 30
_ROUNDS = 5
_FEW_SHOT_ALPHA, _CLIENTS_ALPHA = 0.1, 0.3
CLIENTS = (10, 20, 30)


Figures = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Effort:
    """How much is trained.

    seeds: of the paper's partition. partitions: others, one seed each, of FashionMNIST in Table 2.
    cifar_seeds: of CIFAR-10, whose network takes ten times as long; 0 leaves it out.
    clients: of the figure over clients.
    """

    seeds: int = 5
    partitions: int = 10
    cifar_seeds: int = 2
    local_epochs: int = _PAPERS_EPOCHS
    clients: tuple[int, ...] = CLIENTS


_PAPER, _OURS = settings(server="paper"), settings(server="ours")


def _fedfisher(label: str, kind: str, ours: bool, form: str) -> Row:
    """Return a row of FedFisher, with the paper's server and expectation, or with ours."""
    made = Merging(
        "fedfisher",
        _OURS if ours else _PAPER,
        fisher="kronecker" if kind == "K-FAC" else "diagonal",
        expectation="rademacher" if ours else "exact",
    )
    forms: Mapping[str, Merging] = {
        "none": made,
        "paper": replace(made, form="paper"),
        "symmetric": replace(made, form="symmetric"),
        "paper-2": replace(made, form="paper-2"),
        "paper-6": replace(made, form="paper-6"),
    }
    return Row(label, forms[form])


FEDAVG = Row("FedAvg", Merging("fedavg"))
OT_FUSION = Row("OTFusion", Merging("ot-fusion"))
PFNM = Row("PFNM", Merging("pfnm"))
REGMEAN = Row("RegMean", Merging("regmean", fisher="kronecker"))
DENSE = Row("DENSE", Merging("dense"))
FISHER_MERGE = Row(
    "FisherMerge", Merging("fisher-merge", (), "diagonal", expectation="exact", form="paper")
)
DIAGONAL = _fedfisher("FedFisher(Diag)", "Diag", ours=False, form="paper")
KRONECKER = _fedfisher("FedFisher(K-FAC)", "K-FAC", ours=False, form="paper")
OUR_DIAGONAL = _fedfisher("ours, Diag", "Diag", ours=True, form="symmetric")
OUR_KRONECKER = _fedfisher("ours, K-FAC", "K-FAC", ours=True, form="symmetric")
OUR_KRONECKER_WHOLE = _fedfisher("ours, K-FAC, not compressed", "K-FAC", ours=True, form="none")
LAST = replace(
    _fedfisher("ours, K-FAC, no validation records", "K-FAC", ours=True, form="symmetric"),
    merging=replace(OUR_KRONECKER.merging, settings=settings(server="ours", choose=False)),
)

ROWS = (
    FEDAVG,
    OT_FUSION,
    PFNM,
    REGMEAN,
    DENSE,
    FISHER_MERGE,
    DIAGONAL,
    KRONECKER,
    OUR_DIAGONAL,
    OUR_KRONECKER,
    OUR_KRONECKER_WHOLE,
    LAST,
)
# The paper leaves OTFusion and PFNM out of several rounds: the one does not learn, the other grows.
FEW_SHOT_ROWS = (FEDAVG, REGMEAN, DENSE, FISHER_MERGE, DIAGONAL, KRONECKER, OUR_KRONECKER)

_PARTITION = (
    "The partition is the authors' one for all seeds (Dirichlet, NumPy's seed 3); seeds are of the "
    "first parameters and of the order of records."
)
_SERVERS_RECORDS = (
    f"{VALIDATION} training records belong to the server, are declared public, and are taken out "
    "of the clients' parts (the authors' code leaves them in). Methods choose by them: FedFisher's "
    "iterate, RegMean's scale, OTFusion's cost, DENSE's step. The test part is looked at once."
)
_DIFFERENCES = (
    "FedFisher(...) and FisherMerge: exact expectation over classes, the paper's compression to "
    "FedAvg's bytes; FedFisher with the Adam of the authors' code, 2,000 steps, best of every 100. "
    "'ours': one backward pass with Rademacher signs, our compression to FedAvg's bytes, conjugate "
    "gradients, at most 50 iterations, the best of all.",
    "RegMean is not compressed here, which the paper's is, and merges convolutions too, which the "
    "authors' code averages. FedAvg, OTFusion, PFNM and DENSE upload models alone, in float32.",
    "FashionMNIST is scaled by MNIST's constants, as in the authors' code.",
)
_CIFAR = (
    "CIFAR-10: 20,000 of the 50,000 training images are here, and clients do not augment them; the "
    "authors' code has random crops and flips. Its figures cannot be expected to agree."
)
_LOCAL = "Clients: SGD, 30 epochs, rate .01, momentum .9, batch 64, no weight decay."


def _scene(dataset: str, alpha: float, effort: Effort, clients: int = 5) -> Scene:
    return Scene(dataset, MODELS[dataset], alpha, clients, local_epochs=effort.local_epochs)


def _seeds(scene: Scene, count: int) -> tuple[Scene, ...]:
    return tuple(replace(scene, seed=seed) for seed in range(count))


def _count(dataset: str, effort: Effort) -> int:
    return effort.cifar_seeds if dataset == CIFAR else effort.seeds


def _datasets(effort: Effort) -> list[str]:
    return [dataset for dataset in (FASHION, CIFAR) if _count(dataset, effort)]


def _title(dataset: str, clients: int = 5) -> str:
    names = {FASHION: "FashionMNIST, LeNet", CIFAR: "CIFAR-10 (20,000 images), CNN"}
    return f"{names[dataset]}, {clients} clients"


def _notes(effort: Effort, *more: str) -> tuple[str, ...]:
    local = _LOCAL
    if effort.local_epochs != _PAPERS_EPOCHS:
        local = _LOCAL.replace("30 epochs", f"**{effort.local_epochs} epochs (the paper has 30)**")
    cifar = (_CIFAR,) if effort.cifar_seeds else ()
    return (local, _PARTITION, _SERVERS_RECORDS, *_DIFFERENCES, *cifar, *more)


def table2(effort: Effort) -> Sheet:
    """Return Table 2: five clients, by alpha."""
    cells = []
    for dataset in _datasets(effort):
        for place, alpha in enumerate(ALPHAS):
            first = _scene(dataset, alpha, effort)
            drawn = range(effort.partitions if dataset == FASHION else 0)
            others = tuple(replace(first, partition_seed=100 + number) for number in drawn)
            for row in ROWS:
                paper = TABLE_2[dataset].get(row.label)
                cells.append(
                    Cell(
                        _title(dataset),
                        f"alpha {alpha:g}",
                        row,
                        _seeds(first, _count(dataset, effort)),
                        others,
                        None if paper is None else paper[place],
                    )
                )
    notes = _notes(effort, "The paper's FedAvg cells are not in our copy.")
    return Sheet("table2", "Table 2, one round, by heterogeneity", tuple(cells), notes)


def _compression(
    effort: Effort, rows: Sequence[tuple[str, Row, int | None]], figures: Figures
) -> tuple[Cell, ...]:
    cells = []
    for dataset in _datasets(effort):
        scenes = _seeds(_scene(dataset, 0.1, effort), _count(dataset, effort))
        for column, row, s_q in rows:
            paper = None if s_q is None else figures[dataset].get(s_q)
            cells.append(Cell(_title(dataset) + ", alpha .1", column, row, scenes, (), paper))
    return tuple(cells)


def table4(effort: Effort) -> Sheet:
    """Return Table 4: FedFisher(Diag), compressed and not."""
    papers, ours = "FedFisher(Diag)", "ours, Diag"
    rows = [
        ("not compressed", _fedfisher(papers, "Diag", False, "none"), 1),
        ("the paper's, s_q = 2", _fedfisher(papers, "Diag", False, "paper"), 2),
        ("ours", _fedfisher(papers, "Diag", False, "symmetric"), None),
        ("not compressed", _fedfisher(ours, "Diag", True, "none"), None),
        ("the paper's, s_q = 2", _fedfisher(ours, "Diag", True, "paper"), None),
        ("ours", _fedfisher(ours, "Diag", True, "symmetric"), None),
    ]
    cells = _compression(effort, rows, TABLE_4)
    notes = _notes(effort, _BYTES)
    return Sheet("table4", "Table 4, compression of the diagonal", cells, notes)


def table5(effort: Effort) -> Sheet:
    """Return Table 5: FedFisher(K-FAC), compressed and not."""
    rows: list[tuple[str, Row, int | None]] = []
    for ours in (False, True):
        label = "ours, K-FAC" if ours else "FedFisher(K-FAC)"
        for column, form, s_q in (
            ("not compressed", "none", 1),
            ("the paper's, s_q = 2", "paper-2", 2),
            ("the paper's, s_q = 4", "paper", 4),
            ("the paper's, s_q = 6", "paper-6", 6),
            ("ours", "symmetric", None),
        ):
            row = _fedfisher(label, "K-FAC", ours, form)
            rows.append((column, row, None if ours else s_q))
    cells = _compression(effort, rows, FIGURES_5)
    notes = _notes(effort, _BYTES)
    return Sheet("table5", "Table 5, compression of K-FAC", cells, notes)


_BYTES = (
    "Uploads are really packed and unpacked; bytes stand below. The paper's form counts no scales, "
    "and its factors that come back are not positive semidefinite. The second row has our server "
    "behind the same uploads."
)


def few_shot(effort: Effort) -> Sheet:
    """Return Figure 2: five rounds of training and merging."""
    cells = []
    for row in FEW_SHOT_ROWS:
        first = _scene(FASHION, _FEW_SHOT_ALPHA, effort)
        scenes = _seeds(first, effort.seeds)
        for number in range(1, _ROUNDS + 1):
            panel = f"{_title(FASHION)}, alpha {_FEW_SHOT_ALPHA:g}"
            cells.append(Cell(panel, str(number), row, scenes))
            scenes = tuple(scene.after(row.merging) for scene in scenes)
    more = "Figure 2 is not in our copy. The server's records are the same in every round."
    notes = _notes(replace(effort, cifar_seeds=0), more)
    return Sheet("few_shot", "Figure 2, several rounds", tuple(cells), notes, curves="round")


def clients(effort: Effort) -> Sheet:
    """Return Figure 3: more clients, at alpha .3."""
    cells = []
    for dataset in _datasets(effort):
        panel = _title(dataset).replace("5 clients", f"alpha {_CLIENTS_ALPHA:g}")
        for count in effort.clients:
            scenes = _seeds(_scene(dataset, _CLIENTS_ALPHA, effort, count), _count(dataset, effort))
            cells += [Cell(panel, str(count), row, scenes) for row in ROWS]
    notes = _notes(effort, "Figure 3 is not in our copy.")
    return Sheet("clients", "Figure 3, by clients", tuple(cells), notes, curves="clients")


SHEETS: Mapping[str, Callable[[Effort], Sheet]] = {
    "2": table2,
    "4": table4,
    "5": table5,
    "few-shot": few_shot,
    "clients": clients,
}
