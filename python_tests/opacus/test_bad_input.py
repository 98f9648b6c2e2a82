"""Bad input to the drop-in is refused by name, before anything is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dpkernels.opacus import PrivacyEngine
from dpkernels.opacus.accountants import create_accountant, register_accountant
from dpkernels.opacus.accountants.utils import get_noise_multiplier
from dpkernels.opacus.optimizers import DPOptimizer
from python_tests.opacus.small import arguments, classifier, made, records

ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 2.0,
}


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4)


def loader_of(count, **options):
    return DataLoader(records(count), **({"batch_size": 4} | options))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"max_grad_norm": -1.0, "clipping": "per_layer"}, "max_grad_norm"),
        ({"max_grad_norm": [1.0, 1.0]}, "max_grad_norm"),
        ({"max_grad_norm": [1.0], "clipping": "per_layer"}, "max_grad_norm"),
        ({"max_grad_norm": [1.0, 1.0, -1.0, 1.0], "clipping": "per_layer"}, "max_grad_norm"),
        ({"clipping": "none"}, "clipping"),
        ({"clipping": "adaptive"}, "unclipped_num_std"),
        (ADAPTIVE | {"noise_multiplier": 4.0}, "unclipped_num_std"),
        (ADAPTIVE | {"min_clipbound": 20.0}, "min_clipbound"),
        (ADAPTIVE | {"target_unclipped_quantile": 1.5}, "target_unclipped_quantile"),
        (ADAPTIVE | {"clipbound_learning_rate": -1.0}, "clipbound_learning_rate"),
        (ADAPTIVE | {"loss_reduction": "sum"}, "loss_reduction"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"sample_rate": float("nan")}, "sample_rate"),
        ({"sample_rate": 0.1, "poisson_sampling": False}, "sample_rate"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": float("nan")}, "expected_batch_size"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"grad_sample_mode": "magic"}, "grad_sample_mode"),
        ({"grad_sample_mode": "ghost", "criterion": nn.MSELoss(reduction="sum")}, "criterion"),
        ({"data_loader": loader_of(3, drop_last=True)}, "data_loader"),
    ],
)
def test_an_argument_that_is_wrong_is_named(changes, named):
    model = classifier()
    with pytest.raises(ValueError, match=named):
        made(module=model, **changes)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="unclipped_std"):
        made(unclipped_std=1.0)


def test_a_data_set_without_records_is_refused():
    loader = loader_of(4)
    loader.dataset.tensors = tuple(tensor[:0] for tensor in loader.dataset.tensors)
    with pytest.raises(ValueError, match="data_loader"):
        made(data_loader=loader)


def test_a_data_set_without_a_length_is_refused():
    with pytest.raises(TypeError, match="length"):
        made(data_loader=DataLoader(Stream(), batch_size=2))


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="not the model's"):
        made(optimizer=torch.optim.SGD(classifier().parameters(), 0.1))


def test_a_model_that_is_not_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        made(module=classifier().eval())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_epsilon": -1.0}, "epsilon"),
        ({"target_epsilon": float("nan")}, "epsilon"),
        ({"target_delta": 0.0}, "delta"),
        ({"target_delta": 1.5}, "delta"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
    ],
)
def test_a_budget_that_is_wrong_is_named(changes, named):
    given = arguments()
    del given["noise_multiplier"]
    budget = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1} | changes
    with pytest.raises(ValueError, match=named):
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(**given, **budget)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sample_rate": 1.5}, "rate"),
        ({"sample_rate": float("nan")}, "rate"),
        ({"steps": None}, "steps"),
        ({"epochs": 1}, "steps"),
        ({"accountant": "moments"}, "mechanism"),
    ],
)
def test_arguments_of_the_search_for_noise_are_named(changes, named):
    given = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10}
    with pytest.raises(ValueError, match=named):
        get_noise_multiplier(**given | changes)


@pytest.mark.parametrize("delta", [-1e-5, 0.0, 1.0, float("nan")])
def test_delta_must_be_a_probability(delta):
    engine = PrivacyEngine(accountant="rdp")
    with pytest.raises(ValueError, match="delta"):
        engine.get_epsilon(delta)


def test_an_accountant_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ValueError, match=r"gdp, prv, rdp.*'moments'"):
        PrivacyEngine(accountant="moments")
    with pytest.raises(ValueError, match="'rdp' is taken"):
        register_accountant("rdp", type(create_accountant("prv")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": [1.0]}, "max_grad_norm"),
        ({"expected_batch_size": None}, "expected_batch_size"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"secure_mode": True}, "secure_mode"),
        ({"unclipped_num_std": 1.0}, "target_unclipped_quantile"),
    ],
)
def test_a_wrong_argument_of_an_optimizer_built_by_hand_is_named(changes, named):
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
    with pytest.raises(ValueError, match=named):
        DPOptimizer(torch.optim.SGD(classifier().parameters(), 0.1), **given | changes)


def test_an_optimizer_is_not_private_by_its_name():
    model = classifier()
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    model(records()[:4][0]).sum().backward()
    with pytest.raises(RuntimeError, match="GradSampleModule"):
        optimizer.step()


def test_samples_on_the_second_axis_need_layers_that_have_one():
    model = nn.Sequential(nn.Conv1d(4, 6, 1), nn.Linear(6, 3)).double()
    with pytest.raises(ValueError, match=r"batch_first.*Conv1d"):
        made(module=model, batch_first=False)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_bound_cannot_be_set_where_samples_set_it():
    _, optimizer, _ = made(**ADAPTIVE)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = 1.0


def test_parameters_cannot_be_added_later():
    _, optimizer, _ = made()
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_what_fails_late_leaves_nothing_changed():
    engine = PrivacyEngine(accountant="rdp")
    made(engine)
    given = arguments(max_grad_norm=[0.1] * 4, clipping="per_layer")
    # The last thing that may be said, of a second data set, here as an error.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="another data set"):
            engine.make_private(**given)
    assert not any("forward" in vars(module) for module in given["module"].modules())
    assert not given["optimizer"]._optimizer_step_pre_hooks
    assert "zero_grad" not in vars(given["optimizer"])
    made(PrivacyEngine(accountant="rdp"), **given)
