"""Causal attention of packed rows by cuDNN, which on Hopper GPUs takes 0.6 of the time of torch's flash attention.

torch builds cuDNN's plan in every call of variable-length attention, 40 ms. Here NVIDIA's frontend (the package
nvidia-cudnn-frontend, which SGLang brings) builds a plan once for each shape, 0.1 s.

Legend: ``L`` tokens, ``H`` query heads, ``K`` key heads, ``D`` head size, ``N`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import FunctionCtx

SIZE = 128
"""The head size that was measured."""
_ROUND = 4096
"""Memory for sums of gradients is for a multiple of so many tokens, so that there are few plans."""


@cache
def is_available(device: torch.device) -> bool:
    """Return whether a GPU is of Hopper's generation or newer, and the frontend is installed."""
    return find_spec("cudnn") is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Return the attention within rows, ``[L, H, D]``.

    Args:
        query: bfloat16 ``[L, H, D]``.
        key: ``[L, K, D]``.
        value: ``[L, K, D]``.
        starts: int32 ``[N + 1]``: where each row starts, and the end.
        longest: at least the tokens of the longest row.
        scale: of the products of queries and keys.
    """
    _, heads, size = query.shape
    lengths = torch.cat([starts.diff(), starts.new_zeros(1)])
    bounds = torch.stack([lengths, starts * (heads * size), starts * (key.shape[1] * size), starts * heads])
    attended: torch.Tensor = _attend(query, key, value, bounds, longest, scale or size**-0.5)[0]
    return attended


@torch.library.custom_op("agentrl::cudnn_attention", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention, and the logarithms of the softmax's denominators, float32 ``[L, H]``.

    ``bounds`` are int32 ``[4, N + 1]``: lengths, and where rows start among the numbers of queries, keys and logarithms.
    """
    tensors = {"query": query.contiguous(), "key": key.contiguous(), "value": value.contiguous()}
    tensors["attended"] = query.new_empty(query.shape)
    tensors["logarithms"] = query.new_empty(query.shape[:2], dtype=torch.float32)
    _plan(_make_shape(query, key, bounds, longest, scale), backward=False).run(tensors, bounds)
    return tensors["attended"], tensors["logarithms"]


@_attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("agentrl::cudnn_attention_backward", mutates_args=())
def _derive(
    gradient: torch.Tensor, saved: list[torch.Tensor], longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values. ``saved`` are the tensors of `_attend`, its results, and the bounds."""
    *inputs, bounds = saved
    names = ("query", "key", "value", "attended", "logarithms", "gradient")
    tensors = {name: tensor.contiguous() for name, tensor in zip(names, (*inputs, gradient), strict=True)}
    gradients = tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:3])
    tensors |= dict(zip(_GRADIENTS, gradients, strict=True))
    _plan(_make_shape(inputs[0], inputs[1], bounds, longest, scale), backward=True).run(tensors, bounds)
    return gradients  # type: ignore[return-value]


@_derive.register_fake
def _(
    gradient: torch.Tensor, saved: list[torch.Tensor], longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (tensor.new_empty(tensor.shape) for tensor in saved[:3])
    return query, key, value


class _Context(FunctionCtx):
    """What the backward pass takes from the forward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    options: tuple[int, float]


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float]


def _save(ctx: _Context, inputs: Inputs, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, bounds, longest, scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)
    ctx.options = longest, scale


def _backward(ctx: _Context, gradient: torch.Tensor, of_logarithms: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_derive(gradient, [*ctx.saved_tensors], *ctx.options), None, None, None


_attend.register_autograd(_backward, setup_context=_save)


class _Shape(NamedTuple):
    """What a plan depends on."""

    device: int
    rows: int
    heads: int
    key_heads: int
    size: int
    longest: int
    tokens: int
    """At least those of all rows."""
    scale: float


def _make_shape(query: torch.Tensor, key: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float) -> _Shape:
    tokens, heads, size = query.shape
    rounded = -(-tokens // _ROUND) * _ROUND
    return _Shape(query.get_device(), bounds.shape[1] - 1, heads, key.shape[1], size, longest, rounded, scale)


_GRADIENTS = ("query'", "key'", "value'")
"""Names of results in a plan's backward pass."""


class _GraphTensor(Protocol):
    """A tensor of a graph of cuDNN."""

    def set_output(self, value: bool) -> _GraphTensor: ...
    def set_dim(self, dim: tuple[int, ...]) -> _GraphTensor: ...
    def set_stride(self, stride: tuple[int, ...]) -> _GraphTensor: ...
    def set_data_type(self, data_type: object) -> _GraphTensor: ...
    def set_ragged_offset(self, ragged_offset: _GraphTensor) -> _GraphTensor: ...


class _Plan(NamedTuple):
    """A graph of cuDNN that is built."""

    graph: Any
    handle: object
    tensors: Mapping[str, _GraphTensor]
    """The graph's tensors, by name."""
    workspace: int
    """Bytes."""

    def run(self, tensors: Mapping[str, torch.Tensor], bounds: torch.Tensor) -> None:
        """Compute with ``tensors`` by name, results included."""
        import cudnn

        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(bounds.device).cuda_stream)
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=bounds.device)
        by_name = {**tensors, **dict(zip(_BOUNDS, bounds.unbind(), strict=True))}
        self.graph.execute({self.tensors[name]: t for name, t in by_name.items()}, workspace, handle=self.handle)


_BOUNDS = ("lengths", "starts of query", "starts of key", "starts of logarithms")


@cache
def _handle(device: int) -> object:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _plan(shape: _Shape, *, backward: bool) -> _Plan:
    import cudnn

    kinds, handle = cudnn.data_type, _handle(shape.device)
    graph = cudnn.pygraph(
        io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    tensors: dict[str, _GraphTensor] = {
        name: graph.tensor(
            name=name, dim=(shape.rows + (name != "lengths"), 1, 1, 1), stride=(1, 1, 1, 1), data_type=kinds.INT32
        )
        for name in _BOUNDS
    }

    def layout(name: str) -> dict[str, tuple[int, ...]]:
        heads = shape.key_heads if name.startswith(("key", "value")) else shape.heads
        width = 1 if name == "logarithms" else shape.size
        stride = (shape.longest * heads * width, width, heads * width, 1)
        return {"dim": (shape.rows, heads, shape.longest, width), "stride": stride}

    def lay_out(tensor: _GraphTensor, name: str) -> _GraphTensor:
        rows = "logarithms" if name == "logarithms" else "key" if name.startswith(("key", "value")) else "query"
        tensor.set_ragged_offset(tensors[f"starts of {rows}"])
        tensors[name] = tensor
        return tensor

    def add_input(name: str) -> _GraphTensor:
        kind = kinds.FLOAT if name == "logarithms" else kinds.BFLOAT16
        return lay_out(graph.tensor(name=name, data_type=kind, **layout(name)), name)

    def add_result(tensor: _GraphTensor, name: str) -> None:
        shaped = lay_out(tensor, name).set_output(True)
        shaped.set_dim(layout(name)["dim"]).set_stride(layout(name)["stride"])

    options: dict[str, Any] = {name[0]: add_input(name) for name in ("query", "key", "value")}
    options |= {"seq_len_q": tensors["lengths"], "seq_len_kv": tensors["lengths"], "use_padding_mask": True}
    options |= {"attn_scale": shape.scale, "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT}
    options["diagonal_band_right_bound"] = 0
    if backward:
        of_forward = {"o": add_input("attended"), "dO": add_input("gradient"), "stats": add_input("logarithms")}
        totals = {f"max_total_seq_len_{name}": shape.tokens for name in ("q", "kv")}
        for tensor, name in zip(graph.sdpa_backward(**of_forward, **totals, **options), _GRADIENTS, strict=True):
            add_result(tensor, name)
    else:
        attended, logarithms = graph.sdpa(generate_stats=True, **options)
        add_result(attended, "attended")
        add_result(logarithms.set_data_type(kinds.FLOAT), "logarithms")
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, handle, tensors, graph.get_workspace_size())
