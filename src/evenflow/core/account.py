"""The key for scheduling order and cost accounting: a request's level, class and tenant."""

from __future__ import annotations

from typing import NamedTuple

PROMOTED = -1  # the level of requests whose class is owed service


class Account(NamedTuple):
    """Requests of one account are served in order of rank."""

    level: int  # 0 is the most urgent class
    service_class: str
    tenant: str


NOBODY = Account(0, "", "")
