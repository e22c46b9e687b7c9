"""The check of host releases, on sources made here: no package index is asked."""

from __future__ import annotations

import ast
import io
import json
import zipfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_versions
import pytest
from check_versions import DATA, HOSTS, Host, table, updated, with_table
from package_index import PackageIndex, WheelFiles
from source_names import Package

from evenflow.advisor import sglang_flags
from evenflow.hosts.uses import Uses
from evenflow.sglang.launch import SGLANG

SOURCES = {
    "host/__init__.py": "",
    "host/core/__init__.py": "from .scheduler import Scheduler\n",
    "host/core/base.py": """
class Base:
    limit: int = 0

    def __init__(self):
        self.running, self.waiting = [], []

    @property
    def depth(self): return 1

    def finish(self, batch, *, result=None): ...
""",
    "host/core/scheduler.py": """
from host.core.base import Base as _Base
from .names import *

CHUNK = 512
if CHUNK:
    try:
        from host.core.base import Base
    except ImportError:
        Base = None


class Scheduler(_Base):
    def schedule(self, num_tokens):
        self.chunk = num_tokens

    def finish(self, batch): ...


def match(request, cache): ...
""",
    "host/core/names.py": "def broadcast(data): ...\n",
    "host/fields.py": "class Model:\n    dtype: str\n",
}
WHERE = "host.core.scheduler:Scheduler"


def package(**changed: str) -> Package:
    return Package((SOURCES | changed).get)


@pytest.mark.parametrize(
    "uses",
    [
        Uses(WHERE, ("running", "waiting", "limit", "depth", "chunk"), {"schedule": {"num_tokens"}}),
        Uses(WHERE, ("paused|running",), {"plan|schedule": {"num_tokens"}}),
        Uses(WHERE, ("dtype",), also_in=("host.fields",)),
        Uses("host.core.scheduler", ("CHUNK", "Base", "Scheduler", "broadcast"), {"match": {"request"}}),
        Uses("host.core.base:Base", methods={"finish": {"result"}}),
        Uses("host.core:Scheduler", ("running",)),
    ],
)
def test_all_that_is_used_is_found(uses: Uses) -> None:
    assert list(package().missing(uses)) == []


@pytest.mark.parametrize(
    ("uses", "missing"),
    [
        (Uses(WHERE, ("running", "paused")), ["Scheduler.paused"]),
        (Uses(WHERE, ("dtype",)), ["Scheduler.dtype"]),
        (Uses(WHERE, methods={"schedule": {"deadline"}}), ["Scheduler.schedule(deadline)"]),
        (Uses(WHERE, methods={"finish": {"result"}}), ["Scheduler.finish(result)"]),  # the base has it, this class not
        (Uses(WHERE, methods={"plan|step": set()}), ["Scheduler.plan|step()"]),
        (Uses("host.core.scheduler", ("Queue",)), ["scheduler.Queue"]),
        (Uses("host.core.queue:Queue", ("size",)), ["host.core.queue:Queue"]),
        (Uses("host.core.scheduler:Queue", ("size",)), ["host.core.scheduler:Queue"]),
    ],
)
def test_what_is_missing_is_named(uses: Uses, missing: list[str]) -> None:
    assert list(package().missing(uses)) == missing


def test_imports_of_an_adapter_are_checked() -> None:
    adapter = ast.parse("""
import json
from host.core import scheduler
from host.core.scheduler import Base, Queue
from other import thing

def later():
    from host.gone import anything
    try:
        from host.core.queue import Queue
    except ImportError:
        from host.core.scheduler import Scheduler
    try:
        from host.core.queue import Line
    except ImportError:
        from host.core.scheduler import Line
""")
    found = set(package().missing_imports(adapter, "host"))
    assert found == {"host.core.scheduler.Queue", "host.gone.anything", "host.core.queue.Line"}


def test_a_wheel_is_read_file_by_file() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("host/core/base.py", SOURCES["host/core/base.py"] * 50)
    files = WheelFiles(content)
    assert files.read("host/core/base.py") == SOURCES["host/core/base.py"] * 50
    assert files.read("host/core/queue.py") is None


class Session:
    """Of an index that sends only whole files, two bytes at a time."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def head(self, url: str, **_: Any) -> Any:
        headers = {"Content-Length": str(len(self.content)), "Accept-Ranges": "none"}
        return SimpleNamespace(status_code=200, headers=headers, reason="OK", url=url, raise_for_status=lambda: None)

    def get(self, url: str, **_: Any) -> Any:
        return SimpleNamespace(iter_content=lambda size: (self.content[at : at + 2] for at in range(0, 10**4, 2)))


def test_an_index_without_parts_of_files_is_read_too() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("host/fields.py", SOURCES["host/fields.py"])
    link = SimpleNamespace(is_file=False, url_without_fragment="https://index.example/host.whl")
    with closing(PackageIndex(None, Session(content.getvalue())).open(link)) as files:
        assert files.read("host/fields.py") == SOURCES["host/fields.py"]


class Index(PackageIndex):
    """Of two releases, the second of which lacks a class."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def releases(self, package: str) -> dict[str, Any]:
        return {"0.9.0": 0, "1.0.0": 1, "1.1.0": 2, "1.2.0": 3}

    def open(self, link: Any) -> Any:
        without = "" if link < 3 else "host/core/scheduler.py"
        return SimpleNamespace(read=lambda path: None if path == without else SOURCES.get(path), close=lambda: None)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    engine = SimpleNamespace(name="Host", packages=("host",))
    made = Host(engine, (Uses(WHERE, ("running",)),), (1, 0))  # type: ignore[arg-type]
    monkeypatch.setattr(check_versions, "HOSTS", (made,))
    return made


@pytest.mark.parametrize(("ends_only", "versions"), [(False, ["1.0.0", "1.1.0", "1.2.0"]), (True, ["1.0.0", "1.2.0"])])
def test_releases_from_the_oldest_on_are_checked(host: Host, ends_only: bool, versions: list[str]) -> None:
    found = list(check_versions.check(Index(), ends_only))
    assert [version for _, version, _ in found] == versions
    assert [missing for _, _, missing in found[:-1]] == [[]] * (len(versions) - 1)
    assert found[-1][2] == [WHERE]


def test_the_table_keeps_what_was_tested(host: Host) -> None:
    before = {"host": {"1.0.0": {"missing": ["x"], "tests": "every change", "gpu": "one H200"}}}
    data = updated(before, list(check_versions.check(Index(), False)))
    assert table(data, host).splitlines()[2:] == [
        f"| 1.2.0 | no: `{WHERE}` |  |  |",
        "| 1.1.0 | yes |  |  |",
        "| 1.0.0 | yes | every change | one H200 |",
    ]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_the_docs_have_the_table_of_the_data(host: Host) -> None:
    page, data = host.page.read_text(), json.loads(DATA.read_text())
    assert with_table(page, data, host) == page
    assert all(package in data for package in host.package.packages)


def test_sglangs_known_versions_are_those_of_the_table() -> None:
    data = json.loads(DATA.read_text())
    sglang = [version for version, row in data["sglang"].items() if not row["missing"]]
    assert (sglang[0], sglang[-1]) == (sglang_flags.OLDEST_VERSION, sglang_flags.NEWEST_VERSION)
    assert SGLANG.tested_versions == (f"{sglang[0]} to {sglang[-1]}",)


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_the_schedulers_of_both_ends_run_in_the_tests(end: str) -> None:
    pinned = (Path(__file__).parents[2] / ".ci" / f"sglang-{end}.txt").read_text()
    version = sglang_flags.OLDEST_VERSION if end == "oldest" else sglang_flags.NEWEST_VERSION
    assert f"sglang=={version} " in pinned
    assert json.loads(DATA.read_text())["sglang"][version]["tests"]
