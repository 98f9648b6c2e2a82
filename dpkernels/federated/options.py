"""What a federated run is asked to do: every number of it, defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dpkernels.federated.contract import Unit
from dpkernels.federated.data import DATASETS, TOKENS, Statistic
from dpkernels.federated.networks import NETWORKS, check_inputs
from dpkernels.federated.partitions import parse
from dpkernels.federated.sampling import default_adjacency, sampler_of
from dpkernels.federated.settings import (
    ALGORITHMS,
    CENTRING,
    SETTINGS,
    Known,
    default_centring,
    default_settings,
)
from dpkernels.ops.checks import check_finite
from dpkernels.privacy.accountants import ACCOUNTANTS
from dpkernels.privacy.mechanism import EveryRecord, Poisson, View, gaussian_step
from dpkernels.train import kept_options
from dpkernels.train.kept_options import check_known, check_whole

MODELS = ("logistic", *NETWORKS)
NO_NOISE: Literal["none"] = "none"


@dataclass(frozen=True)
class Options:
    """One federated run, as the command line names it. What an algorithm has no use for is None.

    partition, partition_seed: which client has which records: the world that is simulated.
    epsilon, delta: the budget of all rounds; epsilon "none" adds no noise. delta None: the largest
        power of 10 below 1 / units, 1e-5 at most.
    level: whom the guarantee protects. view: what is seen. adjacency: what neighbours are.
    sampling: who takes part in a round. record_rate: the chance of a record to do so.
    max_dropouts: how many clients of a round may fail under ``aggregate``.
    lose: the probability with which the simulated network loses an upload.
    records_per_client: |D|, a public number that sums are divided by; None: all records over the
        number of clients, which declares the number of records public.
    public: a statistic of the training part that is declared public; epsilon does not cover it.
    smooth: the exponent of ``smoothing.smoothed``, for images and networks; 0 for none.
    centre, centre_share, centre_clip: centre features by a released mean, for a share of the
        budget, from features clipped to that norm. bias: a constant feature, 0 for none.
    evaluate_every: rounds between two rows of metrics. checkpoint_every: rounds between
        checkpoints; every evaluated round has one besides.
    validation: how many training records take the place of the test part; None for none.
    public_inputs: how many inputs of the test part the server has for ``factors`` "public"; they
        leave the test part, whose labels nobody looks at. None for none.
    seed: fixes noise, draws and parameters: for tests only.
    Others: the algorithm's own settings, as its class in ``algorithms`` says.
    """

    dataset: str = "digits"
    algorithm: str = "ours"
    model: str = "logistic"
    clients: int = 100
    partition: str = "iid"
    partition_seed: int = 0
    rounds: int = 70
    epsilon: float | str = 1.0
    delta: float | None = None
    level: Unit = "record"
    view: View = "aggregate"
    adjacency: Literal["add-remove", "replace-one"] = "add-remove"
    accountant: str = "pld"
    sampling: str = "all"
    record_rate: float = 1.0
    max_dropouts: int = 0
    lose: float = 0.0
    records_per_client: float | None = None
    public: str | None = None
    smooth: float = 0.0
    centre: bool = False
    centre_share: float | None = None
    centre_clip: float | None = None
    bias: float = 0.0
    lr: float | None = 0.5
    clip: float = 1.0
    momentum: float | None = None
    average: float | None = None
    rho: float | None = None
    beta: float | None = None
    window: int | None = None
    alpha: float | None = None
    total_clip: float | None = None
    hessian_clip: float | None = None
    hessian: str | None = None
    dual: str | None = None
    radius: float | None = None
    rescale: str | None = None
    tolerance: float | None = None
    feature_clip: float | None = None
    gamma: float | None = None
    covariance_share: float | None = None
    local_lr: float | None = None
    local_momentum: float | None = None
    local_steps: int | None = None
    control: str | None = None
    local_epochs: int | None = None
    local_batch: int | None = None
    decay: float | None = None
    noise_length: float | None = None
    shrink: str | None = None
    shrunk: str | None = None
    restart: str | None = None
    lam: float | None = None
    theta: float | None = None
    interval: int | None = None
    fold_last: int | None = None
    personal_lr: float | None = None
    head_steps: int | None = None
    fisher: str | None = None
    training: str | None = None
    factors: str | None = None
    weights: str | None = None
    iterations: int | None = None
    damping: float | None = None
    factor_steps: int | None = None
    factor_share: float | None = None
    factor_clip: float | None = None
    evaluate_every: int = 5
    checkpoint_every: int = 1
    validation: int | None = None
    public_inputs: int | None = None
    seed: int | None = None
    data_dir: str | None = None

    @property
    def budget(self) -> float | None:
        """Epsilon as a number; None for no noise."""
        return None if isinstance(self.epsilon, str) else self.epsilon

    @property
    def statistic(self) -> tuple[Statistic, int | None] | None:
        """What is declared public: its name, and the number of components if it has one."""
        return None if self.public is None else _statistic(self.public)

    @property
    def participation_is_secret(self) -> bool:
        """Whether epsilon counts on nobody knowing how many clients took part in a round."""
        drawn_out_of_sight = self.view == "aggregate" and self.sampling.startswith("poisson")
        return self.level == "user" and drawn_out_of_sight

    @property
    def known(self) -> Known:
        """The algorithm that is named."""
        return ALGORITHMS[self.algorithm]

    @property
    def accuracy_is_private(self) -> bool:
        """Whether accuracy is of records or models that epsilon does not cover."""
        return self.validation is not None or self.known.kind.personal

    @property
    def measured(self) -> str:
        """What accuracy is of, where that is not the released model on the public test part."""
        held_out = "" if self.validation is None else " on held-out records"
        return f"{' of personal models' if self.known.kind.personal else ''}{held_out}"


# Clients come to hold 14 records of digits, 65 of adult, 120 of MNIST. Not tuned.
_CLIENTS_OF_FILES = 500


def filled_in(given: Mapping[str, Any]) -> Options:
    """Return the options ``given``, those that are None replaced by defaults.

    Those that need the data, ``delta`` and ``records_per_client``, are left to ``build``. Raises
    ValueError for what is out of range or does not go together.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    dataset, name = chosen.get("dataset", "digits"), chosen.get("algorithm", "ours")
    check_known("dataset", dataset, DATASETS)
    check_known("algorithm", name, ALGORITHMS)
    known = ALGORITHMS[name]
    model = chosen.get("model", _default_model(dataset, known))
    check_known("model", model, MODELS)
    centre = known.centred or chosen.get("centre", False)
    if model != "logistic" and (not known.models or centre):
        takers = ", ".join(each for each, x in ALGORITHMS.items() if x.models)
        raise ValueError(
            f"model: {name}{' with --centre' if centre and not known.centred else ''} is for "
            f"softmax regression, got {model}; take --algorithm {takers}, without --centre"
        )
    _check_taken(chosen | {"model": model}, known, name, centre)
    base: dict[str, Any] = {"dataset": dataset, "algorithm": name, "model": model}
    base |= {"level": known.units[0], "view": known.views[0], "rounds": known.rounds}
    if dataset == "synthetic":
        base["partition"] = "natural"
    elif dataset != "digits":
        base["clients"] = _CLIENTS_OF_FILES
    options = Options(**base | chosen | {"centre": centre})
    _check_numbers(options)
    adjacency = default_adjacency(
        options.sampling,
        options.clients,
        unit=options.level,
        view=options.view,
        record_rate=options.record_rate,
    )
    defaults: dict[str, Any] = {"adjacency": adjacency}
    defaults |= {"evaluate_every": max(1, options.rounds // 14)}
    defaults |= default_settings(
        name,
        dataset,
        model,
        unit=options.level,
        view=options.view,
        sampled=options.sampling != "all",
    )
    if centre:
        defaults |= default_centring(dataset)
    options = Options(**base | defaults | chosen | {"centre": centre})
    _check(options)
    return options


def _default_model(dataset: str, known: Known) -> str:
    if dataset in TOKENS:
        return "lstm"
    return "mlp" if known.network else "logistic"


def _check_taken(chosen: Mapping[str, Any], known: Known, name: str, centre: bool) -> None:
    """Raise ValueError for options that the algorithm, or the model, does not take."""
    for setting in SETTINGS:
        if setting in chosen and setting not in known.settings:
            takers = [each for each, x in ALGORITHMS.items() if setting in x.settings]
            raise ValueError(
                f"{setting}: {name} does not take it, got {chosen[setting]!r}; leave "
                f"{_flag(setting)} out, or take --algorithm {' or '.join(takers)}"
            )
    for setting in CENTRING:
        if setting in chosen and setting != "bias" and not centre:
            raise ValueError(
                f"{setting}: features are not centred, got {chosen[setting]!r}; leave "
                f"{_flag(setting)} out, or take --centre"
            )
    if chosen["model"] != "logistic":
        for setting in ("bias", "public"):
            if setting in chosen:
                raise ValueError(
                    f"{setting}: it is of features for softmax regression, got "
                    f"{chosen[setting]!r} for {chosen['model']}; leave {_flag(setting)} out"
                )


def resumed(output: Path, given: Mapping[str, Any]) -> Options:
    """Return the options that the run in ``output`` was begun with.

    Raises ValueError where ``given`` has another: the guarantee is for the run as it was begun.
    """
    begun = kept_options.read(Options, _check, output)
    return kept_options.resumed(begun, given, output)


def _check(options: Options) -> None:
    """Raise ValueError for what is out of range, whoever wrote it."""
    check_known("algorithm", options.algorithm, ALGORITHMS)
    check_known("dataset", options.dataset, DATASETS)
    check_known("model", options.model, MODELS)
    check_inputs(options.dataset, options.model)
    if options.view not in options.known.views:
        raise ValueError(
            f"view: {options.algorithm} is for {' or '.join(options.known.views)}, got "
            f"{options.view}; leave --view out"
        )
    if options.known.network and options.model == "logistic":
        raise ValueError(
            f"model: clients of {options.algorithm} train a network, got logistic; take --model "
            "softmax for softmax regression as one, or mlp"
        )
    _check_numbers(options)
    _check_adjacency(options)
    algorithm = options.known.make(asdict(options), centre=options.centre)
    if not algorithm.private and options.budget is not None:
        raise ValueError(
            f"epsilon: {options.algorithm} with --training {options.training} is not private, "
            f"whatever the noise, got {options.epsilon}; take --epsilon none, or --training dp-sgd"
        )
    _check_public_inputs(options)


def _check_public_inputs(options: Options) -> None:
    count = options.public_inputs
    if (options.factors == "public") != (count is not None):
        raise ValueError(
            f"public_inputs: --factors public takes a number of them, and nothing else does, got "
            f"{count} with factors {options.factors}; take --factors public --public-inputs 500"
        )
    if count is not None and options.validation is not None:
        raise ValueError(
            f"public_inputs: they are of the test part, and --validation puts private records in "
            f"its place, got {count}; leave one of them out"
        )


def _check_numbers(options: Options) -> None:
    check_known("level", options.level, get_args(Unit))
    if options.level not in options.known.units:
        raise ValueError(
            f"level: {options.algorithm} protects {options.known.units[0]}s, got {options.level}; "
            f"take --level {options.known.units[0]}, or another --algorithm"
        )
    check_known("view", options.view, get_args(View))
    check_known("accountant", options.accountant, ACCOUNTANTS)
    whole = ("clients", "rounds", "evaluate_every", "checkpoint_every", "validation")
    check_whole(options, *whole, "public_inputs")
    if isinstance(options.epsilon, str):
        check_known("epsilon", options.epsilon, ("none", "a number > 0"))
    else:
        check_finite("federate", "epsilon", options.epsilon, above=0.0)
    for name in ("delta", "records_per_client"):
        if (value := getattr(options, name)) is not None:
            check_finite("federate", name, value, above=0.0)
    for name in ("bias", "smooth"):
        check_finite("federate", name, getattr(options, name), at_least=0.0)
    if not 0 < options.record_rate <= 1:
        raise ValueError(f"record_rate must be in (0, 1], got {options.record_rate}")
    if not 0 <= options.lose < 1:
        raise ValueError(f"lose must be a probability in [0, 1), got {options.lose}")
    if options.max_dropouts < 0:
        raise ValueError(f"max_dropouts must be an integer >= 0, got {options.max_dropouts}")
    if options.partition != "natural":
        parse(options.partition)
    if options.public is not None:
        _statistic(options.public)
    _check_faults(options)


def _check_faults(options: Options) -> None:
    fixed = options.view == "aggregate" and not options.sampling.startswith("poisson")
    if options.max_dropouts and not fixed:
        raise ValueError(
            f"max_dropouts: it is for a fixed number of clients under --view aggregate, got "
            f"{options.max_dropouts}; elsewhere no noise is missing with a client: leave it out"
        )
    sampler_of(options.sampling, options.clients)


def _check_adjacency(options: Options) -> None:
    check_known("adjacency", options.adjacency, ("add-remove", "replace-one"))
    sampler = sampler_of(options.sampling, options.clients)
    facts: dict[str, Any] = {"sampling": EveryRecord(), "sampled": "clients"}
    if options.level == "record" and options.record_rate < 1:
        facts = {"sampling": Poisson(options.record_rate), "sampled": "records"}
    elif sampler is not None:
        facts["sampling"] = sampler.sampling
    try:
        gaussian_step(
            1.0, adjacency=options.adjacency, unit=options.level, view=options.view, **facts
        )
    except ValueError:
        other = "add-remove" if options.adjacency == "replace-one" else "replace-one"
        raise ValueError(
            f"adjacency must be {other} for level {options.level}, view {options.view}, sampling "
            f"{options.sampling} and record_rate {options.record_rate:g}, got "
            f"{options.adjacency}; leave --adjacency out"
        ) from None


def _statistic(spec: str) -> tuple[Statistic, int | None]:
    """Return the statistic that ``spec`` names: centre, standardise, or pca:100."""
    name, _, number = spec.partition(":")
    if name == "pca" and number.isascii() and number.isdigit() and int(number):
        return "pca", int(number)
    if name == "centre" and not number:
        return "centre", None
    if name == "standardise" and not number:
        return "standardise", None
    raise ValueError(f"public must be one of centre, standardise, pca:100, got {spec!r}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
