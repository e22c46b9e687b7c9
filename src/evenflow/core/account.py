"""Who a request is served for: what the order of service and its prices are kept by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

PROMOTED = -1  # the level of requests whose class is owed service


class Account(NamedTuple):
    """Requests of one account are served in order of rank."""

    level: int  # 0 is the most urgent class
    service_class: str
    tenant: str


NOBODY = Account(0, "", "")


def length_of_turn(accounts: Sequence[Account]) -> int:
    """How many of these, from the first on, are the first one's; all of them, unless another tenant of its class is
    next."""
    own = sum(1 for _ in takewhile(lambda one: one == accounts[0], accounts))
    return own if own < len(accounts) and accounts[own].level == accounts[0].level else len(accounts)
