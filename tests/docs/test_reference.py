"""The reference holds all that there is: commands, options, settings, variables, metrics."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from evenflow import EngineConfig, SamplingParams
from evenflow.core import step_time
from evenflow.executors import block_files, recorded
from tests.docs.pages import PAGES, ROOT
from tests.server.stepping import samples

SCRIPTS = ROOT / "docs" / "scripts"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import reference

    return reference


def test_commands_and_their_options(reference: object) -> None:
    text = reference.commands()  # type: ignore[attr-defined]
    for heading in ("## evenflow\n", "## evenflow serve\n", "## evenflow bench stall\n"):
        assert heading in text
    serve = text.partition("## evenflow serve\n")[2].partition("\n## ")[0]
    assert "| `--port <int>` | Port to listen on; 0 picks a free one. [default: 8000] |" in serve
    assert "--quick" not in serve


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_setting_with_its_comment(reference: object, cls: type) -> None:
    rows = reference.fields(f"evenflow.{cls.__name__}").splitlines()[2:]  # type: ignore[attr-defined]
    assert [row.split("`")[1] for row in rows] == [field.name for field in dataclasses.fields(cls)]
    if cls is EngineConfig:
        assert [row for row in rows if row.endswith("|  |")] == []  # each says what it is
    assert any("seconds between" in row and "`tbt_target`" in row for row in rows)


def test_methods_with_their_signatures(reference: object) -> None:
    text = reference.api("evenflow.LLM")  # type: ignore[attr-defined]
    assert "set_target(target: float | str | None, paced: bool | None = None)" in text
    assert "### chat()" in text
    assert "_set_policy" not in text
    assert 'LLM("default", policy="fixed:256")\n' in text.partition("```py")[2]


def test_a_graph_has_every_arrow_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import package_graph

    drawn = package_graph.svg("graph TD\n  a --> b\n  b --> c\n  a --> c\n")
    assert drawn.count("marker-end") == 3
    places = {name: float(y) for y, name in re.findall(r'y="(\d+)" text-anchor[^>]*>(\w)<', drawn)}
    assert places["a"] < places["b"] < places["c"]  # arrows point down


def test_names_to_generate_exist(reference: object) -> None:
    for page in PAGES.values():
        for kind, names in re.findall(r"<!-- generated: (\w+)((?: [\w.]+)*) -->", page):
            for name in names.split():
                assert getattr(reference, kind)(name)


def test_every_variable_is_listed() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"""["'$](EVENFLOW_[A-Z_]+)""", sources))
    assert len(read) > 5
    assert read - set(re.findall(r"`(EVENFLOW_\w+)`", PAGES["docs/configuration.md"])) == set()


def test_metrics_in_the_operations_page_exist() -> None:
    named = set(re.findall(r"\b(?:vllm|evenflow):\w+", PAGES["docs/operations.md"]))
    known = samples().keys()
    assert named
    assert {name for name in named if not {name, f"{name}_total"} & known} == set()


@pytest.mark.slow
def test_the_pictures_can_be_drawn_again(tmp_path: object) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / "pictures.py"), str(tmp_path)], check=True)
    drawn = {path.name for path in tmp_path.iterdir()}  # type: ignore[attr-defined]
    shown = PAGES["docs/chunked_prefill.md"] + PAGES["docs/performance.md"]
    assert drawn == set(re.findall(r"images/(\w+\.svg)", shown))


def test_the_page_on_upgrades_has_the_formats_of_today() -> None:
    page = PAGES["docs/upgrade.md"]
    for row, version in (
        ("`evenflow-kv` version {}", block_files._VERSION),
        ("`version` {}, by model", step_time._VERSION),
        ("`version` {} | refuses to replay", recorded.VERSION),
    ):
        assert row.format(version) in page
