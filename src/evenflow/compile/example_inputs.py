"""The inputs that a model is compiled for: one example or several, as calls by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenflow.compile.model_call import (
    Model,
    input_shape,
    named_arguments,
    with_token_tensors,
)
from evenflow.errors import InvalidInput

_FORMS = (
    "ids (a tensor or a list), a tokenizer's output, a tuple of the arguments of one call, or a list of such examples"
)


def example_calls(model: Model, inputs: Any) -> list[dict[str, Any]]:
    """The calls that `inputs` stands for, each by the names of its arguments.

    One example is a tensor of ids, a list of ids, a mapping of arguments (a tokenizer's output), or a tuple: the
    arguments of one call in the model's order. A list of tensors, of mappings, of tuples or of lists of ids is several
    examples, of any lengths. A list that looks like ids with their mask is refused: it could be meant either way.
    """
    if not isinstance(inputs, list) or _is_ids(inputs):
        return [_call(model, inputs)]
    if not inputs:
        raise InvalidInput(f"Got an empty list of example inputs but expected {_FORMS}.")
    calls = [_call(model, example) for example in inputs]
    if all(isinstance(example, list | Tensor) for example in inputs):
        _refuse_masks([torch.as_tensor(example) for example in inputs])
    return calls


def example_lengths(model: Model, inputs: Any) -> list[int]:
    """The length in tokens of each sequence in the examples."""
    shapes = [input_shape((), call) for call in example_calls(model, inputs)]
    return [length for num_sequences, length in shapes for _ in range(num_sequences)]


def _is_ids(inputs: list[Any]) -> bool:
    return bool(inputs) and all(isinstance(item, int) for item in inputs)


def _call(model: Model, example: Any) -> dict[str, Any]:
    if hasattr(example, "keys"):
        named = named_arguments(model, (), example)
    elif isinstance(example, list | Tensor):
        named = named_arguments(model, (example,), {})
    elif isinstance(example, tuple) and example and not any(isinstance(item, int) for item in example):
        named = named_arguments(model, example, {})
    else:
        found = "a tuple without tensors" if isinstance(example, tuple) else type(example).__name__
        raise InvalidInput(f"Got {found} as example inputs but expected {_FORMS}.")
    return dict(with_token_tensors(model, (), named)[1])


def _refuse_masks(examples: Sequence[Tensor]) -> None:
    first, *others = examples
    if _is_binary(first):
        return
    for other in others:
        if other.shape == first.shape and other.numel() > 1 and _is_binary(other):
            raise InvalidInput(
                "Got a list of ids and what looks like their attention mask. A list holds several examples: give the "
                "arguments of one call as a tuple or by name."
            )


def _is_binary(tokens: Tensor) -> bool:
    return tokens.dtype == torch.bool or bool(((tokens == 0) | (tokens == 1)).all())
