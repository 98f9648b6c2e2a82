"""Multi-head attention: outputs of the module itself, sums of the loop over single samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dpkernels
from dpkernels.engine import PerLayer
from dpkernels.ops.factor import Full
from dpkernels.precondition import Sides
from python_tests.engine.autograd_loop import (
    assert_accurate_under_autocast,
    assert_private_sum,
    make_private,
)
from python_tests.tolerance import assert_as_accurate

E, HEADS, STEPS, MEMORY, BATCH = 6, 2, 4, 3, 5

OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "zero attention": {"add_zero_attn": True},
    "bias of keys and values": {"add_bias_kv": True},
    "all extras": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": False},
    "kdim and vdim": {"kdim": 5, "vdim": 3},
    "kdim without bias": {"kdim": 5, "bias": False, "add_bias_kv": True},
}
# Which of three inputs query, key and value are.
WIRINGS = {"self": (0, 0, 0), "memory": (0, 1, 1), "query is key": (0, 0, 2), "apart": (0, 1, 2)}
CALLS = {
    "weights": {},
    "weights of heads": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "padding": {"padding": torch.bool},
    "padding of numbers": {"padding": torch.float64, "need_weights": False},
    "mask": {"mask": (2, torch.bool)},
    "mask of numbers": {"mask": (2, torch.float64), "need_weights": False},
    "mask of samples": {"mask": (3, torch.bool), "need_weights": False},
    "mask of numbers of samples": {"mask": (3, torch.float64), "padding": torch.float64},
    "both masks": {"mask": (2, torch.bool), "padding": torch.bool, "need_weights": False},
    "causal": {"mask": "causal", "is_causal": True, "need_weights": False},
    "causal with weights": {"mask": "causal", "is_causal": True},
    "causal with padding": {
        "mask": "causal",
        "is_causal": True,
        "padding": torch.bool,
        "need_weights": False,
    },
}


class Attends(nn.Module):
    """Attention between inputs that all have samples first; output and weights in a row."""

    def __init__(self, wiring=(0, 0, 0), call=None, uses=1, checkpointed=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options})
        self.wiring, self.uses, self.checkpointed = wiring, uses, checkpointed
        self.call = dict(call or {})

    def forward(self, *inputs: Tensor) -> Tensor:
        *inputs, padding, mask = inputs
        given = [inputs[k] for k in self.wiring]
        kwargs = self._kwargs(padding, mask, given)
        outputs = []
        for _ in range(self.uses):
            result = self._attend(given, kwargs)
            outputs += [x.flatten(1) for x in result if x is not None]
            given[0] = result[0]
        return torch.cat(outputs, 1)

    def _attend(self, given, kwargs):
        if not self.attention.batch_first:
            turned = {id(x): x.transpose(0, 1) for x in given}
            output, weights = self.attention(*(turned[id(x)] for x in given), **kwargs)
            return output.transpose(0, 1), weights
        if self.checkpointed:
            return checkpoint(self.attention, *given, use_reentrant=False, **kwargs)
        return self.attention(*given, **kwargs)

    def _kwargs(self, padding, mask, given):
        kwargs = {k: v for k, v in self.call.items() if k not in ("padding", "mask")}
        if "padding" in self.call:
            numbers = self.call["padding"] != torch.bool
            kwargs["key_padding_mask"] = padding if numbers else padding > 1
        if self.call.get("mask") == "causal":
            kwargs["attn_mask"] = torch.ones(mask.shape[2:], dtype=torch.bool).triu(1)
        elif "mask" in self.call:
            dims, dtype = self.call["mask"]
            # What is the same for all samples must not depend on them.
            mask = (
                mask.flatten(0, 1)
                if dims == 3
                else torch.sin(
                    torch.arange(mask[0, 0].numel(), dtype=padding.dtype).view(mask.shape[2:]) * 5
                )
            )
            kwargs["attn_mask"] = mask > 0.9 if dtype == torch.bool else mask
        return kwargs


def inputs_for(model: Attends, batch: int = BATCH) -> list[Tensor]:
    """Return three sequences, and what masks are made of; position 0 is never masked by bools."""
    generator = torch.Generator().manual_seed(batch)
    module, wiring = model.attention, model.wiring
    keys = STEPS if wiring[1] == 0 else MEMORY

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    widths = {0: E}
    widths[wiring[1]], widths[wiring[2]] = module.kdim, module.vdim
    x = random(batch, STEPS, E)
    others = [random(batch, keys, widths.get(k, E)) for k in (1, 2)]
    padding, mask = random(batch, keys), random(batch, HEADS, STEPS, keys)
    padding[:, 0] = mask[..., 0] = 0
    return [x, *others, padding, mask]


def wirings_of(options):
    return ["apart"] if "kdim" in options else list(WIRINGS)


def seeded(*args, **kwargs) -> Attends:
    torch.manual_seed(0)
    model = Attends(*args, **kwargs)
    with torch.no_grad():  # biases begin as zeros, which would hide where they go
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


def private(model: nn.Module) -> nn.Module:
    make_private(model)
    return model


@pytest.mark.parametrize(
    ("options", "wiring"),
    [(name, wiring) for name, given in OPTIONS.items() for wiring in wirings_of(given)],
)
def test_sum_is_that_of_the_loop_for_every_option(options, wiring):
    model = seeded(WIRINGS[wiring], {"need_weights": False}, **OPTIONS[options])
    assert_private_sum(model, inputs_for(model))


@pytest.mark.parametrize("call", CALLS)
def test_sum_is_that_of_the_loop_for_every_mask(call):
    model = seeded(call=CALLS[call], **OPTIONS["all extras"])
    assert_private_sum(model, inputs_for(model))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sum_is_that_of_the_loop_for_every_batch_and_reduction(batch, reduction):
    model = seeded(WIRINGS["memory"])
    assert_private_sum(model, inputs_for(model, batch), reduction=reduction)


@pytest.mark.parametrize("wiring", ["self", "memory"])
@pytest.mark.parametrize("options", ["plain", "bias of keys and values"])
def test_sum_of_a_module_used_twice_has_the_terms_between_the_uses(wiring, options):
    model = seeded(WIRINGS[wiring], uses=2, **OPTIONS[options])
    assert_private_sum(model, inputs_for(model))


def test_sum_of_separate_weights_used_twice_has_the_terms_between_the_uses():
    model = seeded(WIRINGS["apart"], uses=2, **OPTIONS["kdim and vdim"])
    assert_private_sum(model, inputs_for(model))


def names_of(options) -> list[str]:
    return [name for name, _ in Attends(**options).named_parameters()]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (options, name)
        for options in ("bias of keys and values", "kdim and vdim")
        for name in names_of(OPTIONS[options])
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_sum_is_that_of_the_loop_if_one_parameter_is_frozen_or_trained(options, name, frozen):
    model = seeded(WIRINGS["apart"], **OPTIONS[options])
    for other, parameter in model.named_parameters():
        parameter.requires_grad_((other == name) != frozen)
    assert_private_sum(model, inputs_for(model))


def test_only_the_layer_that_is_trained_counts():
    model = seeded()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("out_proj" in name)
    training = make_private(model, PerLayer({"attention.out_proj": 1.0}))
    assert [layer.name for layer in training.report().layers] == ["attention.out_proj"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", ["plain", "all extras"])
def test_output_and_weights_are_as_accurate_as_the_modules_own(call, options):
    model = seeded(call=CALLS[call], **OPTIONS[options]).double()
    inputs = inputs_for(model)
    exact = model(*inputs).detach()
    narrow, less = copy.deepcopy(model).float(), [x.float() for x in inputs]
    plain = narrow(*less).detach()
    assert_as_accurate(private(narrow)(*less).detach(), plain, exact)


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_drops_what_the_module_itself_drops(weights):
    model = seeded(call={"need_weights": weights}, dropout=0.5)
    inputs = [x.float() for x in inputs_for(model)]
    exact = copy.deepcopy(model).double()
    results = []
    for one, given in ((exact, [x.double() for x in inputs]), (model, inputs)):
        torch.manual_seed(1)
        results.append(one(*given).detach())
    torch.manual_seed(1)
    actual = private(model)(*inputs).detach()
    assert_as_accurate(actual, results[1], results[0])
    assert not torch.equal(actual, model.eval()(*inputs))


@pytest.mark.parametrize("wiring", ["self", "memory"])
def test_factors_act_on_all_rows_of_the_packed_weight(wiring):
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(n, n, generator=generator, dtype=torch.float64).cov() for n in (3 * E, E + 1)
    )

    def transform(gradient):
        weight, bias = (gradient[f"attention.in_proj_{x}"] for x in ("weight", "bias"))
        both = left @ torch.cat([weight, bias[:, None]], 1) @ right
        return gradient | {
            "attention.in_proj_weight": both[:, :-1],
            "attention.in_proj_bias": both[:, -1],
        }

    model = seeded(WIRINGS[wiring])
    sides = {"attention.in_proj": Sides(Full(left), Full(right))}
    assert_private_sum(model, inputs_for(model), sides=sides, transform=transform)


@pytest.mark.parametrize("options", ["all extras", "kdim and vdim"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_sample_that_is_not_finite_adds_nothing(options, weights):
    model = seeded(WIRINGS["apart"], {"need_weights": weights}, **OPTIONS[options])
    assert_private_sum(model, inputs_for(model), poison=True)


def test_checkpointed_attention_has_the_same_sum():
    model = seeded(checkpointed=True, call={"need_weights": False})
    assert_private_sum(model, inputs_for(model))


class Summarises(nn.Module):
    """``nn.Transformer`` between a sequence and a part of it."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.transformer = nn.Transformer(
            E, HEADS, 1, 1, 8, dropout=0.0, batch_first=True, norm_first=norm_first
        )

    def forward(self, source: Tensor, padding: Tensor) -> Tensor:
        target = source[:, :3].cos()
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=source.dtype)
        padded = padding > 1
        return self.transformer(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
            tgt_is_causal=True,
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_sum_of_a_transformer_is_that_of_the_loop(norm_first, training):
    source, *_, padding, _ = inputs_for(seeded())
    torch.manual_seed(0)
    model = Summarises(norm_first).train(training)
    assert_private_sum(model, [source, padding])


@pytest.mark.parametrize("weights", [True, False])
def test_sum_is_as_accurate_as_plain_training_under_autocast(weights):
    model = seeded(WIRINGS["memory"], {"need_weights": weights})
    assert_accurate_under_autocast(model, inputs_for(model))


def test_sequence_first_transformer_layers_are_refused():
    model = nn.Sequential(nn.TransformerEncoderLayer(E, HEADS, 8))
    with pytest.raises(dpkernels.Unsupported, match=r"0 \(TransformerEncoderLayer\).*batch_first"):
        private(model)


def test_an_out_proj_that_is_never_called_is_refused():
    model = seeded()
    model.attention.out_proj = nn.Sequential(nn.Linear(E, E))
    with pytest.raises(dpkernels.Unsupported, match=r"attention \(Multihead.*put an nn.Linear"):
        private(model)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((STEPS, E),) * 3, "3 axes"),
        (((2, STEPS, E), (1, STEPS, E), (1, STEPS, E)), "same samples"),
        (((2, STEPS, E), (2, 3, E), (2, 4, E)), "same positions"),
    ],
)
def test_inputs_without_samples_of_their_own_are_refused(shapes, message):
    model = nn.MultiheadAttention(E, HEADS, batch_first=True)
    with pytest.raises(RuntimeError, match=message):
        private(model)(*(torch.randn(shape) for shape in shapes))


class Nests(Attends):
    """Attention within nested tensors."""

    def forward(self, *inputs: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(inputs[0], layout=torch.jagged)
        return self.attention(nested, nested, nested)[0]


def test_nested_tensors_are_refused():
    model = Nests()
    with pytest.raises(RuntimeError, match=r"attention \(Multihead.*plain tensors.*pad"):
        private(model)(*inputs_for(model))


@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": torch.zeros(1, STEPS)},
        {"attn_mask": torch.zeros(2, STEPS, STEPS)},
        {"key_padding_mask": torch.zeros(1, STEPS)},
        {"is_causal": True},
    ],
)
def test_masks_that_would_broadcast_are_refused(masks):
    attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
    x = torch.randn(2, STEPS, E)
    private(attention)
    with pytest.raises(RuntimeError, match="mask"):
        attention(x, x, x, **masks)
