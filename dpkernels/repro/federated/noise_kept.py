"""Why taking noise out of a trained model does not help: the model has learnt to live with it.

In a simulation the sum of all updates is known in two parts, M = S + N: what clients moved, and
noise. Clients train at W(0) + M, so that S makes up for N. Two things are measured:

- the singular values of S and N in the first layer: a spectral threshold tells a direction of S
  from noise only where it exceeds the largest of N;
- the accuracy of W(0) + S + a N for a between 0 (a perfect threshold) and above 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.federated import Federation, UDPFedAvg, Visit
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Tensors
from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro import provenance
from dpkernels.repro.federated.runs import Place, Run, federation_of, settings
from dpkernels.whole_file import whole_file, write_text

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
_SHOWN = 20  # singular values


@dataclass(frozen=True)
class Watched(UDPFedAvg):
    """UDP-FedAvg that notes the mean of clipped updates before noise. A simulation alone can."""

    name: ClassVar[str] = "watched"
    clean: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy clipped updates; note what they were."""
        moved = visit.problem.local_updates(
            visit.cohort, visit.sent["theta"], self.local, visit.seeds()
        )
        clipped = clip_rows(moved, self.clip)
        self.clean.append(clipped.sum(0) / visit.terms.cohort)
        return visit.noisy(clipped), {}


@dataclass(frozen=True)
class Found:
    """One run.

    accuracy: of W(0) + S + a N, in percent, by a of ``SHARES``.
    signal, noise: the largest singular values of S and N in the first layer.
    signal_length, noise_length: norms of S and N, all layers.
    """

    clients: int
    sigma: float
    rounds: int
    accuracy: Mapping[str, float]
    signal: Sequence[float]
    noise: Sequence[float]
    signal_length: float
    noise_length: float


def parts(federation: Federation, algorithm: Watched, rate: float) -> tuple[Tensor, Tensor]:
    """Run all rounds; return S and N, ``[D]`` each. rate: the server's."""
    first = federation.model()
    while not federation.finished:
        federation.round()
    signal = rate * torch.stack(algorithm.clean).sum(0)
    return signal, federation.model() - first - signal


def watch(run: Run) -> Found:
    """Return what came of one run of UDP-FedAvg at a fixed rate."""
    chosen = dict(run.settings)
    algorithm = Watched(**chosen)
    federation = federation_of(run, algorithm)
    first = federation.model()
    signal, noise = parts(federation, algorithm, chosen["lr"])
    layer = federation.terms.layers[0]
    rows = layer.shape[0]
    end = layer.begin + rows * (torch.Size(layer.shape).numel() // rows)
    values = [
        torch.linalg.svdvals(part[layer.begin : end].view(rows, -1).double())[:_SHOWN].tolist()
        for part in (signal, noise)
    ]
    problem = federation.problem
    accuracy = {f"{a:g}": 100 * problem.accuracy(first + signal + a * noise) for a in SHARES}
    lengths = float(signal.norm()), float(noise.norm())
    cohort = round(federation.terms.cohort)
    assert run.sigma is not None
    return Found(cohort, run.sigma, run.rounds, accuracy, values[0], values[1], *lengths)


def runs(place: Place, rounds: int, local_epochs: int) -> list[Run]:
    """Return what is run: K = 10 at two noises and two rates, and K = 100."""
    found = []
    for cohort, sigma, rate in ((10, 1.0, 0.05), (10, 2.0, 0.03), (10, 2.0, 0.1), (100, 2.0, 0.1)):
        here = replace(place, sampling="all" if cohort == place.clients else f"fixed:{cohort}")
        chosen = settings(lr=rate, local_epochs=local_epochs)
        found.append(Run(here, "udp-fedavg", chosen, rounds, None, 0, sigma=sigma))
    return found


def conduct(place: Place, rounds: int, local_epochs: int, output: Path) -> list[Path]:
    """Run all, and write ``fedceo_why`` as JSON, Markdown and a picture."""
    require_matplotlib()
    tried = runs(place, rounds, local_epochs)
    found = [(dict(run.settings)["lr"], watch(run)) for run in tried]
    where = provenance.collect()
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"fedceo_why.{suffix}" for suffix in ("json", "md", "png")]
    content = {"provenance": where, "runs": [{"lr": lr} | asdict(one) for lr, one in found]}
    write_text(files[0], json.dumps(content, indent=1) + "\n")
    write_text(files[1], _markdown(place, found, where))
    _draw(found, files[2])
    return files


def _label(lr: float, one: Found) -> str:
    return f"K = {one.clients}, sigma {one.sigma:g}, rate {lr:g}"


def _markdown(place: Place, found: Sequence[tuple[float, Found]], where: Mapping[str, Any]) -> str:
    head = " | ".join(f"a = {a:g}" for a in SHARES)
    rounds = found[0][1].rounds
    lines = [
        "# FedCEO: why taking noise out of a trained model does not help",
        "",
        f"UDP-FedAvg, {place.model} on {place.dataset}, T = {rounds}, one seed. The sum of all "
        "updates is S + N, what clients moved and noise. Test accuracy in percent of "
        "W(0) + S + a N: a = 0 is what a perfect threshold would leave.",
        "",
        f"| run | {head} | norm of S | norm of N | top singular value of S, of N |",
        "|---" * (len(SHARES) + 4) + "|",
    ]
    for lr, one in found:
        cells = " | ".join(f"{one.accuracy[f'{a:g}']:.1f}" for a in SHARES)
        lines.append(
            f"| {_label(lr, one)} | {cells} | {one.signal_length:.1f} | {one.noise_length:.1f} | "
            f"{one.signal[0]:.2f}, {one.noise[0]:.2f} |"
        )
    lines += [
        "",
        "Clients train at the noisy model, so their updates make up for its noise: accuracy is "
        "highest with three quarters of it or all, and lowest without any. A threshold "
        "removes what the network was built around, and the next rounds have to learn it again.",
        "A spectral threshold that knows the noise keeps a direction of S only where its singular "
        "value exceeds the largest of N.",
        "",
        f"Run at {where['commit']}, {where['cpu']}, {where['time']}.",
    ]
    return "\n".join(lines) + "\n"


def _draw(found: Sequence[tuple[float, Found]], file: Path) -> None:
    figure = require_matplotlib()(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, (lr, one) in enumerate(found):
        places = range(1, len(one.signal) + 1)
        relative = [value / one.noise[0] for value in one.signal]
        left.plot(places, relative, "o-", ms=3, color=f"C{n}", label=_label(lr, one))
        right.plot(SHARES, list(one.accuracy.values()), "o-", ms=4, color=f"C{n}")
    left.axhline(1.0, color="black", lw=1, ls="--")
    left.set(xlabel="singular value of S, first layer", ylabel="over the largest of N")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_title("what a spectral threshold can see is above 1", fontsize="medium")
    right.axvline(1.0, color="black", lw=1, ls="--")
    right.set(xlabel="share a of the noise that is kept", ylabel="accuracy of W(0) + S + a N, %")
    right.set_title("the model needs the noise it was trained with", fontsize="medium")
    for panel in (left, right):
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110, format="png")
