"""Arguments of every compiled operator, drawn at random and as its checks want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpkernels.ops.network_sgd import Layer, Window
from python_tests.sanitize.draw import COMPILED_FLOATS, FLOATS, Draw, sum_dtype

Arguments = list[Any]
# For each operator what draws the arguments of one call, in the schema's order.
CALLS: dict[str, Callable[[Draw], Arguments]] = {}


def call(draw_arguments: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    """Register the function under its operator's name, which is its own."""
    CALLS[draw_arguments.__name__] = draw_arguments
    return draw_arguments


def _rows(draw: Draw) -> tuple[int, torch.dtype, list[Tensor]]:
    batch, dtype = draw.size(), draw.one_of(FLOATS)
    widths = [draw.size(most=400) for _ in range(draw.random.randint(1, 4))]
    return batch, dtype, [draw.tensor(batch, width, dtype=dtype) for width in widths]


@call
def row_sq_norms(draw: Draw) -> Arguments:
    return [_rows(draw)[2], draw.flag()]


@call
def clip_factors(draw: Draw) -> Arguments:
    bounds = [draw.number() for _ in range(draw.random.randint(1, 4))]
    sq_norms = draw.tensor(len(bounds), draw.size(), dtype=torch.float64).abs()
    return [sq_norms, bounds, draw.flag(), draw.number(), draw.one_of(COMPILED_FLOATS)]


@call
def layer_factors(draw: Draw) -> Arguments:
    batch = draw.size()
    count = draw.random.randint(1, 5)
    sq_norms = [draw.tensor(batch, dtype=torch.float64).abs() for _ in range(count)]
    rule = [draw.number(), draw.number(), draw.flag(), draw.number()]
    return [sq_norms, *rule, draw.one_of(COMPILED_FLOATS)]


@call
def weighted_row_sum_(draw: Draw) -> Arguments:
    batch, dtype, grads = _rows(draw)
    out = [draw.output(g.shape[1], dtype=sum_dtype(dtype)) for g in grads]
    factors = draw.tensor(draw.one_of((1, len(grads))), batch, dtype=sum_dtype(dtype))
    return [out, grads, factors, draw.flag()]


@call
def clip_and_sum_(draw: Draw) -> Arguments:
    _, dtype, grads = _rows(draw)
    out = [draw.output(g.shape[1], dtype=sum_dtype(dtype)) for g in grads]
    bounds = [draw.number() for _ in range(draw.one_of((1, len(grads))))]
    return [out, grads, bounds, draw.flag(), draw.number(), draw.flag()]


def _convolution(draw: Draw) -> dict[str, list[int]]:
    rank = draw.random.randint(1, 3)
    most = {1: 33, 2: 9, 3: 5}[rank]
    axes = []
    for _ in range(rank):
        kernel, dilation = draw.random.randint(1, 3), draw.random.randint(1, 2)
        padding = draw.random.randint(0, 2)
        least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
        axes.append((draw.random.randint(least, least + most), kernel, padding, dilation))
    stride = [draw.random.randint(1, 3) for _ in axes]
    size, kernel, padding, dilation = (list(column) for column in zip(*axes, strict=True))
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, p, d, s in zip(size, kernel, padding, dilation, stride, strict=True)
    ]
    lists = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return {"size": size, "out": out, **lists}


@call
def ghost_conv_norms(draw: Draw) -> Arguments:
    shape, dtype, groups = _convolution(draw), draw.one_of(FLOATS), draw.random.randint(1, 3)
    batch, channels = draw.size(most=5), groups * draw.random.randint(1, 4)
    outputs = groups * draw.random.randint(1, 5)
    x = draw.tensor(batch, channels, *shape["size"], dtype=dtype)
    d = draw.tensor(batch, outputs, *shape["out"], dtype=dtype)
    formula = draw.one_of(("gram", "materialised"))
    columns = channels // groups * torch.Size(shape["kernel"]).numel()
    scale = None
    if formula == "materialised" and draw.flag():
        scale = draw.tensor(columns + 1, dtype=torch.float64)
    lists = [shape[name] for name in ("kernel", "stride", "padding", "dilation")]
    return [x, d, *lists, groups, draw.flag(), scale, formula, formula != "gram" and draw.flag()]


def _factor(draw: Draw, n: int, dtype: torch.dtype, *, diagonal: bool = True) -> list[Tensor]:
    kind = draw.one_of(("identity", "full", "low rank", *(["diagonal"] if diagonal else [])))
    if kind == "identity":
        return []
    if kind == "diagonal":
        return [draw.tensor(n, dtype=dtype)]
    if kind == "full":
        return [draw.tensor(n, n, dtype=dtype)]
    rank = draw.random.randint(0, n)
    return [draw.tensor(n, rank, dtype=dtype), draw.tensor(rank, dtype=dtype)]


@call
def apply_factor_(draw: Draw) -> Arguments:
    dtype, rows, n, bias = draw.one_of(FLOATS), draw.size(), draw.size(), draw.flag()
    out = draw.output(rows, n + bias, dtype=sum_dtype(dtype))
    factor = _factor(draw, n + bias, sum_dtype(dtype))
    return [out, draw.tensor(rows, n, dtype=dtype), factor, draw.number(), bias]


@call
def apply_kron_(draw: Draw) -> Arguments:
    dtype, shape = draw.one_of(FLOATS), (draw.size(most=17), draw.size(), draw.size())
    sides: Arguments = []
    for n in shape[1:]:
        sides += [_factor(draw, n, sum_dtype(dtype)), draw.number()]
    return [draw.output(*shape, dtype=sum_dtype(dtype)), draw.tensor(*shape, dtype=dtype), *sides]


@call
def second_moment(draw: Draw) -> Arguments:
    shape = (draw.size(), draw.size(), draw.size())
    return [draw.tensor(*shape, dtype=draw.one_of(FLOATS)), draw.flag(), draw.number()]


@call
def conv_second_moment(draw: Draw) -> Arguments:
    shape, groups = _convolution(draw), draw.random.randint(1, 3)
    channels = groups * draw.random.randint(1, 4)
    x = draw.tensor(draw.size(most=5), channels, *shape["size"], dtype=draw.one_of(FLOATS))
    lists = [shape[name] for name in ("kernel", "stride", "padding", "dilation")]
    return [x, *lists, groups, draw.flag(), draw.number()]


def _tokens(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None, int]:
    batch, length, vocabulary = draw.size(), draw.size(), draw.size(1)
    indices = draw.integers(batch, length, below=vocabulary)
    errors = draw.tensor(batch, length, draw.size(), dtype=draw.one_of(FLOATS))
    scale = draw.tensor(vocabulary, dtype=torch.float64) if draw.flag() else None
    return indices, errors, scale, vocabulary


@call
def ghost_embedding_sq_norms(draw: Draw) -> Arguments:
    indices, errors, scale, vocabulary = _tokens(draw)
    return [indices, errors, scale, vocabulary, draw.random.randint(-1, vocabulary - 1)]


@call
def ghost_embedding_weighted_sum_(draw: Draw) -> Arguments:
    indices, errors, scale, vocabulary = _tokens(draw)
    dtype = sum_dtype(errors.dtype)
    out = draw.output(vocabulary, errors.shape[2], dtype=dtype)
    factors = draw.tensor(errors.shape[0], dtype=dtype)
    padding = draw.random.randint(-1, vocabulary - 1)
    return [out, indices, errors, factors, scale, padding, draw.flag()]


def _sides(draw: Draw, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Arguments, bool]:
    """Return right, its tail, left, its tail; and whether right is for rows with a one added."""
    if dtype not in COMPILED_FLOATS:
        return [[], 1.0, [], 1.0], False
    augment = draw.flag()
    right = _factor(draw, inputs + augment, dtype, diagonal=False)
    left = _factor(draw, outputs, dtype, diagonal=False)
    return [right, draw.number(), left, draw.number()], augment and bool(right)


@call
def ghost_linear_rank_one(draw: Draw) -> Arguments:
    batch, inputs, outputs, dtype = draw.size(), draw.size(), draw.size(), draw.one_of(FLOATS)
    sides, augment = _sides(draw, inputs, outputs, dtype)
    rows = [draw.tensor(batch, 1, n, dtype=dtype) for n in (inputs, outputs)]
    return [*rows, *sides, augment, draw.flag()]


@call
def ghost_linear_rank_one_clip_(draw: Draw) -> Arguments:
    batch, inputs, outputs, dtype = draw.size(), draw.size(), draw.size(), draw.one_of(FLOATS)
    sides, augment = _sides(draw, inputs, outputs, dtype)
    out = draw.output(outputs, inputs, dtype=sum_dtype(dtype))
    bias_out = draw.output(outputs, dtype=sum_dtype(dtype)) if augment or draw.flag() else None
    rows = [draw.tensor(batch, 1, n, dtype=dtype) for n in (inputs, outputs)]
    return [out, bias_out, *rows, *sides, augment, draw.number(), draw.flag()]


@call
def ghost_linear_sq_norms(draw: Draw) -> Arguments:
    shape, dtype = (draw.size(most=17), draw.size()), draw.one_of(FLOATS)
    pair = [draw.tensor(*shape, draw.size(), dtype=dtype) for _ in range(2)]
    return [*pair, draw.flag(), draw.flag()]


@call
def ghost_linear_weighted_sum_(draw: Draw) -> Arguments:
    shape, dtype = (draw.size(most=17), draw.size()), draw.one_of(FLOATS)
    inputs, outputs, bias, ones = draw.size(1), draw.size(), draw.flag(), draw.flag()
    sums = sum_dtype(dtype)
    out = draw.output(outputs, inputs - (bias and ones), dtype=sums)
    bias_out = draw.output(outputs, dtype=sums) if bias else None
    pair = [draw.tensor(*shape, n, dtype=dtype) for n in (inputs, outputs)]
    apart = draw.integers(shape[0], below=2).bool().contiguous() if draw.flag() else None
    return [out, bias_out, *pair, draw.tensor(shape[0], dtype=sums), apart, draw.flag()]


@call
def ghost_scale_shift_grads(draw: Draw) -> Arguments:
    shape, dtype = (draw.size(), draw.size(), draw.size()), draw.one_of(FLOATS)
    channels_first = draw.flag()
    width = shape[1 if channels_first else 2]
    scales = [draw.tensor(width, dtype=torch.float64) if draw.flag() else None for _ in range(2)]
    pair = [draw.tensor(*shape, dtype=dtype) for _ in range(2)]
    return [*pair, channels_first, draw.flag(), *scales]


def _spans(draw: Draw, records: int, clients: int) -> Tensor:
    """Return ranges of rows, empty ones and gaps among them."""
    cuts = sorted(draw.random.randint(0, records) for _ in range(2 * clients))
    return torch.tensor(cuts, dtype=torch.int64).view(clients, 2)


def _records(draw: Draw) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    records, features, clients = draw.size(), draw.size(most=9), draw.random.randint(0, 5)
    classes, dtype = draw.random.randint(1, 4), draw.one_of(COMPILED_FLOATS)
    x, labels = draw.tensor(records, features, dtype=dtype), draw.integers(records, below=classes)
    spans = _spans(draw, records, clients)
    most = int((spans[:, 1] - spans[:, 0]).max()) if clients else 0
    theta = draw.tensor(draw.one_of((1, clients)), classes, features, dtype=dtype)
    return x, labels, spans, most, theta


@call
def glm_record_norms(draw: Draw) -> Arguments:
    return list(_records(draw))


@call
def glm_clipped_sums_(draw: Draw) -> Arguments:
    x, labels, spans, most, theta = _records(draw)
    clients, classes, features = len(spans), theta.shape[1], theta.shape[2]
    n = classes * features
    gradients = draw.output(clients, classes, features, dtype=x.dtype) if draw.flag() else None
    hessians = draw.output(clients, n, n, dtype=x.dtype) if draw.flag() else None
    bounds = [draw.number(), draw.number()]
    return [gradients, hessians, x, labels, spans, most, theta, *bounds]


@call
def glm_feature_covariance(draw: Draw) -> Arguments:
    x, _, spans, most, _ = _records(draw)
    return [x, spans, most, draw.number()]


@call
def glm_solve(draw: Draw) -> Arguments:
    clients, n, dtype = draw.size(most=9), draw.size(), draw.one_of(COMPILED_FLOATS)
    gammas = draw.tensor(clients, dtype=torch.float64).abs()
    return [draw.symmetric(clients, n, dtype), draw.tensor(clients, n, dtype=dtype), gammas]


def _systems(draw: Draw) -> Arguments:
    x, _, spans, most, theta = _records(draw)
    v = draw.tensor(len(spans), *theta.shape[1:], dtype=x.dtype)
    return [x, spans, most, theta, draw.number(), v, draw.tensor(len(spans), dtype=torch.float64)]


@call
def glm_newton(draw: Draw) -> Arguments:
    return _systems(draw)


@call
def glm_newton_cg(draw: Draw) -> Arguments:
    return [*_systems(draw), draw.number() * 1e-3, draw.random.randint(0, 9)]


@call
def kron_sum_(draw: Draw) -> Arguments:
    dtype, centred = draw.one_of(COMPILED_FLOATS), draw.flag()
    lists: tuple[list[Tensor], ...] = ([], [], [], [], [])
    for _ in range(draw.random.randint(0, 3)):
        n, rows, cols = draw.size(most=5), draw.size(), draw.size()
        lists[0].append(draw.output(rows, cols, dtype=dtype))
        lists[1].append(draw.tensor(n, rows, rows, dtype=dtype))
        lists[2].append(draw.tensor(n, cols, cols, dtype=dtype))
        lists[3].append(draw.tensor(rows, cols, dtype=dtype))
        if centred:
            lists[4].append(draw.tensor(n, rows, cols, dtype=dtype))
    return [*lists, draw.flag()]


@call
def add_gaussian_noise_(draw: Draw) -> Arguments:
    dtype = draw.one_of(COMPILED_FLOATS)
    xs = [draw.output(draw.size(most=400), dtype=dtype) for _ in range(draw.random.randint(0, 4))]
    if draw.flag():
        xs.append(draw.output(draw.size(), draw.size(), dtype=dtype).t())
    key, counter = (draw.random.randint(0, 2**63 - 1) for _ in range(2))
    return [xs, draw.number(), key, counter, draw.number()]


@call
def add_row_noise_(draw: Draw) -> Arguments:
    dtype, rows, n = draw.one_of(COMPILED_FLOATS), draw.size(), draw.size(most=400)
    x = draw.output(rows, n + draw.random.randint(0, 3), dtype=dtype)
    keys = draw.integers(rows, below=2**63 - 1)  # of a view that is expanded all are the same
    counters = draw.random.randint(0, 2**62) + torch.arange(rows)
    return [x[:, x.shape[1] - n :], draw.number(), keys, counters, draw.number()]


def _matrices(draw: Draw) -> list[Tensor]:
    dtype = draw.one_of(COMPILED_FLOATS)
    count = draw.random.randint(0, 3)
    return [draw.symmetric(draw.size(most=9), draw.size(), dtype) for _ in range(count)]


@call
def eigh(draw: Draw) -> Arguments:
    return [_matrices(draw), draw.one_of(("auto", "ql", "jacobi", "lapack"))]


@call
def inverse_root(draw: Draw) -> Arguments:
    matrices = _matrices(draw)
    method, power = draw.one_of((("auto", -0.5), ("eigh", 2.0), ("tridiagonal", -0.25)))
    return [matrices, power, [draw.one_of((0.0, 0.1)) for _ in matrices], method]


@call
def rank_one_inverse_update_(draw: Draw) -> Arguments:
    n, dtype = draw.size(), draw.one_of(COMPILED_FLOATS)
    v = draw.tensor(n, dtype=dtype) if draw.flag() else None
    return [draw.symmetric(1, n, dtype)[0], draw.tensor(n, dtype=dtype), v, 1e-6]


@call
def sofim_step_(draw: Draw) -> Arguments:
    dtype = draw.one_of(COMPILED_FLOATS)
    of_grads = dtype if dtype == torch.float64 else draw.one_of(FLOATS[:3])
    shapes = [(draw.size(), draw.size()) for _ in range(draw.random.randint(1, 3))]
    params, momentum = ([draw.output(*s, dtype=dtype) for s in shapes] for _ in range(2))
    grads = [draw.tensor(*s, dtype=of_grads) for s in shapes]
    return [params, momentum, grads, 0.9, draw.number(), draw.number()]


def _window(draw: Draw) -> tuple[Tensor, Tensor]:
    rows, width, dtype = draw.size(), draw.size(most=400), draw.one_of(COMPILED_FLOATS)
    return draw.tensor(rows, width, dtype=dtype), draw.tensor(width, dtype=dtype)


@call
def window_gram(draw: Draw) -> Arguments:
    u, g = _window(draw)
    return [u, draw.tensor(*u.shape, dtype=u.dtype) if draw.flag() else None, g]


@call
def window_project(draw: Draw) -> Arguments:
    return list(_window(draw))


@call
def window_combine_(draw: Draw) -> Arguments:
    window, g = _window(draw)
    weights = draw.tensor(len(window), dtype=torch.float64)
    return [draw.output(*g.shape, dtype=g.dtype), window, g, weights, draw.number()]


def _client_tensors(draw: Draw) -> list[Tensor]:
    shapes = [[draw.size(1, 17) for _ in range(3)] for _ in range(draw.random.randint(0, 3))]
    return [draw.tensor(*shape) for shape in shapes]


@call
def tsvd_soft_threshold(draw: Draw) -> Arguments:
    tensors = _client_tensors(draw)
    return [tensors, [draw.number() for _ in tensors]]


@call
def tsvd_shrink(draw: Draw) -> Arguments:
    tensors = _client_tensors(draw)
    curves = []
    for _ in range(sum(x.shape[2] // 2 + 1 for x in tensors)):
        lower, upper, cut = sorted(abs(draw.number()) for _ in range(3))
        curves += [cut, draw.one_of((0.0, cut)), upper, lower]
    return [tensors, curves]


@call
def tsvd_singular_values(draw: Draw) -> Arguments:
    return [_client_tensors(draw)]


@call
def two_layer_epoch_(draw: Draw) -> Arguments:
    dtype, random = draw.one_of((torch.float32, torch.float64)), draw.random
    counts = [draw.size(most=40) for _ in range(random.randint(1, 4))]
    clients, most = len(counts), max(counts)
    hidden, classes = max(1, draw.size(most=40)), max(1, draw.size(most=12))
    order = torch.zeros(clients, most, dtype=torch.int64)
    for row, count in zip(order, counts, strict=True):
        row[:count] = torch.tensor(random.sample(range(count), count), dtype=torch.int64)
    labels = [[random.randrange(classes) for _ in range(most)] for _ in counts]

    def dense(*shape: int) -> Tensor:
        return draw.tensor(*shape, dtype=dtype).contiguous()

    return [
        dense(clients, most, hidden),
        dense(clients, classes, hidden),
        dense(clients, hidden) if draw.flag() else None,
        dense(clients, classes) if draw.flag() else None,
        [dense(count, count) for count in counts],
        dense(clients, most, hidden),
        order,
        torch.tensor(labels, dtype=torch.int64).view(clients, most),
        dense(clients, most, hidden).abs() if draw.flag() else None,
        counts,
        random.randint(1, 9),
        0.1,
    ]


@call
def network_epoch_(draw: Draw) -> Arguments:
    dtype, random = draw.one_of((torch.float32, torch.float64)), draw.random
    counts = [draw.size(most=9) for _ in range(random.randint(1, 4))]
    clients, most = len(counts), max(counts)
    layers, begin = _network(draw)
    size, classes = max(1, begin), layers[-1].outputs
    channels, height, width = layers[0].image
    total = random.randint(1, 12)

    def dense(*shape: int) -> Tensor:
        return draw.tensor(*shape, dtype=dtype).contiguous()

    def table(end: int) -> Tensor:
        numbers = [[random.randrange(end) for _ in range(most)] for _ in counts]
        return torch.tensor(numbers, dtype=torch.int64).view(clients, most)

    generator = torch.Generator().manual_seed(random.getrandbits(32))
    masks = [
        torch.randint(layer.levels, (clients, most, layer.features), generator=generator).to(
            torch.uint8 if layer.levels == 256 else torch.uint16
        )
        for layer in layers
        if layer.levels
    ]
    momentum = draw.one_of((0.0, 0.9))
    return [
        dense(clients, size),
        dense(clients, size) if momentum else None,
        dense(draw.one_of((1, clients)), size),
        dense(total, channels * height * width),
        table(total),
        table(classes),
        counts,
        masks,
        [number for layer in layers for number in layer.numbers()],
        random.randint(1, 5),
        0.1,
        momentum,
        draw.flag(),
        draw.flag(),
    ]


def _network(draw: Draw) -> tuple[list[Layer], int]:
    """Return up to two layers of images and one or two flat ones, and how many parameters."""
    random, layers, begin = draw.random, list[Layer](), 0
    image = random.randint(1, 5), random.randint(1, 7), random.randint(1, 7)
    for _ in range(random.randint(0, 2)):
        kernel, pool = _fitting_window(draw, image[1:], 3), Window()
        convolution = draw.flag()
        outputs = random.randint(1, 40) if convolution else image[0]
        kernel = kernel if convolution else Window()
        if draw.flag():
            pool = _fitting_window(draw, kernel.over(image[1:]), 3, padded=False)
        activation = draw.one_of(("none", "relu", "tanh"))
        kind = "convolution" if convolution else "pass"
        layer = Layer(kind, image, outputs, kernel, begin, None, activation, pool)
        if convolution:
            begin += outputs * image[0] * kernel.size[0] * kernel.size[1]
            if draw.flag():
                layer, begin = replace(layer, bias=begin), begin + outputs
        layers.append(layer.dropping(draw.one_of((0.5, 0.3))) if draw.flag() else layer)
        image = layer.made
    inputs = image[0] * image[1] * image[2]
    for outputs in [random.randint(1, 40)] * draw.flag() + [random.randint(1, 12)]:
        layers.append(Layer("linear", (inputs, 1, 1), outputs, weight=begin))
        begin, inputs = begin + inputs * outputs, outputs
    return layers, begin


def _fitting_window(draw: Draw, size: tuple[int, int], most: int, padded: bool = True) -> Window:
    """Return a window that fits an image of ``size``."""
    random = draw.random
    padding = (random.randint(0, 2), random.randint(0, 2)) if padded else (0, 0)
    rows, columns = (
        random.randint(1, min(most, n + 2 * p)) for n, p in zip(size, padding, strict=True)
    )
    return Window((rows, columns), (random.randint(1, 3), random.randint(1, 3)), padding)
