"""Models are checked before training, and BatchNorm is replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.opacus.layers import DPLSTM
from dpkernels.opacus.validators import (
    ModuleValidator,
    batch_norm,
    register_module_fixer,
    register_module_validator,
)
from dpkernels.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)


def with_norm(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 2), norm, nn.Flatten(), nn.Linear(32, 2))


@pytest.mark.parametrize(
    "model",
    [
        with_norm(nn.GroupNorm(4, 8)),
        nn.LSTM(3, 4, batch_first=True),
        nn.GRU(3, 4, batch_first=True),
        DPLSTM(3, 4, batch_first=True),
        nn.MultiheadAttention(4, 2, batch_first=True),
        nn.Sequential(nn.Linear(2, 2).requires_grad_(False)),
    ],
)
def test_what_the_engine_trains_is_valid(model):
    assert ModuleValidator.is_valid(model)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (with_norm(nn.BatchNorm2d(8)), ShouldReplaceModuleError),
        (with_norm(nn.BatchNorm2d(8, affine=False)), ShouldReplaceModuleError),
        (
            with_norm(nn.InstanceNorm2d(8, track_running_stats=True)),
            IllegalModuleConfigurationError,
        ),
        (with_norm(nn.GroupNorm(4, 8)).eval(), IllegalModuleConfigurationError),
        (nn.Embedding(5, 3, sparse=True), NotYetSupportedModuleError),
    ],
)
def test_what_is_wrong_is_said_by_its_class(model, error):
    assert [type(found) for found in ModuleValidator.validate(model)] == [error]
    with pytest.raises(UnsupportedModuleError):
        ModuleValidator.validate(model, strict=True)


def test_batch_norm_becomes_group_norm_in_a_copy():
    model = with_norm(nn.BatchNorm2d(8))
    fixed = ModuleValidator.fix_and_validate(model)
    assert isinstance(fixed[1], nn.GroupNorm) and fixed[1].num_groups == 8
    assert isinstance(model[1], nn.BatchNorm2d)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in fixed.parameters()}
    assert torch.equal(fixed[0].weight, model[0].weight)


def test_groups_may_be_given():
    assert ModuleValidator.fix(with_norm(nn.BatchNorm2d(8)), num_groups=2)[1].num_groups == 2
    with pytest.raises(ValueError, match="num_groups"):
        ModuleValidator.fix(with_norm(nn.BatchNorm2d(8)), num_groups=3)


def test_batch_norm_becomes_instance_norm_if_asked():
    fixed = ModuleValidator.fix_and_validate(with_norm(nn.BatchNorm2d(8)), replace_bn_with_in=True)
    assert isinstance(fixed[1], nn.InstanceNorm2d)
    with pytest.raises(ValueError, match="one of them"):
        ModuleValidator.fix(with_norm(nn.BatchNorm2d(8)), replace_bn_with_in=True, num_groups=2)
    with pytest.raises(UnsupportableModuleError, match="SyncBatchNorm"):
        ModuleValidator.fix(with_norm(nn.SyncBatchNorm(8)), replace_bn_with_in=True)


def test_running_averages_are_given_up():
    fixed = ModuleValidator.fix_and_validate(
        with_norm(nn.InstanceNorm2d(8, track_running_stats=True))
    )
    assert fixed[1].running_mean is None
    assert fixed(torch.randn(2, 3, 3, 3)).isfinite().all()


def test_a_model_that_is_a_batch_norm_is_replaced_whole():
    assert isinstance(ModuleValidator.fix(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_validators_and_fixers_of_the_callers_own(monkeypatch):
    monkeypatch.setattr(ModuleValidator, "VALIDATORS", dict(ModuleValidator.VALIDATORS))
    monkeypatch.setattr(ModuleValidator, "FIXERS", dict(ModuleValidator.FIXERS))

    class Odd(nn.Linear):
        pass

    @register_module_validator(Odd)
    def validate(module):
        return [ShouldReplaceModuleError("odd")]

    @register_module_fixer([Odd])
    def fix(module, **kwargs):
        return nn.Linear(module.in_features, module.out_features)

    model = nn.Sequential(Odd(3, 2))
    assert [str(error) for error in ModuleValidator.validate(model)] == ["odd"]
    assert type(ModuleValidator.fix_and_validate(model)[0]) is nn.Linear


def frozen_and_constant(norm):
    norm.running_mean.normal_()
    return norm.requires_grad_(False).eval()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_frozen_batch_norm_in_evaluation_mode_is_left_alone(kind, affine):
    norm = frozen_and_constant(kind(8, affine=affine))
    assert not batch_norm.validate(norm)
    model = nn.Sequential(nn.Linear(8, 8), norm, kind(8))
    fixed = ModuleValidator.fix(model)
    assert type(fixed[1]) is kind and not fixed[1].training
    assert torch.equal(fixed[1].running_mean, norm.running_mean)
    assert isinstance(fixed[2], nn.GroupNorm)
    assert isinstance(ModuleValidator.fix(norm), kind)


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.train(),
        lambda norm: norm.requires_grad_(True),
        lambda norm: norm.weight.requires_grad_(True),
        lambda norm: setattr(norm, "running_mean", None),
    ],
    ids=["in training mode", "trained", "scale trained", "without averages"],
)
def test_any_other_batch_norm_is_replaced(change):
    norm = frozen_and_constant(nn.BatchNorm2d(8))
    change(norm)
    assert [type(error) for error in batch_norm.validate(norm)] == [ShouldReplaceModuleError]
    assert isinstance(ModuleValidator.fix(with_norm(norm))[1], nn.GroupNorm)
