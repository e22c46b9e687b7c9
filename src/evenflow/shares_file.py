"""Classes of service and settings of tenants from a TOML file: `evenflow serve --shares`, docs/shares.md."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, ServiceClass, check_classes, check_weights
from evenflow.errors import InvalidConfig, InvalidInput, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on the running and waiting requests of a class or tenant; 0: no limit."""

    max_requests: int = 0
    max_tokens: int = 0  # of their prompts and maximum outputs

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidConfig(f"Got {name}={value!r} but expected a whole number >= 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings(QueueLimits):
    """The settings of one tenant."""

    weight: float = 1.0  # its share, relative to a tenant with weight 1
    most_urgent: str | None = None  # requests for more urgent classes are served in this one; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Settings of classes and tenants. The defaults apply without a file."""

    classes: Classes = DEFAULT_CLASSES
    class_limits: Mapping[str, QueueLimits] = field(default_factory=dict)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The engine's settings."""
        return {"classes": self.classes, "tenant_weights": {name: one.weight for name, one in self.tenants.items()}}


def read_shares(path: Path) -> Shares:
    """Read the settings; raises InvalidConfig with the fault in the file."""
    name = printable(repr(str(path)))
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_size(found)
        return _shares(found)
    except InvalidInput as error:
        raise InvalidConfig(f"In the shares file {name}: {printable(str(error))}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"Got the shares file {name} but it is not TOML: {printable(str(error))}.") from error
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(f"Got the shares file {name} but it cannot be read: {error}.") from error
    except ValueError as error:  # Python's own, of numbers with thousands of digits
        raise InvalidConfig(f"Got the shares file {name} but a number in it is too large: {error}.") from error
    except RecursionError as error:
        raise InvalidConfig(f"Got the shares file {name} but its values are nested too deeply.") from error


def _shares(found: Mapping[str, Any]) -> Shares:
    _check_names("table", found, ("classes", "tenants"))
    classes, limits = DEFAULT_CLASSES, {}
    if "classes" in found:
        tables = _tables("classes", found["classes"])
        limits = {name: _limits(table) for name, table in tables.items()}
        classes = check_classes([_class(name, table) for name, table in tables.items()])
    tenants = {name: _tenant(name, table) for name, table in _tables("tenants", found.get("tenants", {})).items()}
    check_weights({name: one.weight for name, one in tenants.items()})
    known = [one.name for one in classes]
    for name, one in tenants.items():
        if one.most_urgent not in (None, *known):
            raise InvalidConfig(
                f"Got most_urgent={one.most_urgent!r} of tenant {name!r} but expected one of: {', '.join(known)}."
            )
    return Shares(classes=classes, class_limits=limits, tenants=tenants)


def _tables(name: str, found: object) -> dict[str, dict[str, Any]]:
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise InvalidConfig(f"Got {name!r} with a value outside a table but expected tables, such as [{name}.NAME].")
    return found


def _limits(table: dict[str, Any]) -> QueueLimits:
    """Take the server's limits out of a class's table."""
    return QueueLimits(**{one.name: table.pop(one.name) for one in fields(QueueLimits) if one.name in table})


def _class(name: str, table: dict[str, Any]) -> ServiceClass:
    _check_names(f"setting of class {name!r}", table, [one.name for one in fields(ServiceClass) if one.name != "name"])
    for needed in ("rank", "share"):
        if needed not in table:
            raise InvalidConfig(f"Got class {name!r} without {needed!r} but every class needs one.")
    for number in ("share", "reserve"):
        _check_number(f"{number} of class {name!r}", table.get(number, 0))
    return ServiceClass(name=name, **table)


def _tenant(name: str, table: dict[str, Any]) -> TenantSettings:
    _check_names(f"setting of tenant {name!r}", table, [one.name for one in fields(TenantSettings)])
    return TenantSettings(**table)


def _check_size(found: object) -> None:
    """TOML's whole numbers have 64 bits, Python's any number of them."""
    if isinstance(found, int) and found.bit_length() > 63:
        raise InvalidConfig(f"Got a whole number of {found.bit_length()} bits but expected at most 64, with its sign.")
    if isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            _check_size(one)


def _check_names(what: str, found: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise InvalidConfig(f"Got the {what} {unknown[0]!r} but expected one of: {', '.join(known)}.")


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidConfig(f"Got {value!r} for the {what} but expected a number.")
