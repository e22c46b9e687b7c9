from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8,000 kB available, and no limits yet."""
    (tmp_path / "meminfo").write_text("MemAvailable: 8000 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return tmp_path / "cgroup"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_limits_the_machine_counts(cgroups: Path) -> None:
    write(cgroups, memory__max="max", memory__current="1000", cpu__max="max 100000")
    assert host.available_memory() == 8000 * 1024
    assert host.num_cpus() == 64


def test_a_containers_limits_count(cgroups: Path) -> None:
    statistics = "anon 2000\ninactive_file 500"
    write(cgroups, memory__max="4000000", memory__current="3000", memory__stat=statistics, cpu__max="250000 100000")
    assert host.total_memory() == 4000000
    assert host.available_memory() == 4000000 - 2500
    assert host.num_cpus() == 2


def test_the_limits_around_a_cgroup_count_too(cgroups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pods/mine\n")
    write(cgroups / "pods", memory__max="2000", memory__current="500", cpu__max="50000 100000")
    write(cgroups / "pods" / "mine", memory__max="9000", memory__current="100", cpu__max="max 100000")
    assert host.available_memory() == 1500
    assert host.num_cpus() == 1


def test_cgroups_of_version_1(cgroups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    limits = {"memory__limit_in_bytes": "3000", "memory__usage_in_bytes": "1000"}
    write(cgroups / "memory", **limits, memory__stat="total_inactive_file 10")
    write(cgroups / "cpu,cpuacct" / "docker" / "abc", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert host.available_memory() == 3000 - 990
    assert host.num_cpus() == 3
    write(cgroups / "cpu,cpuacct" / "docker" / "abc", cpu__cfs_quota_us="-1")
    assert host.num_cpus() == 64


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool) -> None:
    folder = path = tmp_path / "mine"
    host.private_folder(folder)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to(folder)
    host.private_folder(path)  # a link of one's own is fine
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        host.private_folder(path)


_BURST = """
import sys
from evenflow.host import return_freed_memory

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "True":
    return_freed_memory()
for _ in range(3):  # the first that are freed teach glibc to keep such
    bytearray(24 << 20)
before, kept = resident(), []
for _ in range(12):
    large = bytearray(8 << 20)
    kept.append(bytearray(1 << 16))  # above it in a heap
    del large
    kept.append([bytearray(8 << 20), bytearray(1 << 16)])
for pair in kept[1::2]:
    del pair[0]
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep freed memory")
def test_large_buffers_go_back_to_the_system() -> None:
    def left_mb(is_returned: bool) -> int:
        command = [sys.executable, "-c", _BURST, str(is_returned)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert left_mb(True) < 8 < 32 < left_mb(False)


def cpu_times(monkeypatch: pytest.MonkeyPatch, stat: Path, *cores: str, at: float, own: float) -> host.CpuTimes:
    stat.write_text("cpu  9 9 9 9\n" + "\n".join(cores) + "\nintr 5\n")
    monkeypatch.setattr(host, "_CPU_TIMES", stat)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2}, raising=False)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    monkeypatch.setattr("time.perf_counter", lambda: at)
    monkeypatch.setattr("time.process_time", lambda: own)
    monkeypatch.setattr("os.times", lambda: SimpleNamespace(children_user=0.25, children_system=0.05))
    found = host.CpuTimes.now()
    assert found is not None
    return found


def test_cores_that_others_take_are_counted_without_our_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ["cpu0 100 0 0 500 0 0 0 0 0 0", "cpu1 100 0 0 0 0 0 0 0 0 0", "cpu2 0 0 0 600 0 0 0 0 0 0"]
    before = cpu_times(monkeypatch, tmp_path / "stat", *first, at=10.0, own=0.5)
    # In two seconds: 2.6 s of work and 0.4 s stolen on our cores, 1.5 s of them our own; core 1 is not ours.
    later = ["cpu0 250 0 10 500 0 0 0 40 0 0", "cpu1 300 0 0 0 0 0 0 0 0 0", "cpu2 90 5 5 650 0 0 0 0 0 0"]
    after = cpu_times(monkeypatch, tmp_path / "stat", *later, at=12.0, own=2.0)
    assert after.taken_since(before) == pytest.approx((2.6 + 0.4 - 1.5) / 2)
    assert before.taken_since(before) == 0


def test_without_the_systems_figures_nothing_is_said_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CPU_TIMES", tmp_path / "missing")
    assert host.CpuTimes.now() is None
