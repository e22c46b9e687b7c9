from __future__ import annotations

from pathlib import Path

import pytest

from evenflow import host


def test_available_memory_counts_what_the_file_cache_would_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    assert host.available_memory() == 4000 * 1024


def test_without_the_systems_word_half_of_all_memory_is_taken_as_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "missing")
    assert host.available_memory() == host.total_memory() // 2
