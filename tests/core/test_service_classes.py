"""Classes as users set them and ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.service_classes import (
    DEFAULT_CLASSES,
    ServiceClass,
    check_classes,
    check_weights,
    class_of_priority,
    find_class,
)
from evenflow.errors import InvalidConfig, InvalidRequest

INTERACTIVE, STANDARD, BATCH = DEFAULT_CLASSES


@pytest.mark.parametrize(
    ("priority", "name"),
    [(-100, "interactive"), (-1, "interactive"), (0, "standard"), (1, "batch"), (7, "batch")],
)
def test_vllms_priority_names_a_class(priority: int, name: str) -> None:
    assert class_of_priority(priority).name == name


@given(st.integers(-50, 50), st.integers(-50, 50), st.sets(st.integers(-20, 20), min_size=1, max_size=6))
def test_a_lower_priority_is_never_less_urgent(a: int, b: int, ranks: set[int]) -> None:
    classes = tuple(ServiceClass(name=f"c{rank}", rank=rank, share=0.1) for rank in ranks)
    low, high = sorted((a, b))
    assert class_of_priority(low, classes).rank <= class_of_priority(high, classes).rank


def test_a_request_that_asks_for_nothing_is_standard() -> None:
    assert find_class(DEFAULT_CLASSES) is STANDARD
    assert find_class(DEFAULT_CLASSES, "batch") is BATCH
    assert find_class(DEFAULT_CLASSES, "batch", 3) is BATCH


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "urgent"}, "service_class='urgent' but expected one of: interactive, standard, batch"),
        ({"name": "batch", "priority": 0}, "priority=0, which means 'standard': give one of them"),
        ({"priority": 1.5}, "priority=1.5 but expected a whole number"),
        ({"priority": True}, "priority=True"),
    ],
)
def test_a_class_that_cannot_be(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        find_class(DEFAULT_CLASSES, **asked)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("share", 0.0, r"share=0.0 of class 'batch' but expected a number in \(0, 1\]"),
        ("share", 1.5, "share=1.5"),
        ("reserve", 1.0, "reserve=1.0"),
        ("tbt_target", 0.0, "tbt_target=0.0 of class 'batch' but expected 0.0001 to 3600"),
        ("ttft_target", float("inf"), "ttft_target=inf"),
        ("rank", 0.5, "rank=0.5"),
        ("name", "", "at least one character"),
    ],
)
def test_settings_of_a_class_are_checked(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        replace(BATCH, **{field: value})


def test_classes_that_do_not_go_together() -> None:
    assert check_classes((BATCH, INTERACTIVE)) == (INTERACTIVE, BATCH)
    with pytest.raises(InvalidConfig, match="no classes"):
        check_classes(())
    with pytest.raises(InvalidConfig, match="two classes of name 'batch'"):
        check_classes((BATCH, replace(BATCH, rank=9)))
    with pytest.raises(InvalidConfig, match="two classes of rank 1"):
        check_classes((BATCH, replace(BATCH, name="other")))
    late = replace(INTERACTIVE, name="batch (late)")
    check_classes((BATCH, late))
    with pytest.raises(InvalidConfig, match=r"'batch \(late\)' but late prompts of 'batch' go by this name"):
        check_classes((replace(BATCH, ttft_target=1.0), late))
    with pytest.raises(InvalidConfig, match=r"add up to 1\.1"):
        check_classes((replace(BATCH, share=0.6), INTERACTIVE))


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_weights_are_checked(weight: Any) -> None:
    with pytest.raises(InvalidConfig, match="of tenant 'a' but expected a number > 0"):
        check_weights({"a": weight})
