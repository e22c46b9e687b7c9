"""The file of classes and tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.config import EngineConfig
from evenflow.core.service_classes import DEFAULT_CLASSES, ServiceClass
from evenflow.errors import InvalidConfig
from evenflow.shares_file import QueueLimits, TenantSettings, read_shares


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "shares.toml"
    path.write_text(text)
    return path


def test_classes_and_tenants(tmp_path: Path) -> None:
    shares = read_shares(
        written(
            tmp_path,
            """
            [classes.nightly]
            rank = 5
            share = 0.1
            tbt_target = 2

            [classes.chat]
            rank = -1
            share = 0.6
            ttft_target = "500ms"
            max_requests = 20

            [tenants.acme]
            weight = 3
            max_tokens = 5000

            [tenants."gateway/guests"]
            most_urgent = "nightly"
            """,
        )
    )
    assert shares.classes == (
        ServiceClass(name="chat", rank=-1, share=0.6, ttft_target="500ms"),
        ServiceClass(name="nightly", rank=5, share=0.1, tbt_target=2),
    )
    guests = TenantSettings(most_urgent="nightly")
    assert shares.tenants == {"acme": TenantSettings(weight=3, max_tokens=5000), "gateway/guests": guests}
    assert shares.class_limits["chat"] == QueueLimits(max_requests=20)
    assert EngineConfig(**shares.engine_settings).tenant_weights == {"acme": 3, "gateway/guests": 1}


def test_what_a_file_leaves_out_stays(tmp_path: Path) -> None:
    assert read_shares(written(tmp_path, "")).classes == DEFAULT_CLASSES
    assert read_shares(written(tmp_path, "[tenants.a]\nmost_urgent = 'batch'\n")).classes == DEFAULT_CLASSES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes = 3", "expected tables, such as"),
        ("[tenant.a]\nweight = 1", "Got the table 'tenant' but expected one of: classes, tenants"),
        ("[classes.a]\nshare = 0.5", "without 'rank'"),
        ("[classes.a]\nrank = 1\nshare = 'all'", "Got 'all' for the share of class 'a' but expected a number"),
        ("[classes.a]\nrank = 1\nshare = 0.5\nreserv = 0.1", "Got the setting of class 'a' 'reserv'"),
        (
            "[classes.a]\nrank = 1\nshare = 0.5\nttft_target = 'soon'",
            "ttft_target='soon' of class 'a' but expected a duration",
        ),
        ("[classes.a]\nrank = 1\nshare = 0.7\n[classes.b]\nrank = 2\nshare = 0.7", "add up to 1.4"),
        ("[tenants.a]\nweight = 0", "weight 0 of tenant 'a' but expected a number > 0"),
        ("[tenants.a]\nweight = 'much'", "weight 'much' of tenant 'a'"),
        ("[tenants.a]\nmost_urgent = 'vip'", "expected one of: interactive, standard, batch"),
        ("[tenants.a]\nmax_requests = -1", "max_requests=-1 but expected a whole number >= 0"),
        ("[tenants", "is not TOML"),
        (f"[classes.a]\nrank = {'1' * 5000}", "a number in it is too large"),
        (f"[tenants.a]\nweight = {'1' * 400}", "Got a whole number of 1326 bits but expected at most 64"),
        (f"[classes.a]\nrank = 0x{'f' * 5000}\nshare = 0.5", "Got a whole number of 20000 bits"),
        (f"tenants = {'[' * 5000}", "nested too deeply"),
        (f"tenants = {{ a = {{ weight = {'[' * 100 + ']' * 100} }} }}", "weight"),
        (f"[tenants.a]\n{'x' * 5000} = 1", "xxx"),
    ],
)
def test_wrong_files_are_refused_by_name_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="shares file") as refusal:
        read_shares(written(tmp_path, text))
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 2000
    assert message in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_shares(tmp_path / "absent")
