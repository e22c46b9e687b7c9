"""Which class of service a request is served in: one rule for all of the server's APIs."""

from __future__ import annotations

from evenflow.core.service_classes import Classes, ServiceClass, find_class
from evenflow.errors import InvalidRequest
from evenflow.server.api.request_models import ServiceFields


def chosen_class(asked: ServiceFields, classes: Classes, most_urgent: str | None = None) -> ServiceClass:
    """By its name, by vLLM's priority or by OpenAI's tier, but none more urgent than `most_urgent`."""
    found = find_class(classes, asked.service_class, asked.priority)
    by_tier = _class_of_tier(asked.service_tier, classes)
    if by_tier is not None:
        if asked.service_class is None and asked.priority is None:
            found = by_tier
        elif found is not by_tier:
            raise InvalidRequest(
                f"Got service_tier={asked.service_tier!r}, which means the class {by_tier.name!r}, and another class, "
                f"{found.name!r}, by service_class or priority: give one of them."
            )
    limit = None if most_urgent is None else find_class(classes, most_urgent)
    return found if limit is None or found.rank >= limit.rank else limit


def served_tier(asked: str | None, class_name: str, classes: Classes) -> str:
    """The tier that a request was served in, as OpenAI names it."""
    by_tier = _class_of_tier(asked, classes)
    return asked if asked is not None and by_tier is not None and by_tier.name == class_name else "default"


def _class_of_tier(tier: str | None, classes: Classes) -> ServiceClass | None:
    """None: the tier leaves the class open."""
    if tier == "flex":
        return max(classes, key=lambda one: one.rank)
    if tier == "priority":
        return min(classes, key=lambda one: one.rank)
    return None
