"""Which rule serves which module, and what is refused, before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from dpkernels.engine.in_place import has_forward_in_place
from dpkernels.engine.layers.attention import AttentionLayer
from dpkernels.engine.layers.bare import BareLayer
from dpkernels.engine.layers.conv import ConvLayer, TransposedConvLayer
from dpkernels.engine.layers.embedding import EmbeddingLayer
from dpkernels.engine.layers.embedding_bag import OffsetBagLayer
from dpkernels.engine.layers.layer import Layer, Unsupported
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.layers.ownership import contained, is_container, without_aliases
from dpkernels.engine.layers.recurrent import CellLayer, RecurrentLayer
from dpkernels.engine.layers.scale_shift import ScaleShiftLayer
from dpkernels.engine.layers.scaled_embedding import WrappedEmbeddingLayer, wraps_embedding
from dpkernels.engine.layers.transposed_linear import TransposedLinearLayer, is_conv1d
from dpkernels.engine.sharding import fsdp_modules

_RULES: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Conv3d: ConvLayer,
    nn.ConvTranspose1d: TransposedConvLayer,
    nn.ConvTranspose2d: TransposedConvLayer,
    nn.ConvTranspose3d: TransposedConvLayer,
    nn.Embedding: EmbeddingLayer,
    nn.EmbeddingBag: OffsetBagLayer,
    nn.LayerNorm: ScaleShiftLayer,
    nn.RMSNorm: ScaleShiftLayer,
    nn.GroupNorm: ScaleShiftLayer,
    nn.InstanceNorm1d: ScaleShiftLayer,
    nn.InstanceNorm2d: ScaleShiftLayer,
    nn.InstanceNorm3d: ScaleShiftLayer,
    nn.MultiheadAttention: AttentionLayer,
    nn.RNN: RecurrentLayer,
    nn.GRU: RecurrentLayer,
    nn.LSTM: RecurrentLayer,
    nn.RNNCell: CellLayer,
    nn.GRUCell: CellLayer,
    nn.LSTMCell: CellLayer,
}


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the trained layers of ``model``, each with its rule.

    Raises Unsupported, naming the module and the way out, for what mixes samples, what leaves
    traces of them outside the gradient, and parameters that no rule reaches.
    """
    layers: list[Layer] = []
    claimed: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        _check_module(name, module)
        trained = {
            attribute: parameter
            for attribute, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        if is_container(module) and claimed.issuperset(trained.values()):
            continue
        inside = dict(contained(module))
        claimed |= set(inside.values())
        trained |= inside
        if trained or _reads_trained_child(module):
            layers.append(_layer_of(name, module, trained))
    layers = without_aliases(layers)
    if not layers:
        raise Unsupported(
            f"{type(model).__name__} has no parameter that requires grad: there is nothing to train"
        )
    return layers


def _layer_of(name: str, module: nn.Module, trained: dict[str, nn.Parameter]) -> Layer:
    if parametrize.is_parametrized(module):
        # Its weight is computed in every call, from what is trained.
        return BareLayer(name, module, trained)
    for kind, rule in _RULES.items():
        if isinstance(module, kind) and computes_as(module, kind):
            _check_attributes(name, module, kind, trained)
            return rule(name, module, trained)
    if wraps_embedding(module):
        _check_attributes(name, module, nn.Embedding, trained)
        return WrappedEmbeddingLayer(name, module, trained)
    if is_conv1d(module):
        return TransposedLinearLayer(name, module, trained)
    if type(module).forward is nn.Module.forward:
        raise Unsupported(
            f"{_described(name, module)} has no forward pass of its own in which its parameters "
            f"{', '.join(trained)} could be followed; register them in the module that uses them, "
            "or freeze them with requires_grad_(False)"
        )
    if any(inside is not module for inside in fsdp_modules(module)):
        raise Unsupported(
            f"{_described(name, module)} has parameters of its own, {', '.join(trained)}, and is "
            "run several times to find out how it uses them, as often as a rank's samples need; "
            "but fully_shard was called on modules inside, whose every run all ranks must share; "
            "put these parameters into a small module of their own"
        )
    return BareLayer(name, module, trained)


# Methods that a subclass may have of its own without computing something else.
_HARMLESS = frozenset(
    (
        "__init__",
        "__repr__",
        "extra_repr",
        "reset_parameters",
        "_reset_parameters",
        "from_pretrained",
    )
)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether ``module`` computes what ``kind`` does, and not as a subclass of its own.

    A method that ``kind`` has and the subclass or the object overrides (``forward``,
    ``_conv_forward``), or a weight that is a property, makes it another layer.
    """
    subclasses = type(module).__mro__[: type(module).__mro__.index(kind)]
    own = {name for subclass in subclasses for name in vars(subclass)}
    own |= {name for name, value in vars(module).items() if callable(value) and name != "forward"}
    known = {name for parent in kind.__mro__[:-2] for name in vars(parent) if name != "__module__"}
    methods = {name for name in known if callable(getattr(kind, name, None))}
    return not own & ((methods | {"weight", "bias"}) - _HARMLESS)


def _check_attributes(
    name: str, module: nn.Module, kind: type[nn.Module], trained: dict[str, nn.Parameter]
) -> None:
    """Raise Unsupported for parameters that a module of this kind does not have by itself."""
    known = {"weight", "bias"}
    if kind is nn.MultiheadAttention:
        known = {f"{x}_proj_weight" for x in ("in", "q", "k", "v")}
        known |= {"in_proj_bias", "bias_k", "bias_v"}
    elif isinstance(module, nn.RNNBase):
        known = set(module._flat_weights_names)
    elif isinstance(module, nn.RNNCellBase):
        known = {f"{x}_{part}" for x in ("weight", "bias") for part in ("ih", "hh")}
    if strange := sorted(set(trained) - known):
        raise Unsupported(
            f"{_described(name, module)} has parameters that a {kind.__name__} does not have, "
            f"{', '.join(strange)}: its weight is computed from them (torch.nn.utils.weight_norm, "
            "spectral_norm, ...), which no rule covers; remove that"
        )


def _reads_trained_child(module: nn.Module) -> bool:
    """Return whether the module takes a trained weight of a child without calling the child."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and any(parameter.requires_grad for parameter in module.out_proj.parameters())
    )


def _check_module(name: str, module: nn.Module) -> None:
    described = _described(name, module)
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise Unsupported(
            f"{described} adds up gradients of several devices before they have noise; pass the "
            "module inside, model.module, or wrap the whole model in DistributedDataParallel"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise Unsupported(
            f"{described} makes one flat parameter of all, in which layers' own cannot be told "
            "apart; use torch.distributed.fsdp.fully_shard"
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise Unsupported(
            f"{described} has parameters without a shape; call the model once on a batch first"
        )
    if isinstance(module, _BatchNorm) and not is_frozen_batch_norm(module):
        raise Unsupported(
            f"{described} normalises over the batch, so that one sample's gradient depends on the "
            "others; dpkernels.batch_norm_to_group_norm(model) replaces all of them by GroupNorm, "
            "or freeze its parameters and call eval() on it to keep its statistics as they are"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise Unsupported(
            f"{described} keeps running averages of the data, which would leave with the model "
            "without noise; build it with track_running_stats=False"
        )
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and any(
        map(parametrize.is_parametrized, module.modules())
    ):
        raise Unsupported(
            f"{described} takes its weights as they are, but torch.nn.utils.parametrize computes "
            "one of them from other parameters, which no rule covers; "
            "remove_parametrizations(module, name) makes it a plain one"
        )
    if (
        isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        and not module.self_attn.batch_first
        and any(parameter.requires_grad for parameter in module.parameters())
    ):
        raise Unsupported(
            f"{described} passes positions, not samples, as the first axis to its layers; build it "
            "with batch_first=True"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        _check_embedding(described, module)


def is_frozen_batch_norm(module: _BatchNorm) -> bool:
    """Return whether it scales and shifts by constants: frozen, and with averages of its own."""
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return not (module.training or trained or module.running_mean is None)


def _check_embedding(described: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    reasons = {
        "max_norm": "rescales rows that a batch touches, outside of the gradient",
        "scale_grad_by_freq": "divides by counts over the whole batch",
        "sparse": "shows which tokens a batch held; noise makes every row change",
    }
    trained = module.weight.requires_grad
    for option, reason in reasons.items():
        if getattr(module, option) and (trained or option == "max_norm"):
            raise Unsupported(f"{described}: {option} {reason}; build the layer without it")
    if trained and isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise Unsupported(f"{described}: mode 'max' has no rule; use 'sum' or 'mean'")


def check_optimizer(layers: Iterable[Layer], parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError unless the optimizer updates just the parameters that are trained."""
    owners = {p: (layer, name) for layer in layers for name, p in layer.parameters.items()}
    updated = list(parameters)
    strangers = [p for p in updated if p.requires_grad and p not in owners]
    if strangers:
        raise ValueError(
            f"make_private: the optimizer updates {len(strangers)} parameters that are not the "
            f"model's, the first of shape {list(strangers[0].shape)}; they would be trained "
            "without noise"
        )
    for parameter, (layer, name) in owners.items():
        if not any(parameter is other for other in updated):
            raise ValueError(
                f"make_private: {name} of {layer.describe()} requires grad, but the optimizer does "
                "not update it; pass it to the optimizer, or requires_grad_(False) it, so that it "
                "costs neither time nor a part of the norm"
            )


def check_plain(model: nn.Module) -> None:
    """Raise Unsupported for a model whose layers cannot be followed, or are already."""
    for module in model.modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise Unsupported(
                "the model went through torch.compile, whose graphs keep activations and errors "
                "to themselves; pass the plain model (model._orig_mod)"
            )
    if any(has_forward_in_place(module) for module in model.modules()):
        raise Unsupported(
            "a module of the model has its forward() replaced already, perhaps by an earlier "
            "make_private; call detach() on that first"
        )


def _described(name: str, module: nn.Module) -> str:
    return f"{name or 'the model itself'} ({type(module).__name__})"
