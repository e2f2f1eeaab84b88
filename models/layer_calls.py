"""Call a layer of a model, and check its result. Errors name the part of the model, such as "experts".

Without these checks, a wrong result would fail somewhere else: a wrong dtype in the next attention, an invalid expert
id in the exchange. Values are checked only on a CPU: on a GPU, the host would wait for them. Decisions of built-in
routers are not checked.

T tokens, D model dim, E experts, K choices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_dualpipe.errors import CodeLine, LayerError, in_context, without_frames

from .custom_layers import custom_source


def call_layer(part: str, layer: nn.Module, x: Tensor, *others: Any, **context: Any) -> Tensor:
    """`layer(x, *others, **context)`, where `layer` is the "experts", "attention" or "block" of a model.

    Raises ValueError unless the output has the shape, dtype and device of `x`. Under autocast, the autocast dtype is
    also valid.
    """
    with errors_in(part, layer):
        out = layer(x, *others, **context)
    return checked_output(part, layer, x, out)


def call_router(router: nn.Module, x: Tensor, num_experts: int, *replay_TK: Tensor) -> tuple[Tensor, ...]:
    """`router(x, *replay_TK)`: weights and expert ids, both [T, K], and the losses of a router that returns them.

    Raises ValueError if the decision of a custom router breaks the contract of `RouterLayer`.
    """
    with errors_in("router", router):
        decision = router(x, *replay_TK)
    if custom_source(router) is not None:
        _check_decision(router, x, decision, num_experts)
    return decision


def checked_output(part: str, layer: nn.Module, x: Tensor, out: Any) -> Tensor:
    """Return `out`, the output of `layer` for `x`. Raises ValueError as `call_layer` does."""
    if not isinstance(out, Tensor) or out.shape != x.shape or out.device != x.device:
        raise _wrong_output(part, layer, _described(x), _described(out))
    if out.dtype != x.dtype:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or out.dtype != torch.get_autocast_dtype(kind):
            raise _wrong_output(part, layer, _described(x), _described(out))
    return out


@contextmanager
def errors_in(part: str, layer: nn.Module) -> Iterator[None]:
    """Errors of this context name the part of the model, and the user's class of its layer."""
    try:
        yield
    except Exception as error:
        in_context(error, part, custom_source(layer))
        raise


def _check_decision(router: nn.Module, x: Tensor, decision: Any, num_experts: int) -> None:
    tokens = x.numel() // x.shape[-1]
    wanted = f"weights and expert ids, both [{tokens}, K]"
    if not isinstance(decision, tuple | list) or not 2 <= len(decision) <= 3 or not all(map(torch.is_tensor, decision)):
        raise _wrong_output("router", router, wanted, _described(decision))
    weights_TK, ids_TK = decision[:2]
    shapes = {weights_TK.shape, ids_TK.shape}
    if len(shapes) > 1 or weights_TK.ndim != 2 or len(weights_TK) != tokens or not weights_TK.shape[1]:
        raise _wrong_output("router", router, wanted, f"{_described(weights_TK)} and {_described(ids_TK)}")
    kinds = ("weights", weights_TK, (torch.float32, torch.float64)), ("expert ids", ids_TK, (torch.int64,))
    for name, tensor, dtypes in kinds:
        if tensor.dtype not in dtypes or tensor.device != x.device:
            wanted = f"{name} in {' or '.join(map(_short, dtypes))} on {x.device}"
            raise _wrong_output("router", router, wanted, _described(tensor))
    if ids_TK.device.type != "cpu":
        return
    if ids_TK.numel() and not -1 <= ids_TK.min() <= ids_TK.max() < num_experts:
        wanted = f"expert ids from 0 to {num_experts - 1}, or -1 for no expert"
        raise _wrong_output("router", router, wanted, f"ids from {int(ids_TK.min())} to {int(ids_TK.max())}")
    sorted_TK = ids_TK.sort(dim=1).values
    twice_T = ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any(1)
    if twice_T.any():
        token = int(twice_T.nonzero()[0])
        got = f"{ids_TK[token].tolist()} for token {token}"
        raise _wrong_output("router", router, "different experts for each token", got)


def _wrong_output(part: str, layer: nn.Module, wanted: str, got: str) -> Exception:
    """The error names the definition of the layer: no line of it has raised an exception."""
    line = CodeLine.of(custom_source(layer))
    error = LayerError(f"{_name(layer)} must return {wanted}: got {got}", line)
    in_context(error, part)
    return without_frames(error)


def _name(layer: nn.Module) -> str:
    return getattr(custom_source(layer), "__name__", type(layer).__name__)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{[*value.shape]} in {_short(value.dtype)} on {value.device}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
