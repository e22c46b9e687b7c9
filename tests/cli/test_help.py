"""--help in panels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from evenflow.cli.help import PANELS
from evenflow.cli.main import app
from tests.cli.running import run_cli


def all_commands(command: Any) -> list[Any]:
    below = [one for sub in getattr(command, "commands", {}).values() for one in all_commands(sub)]
    return below or [command]


def test_serves_help_has_everyday_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_cli(capsys, "serve", "--help").out
    sections = ["Arguments:", "Options:", "Limits:", "Keys and access:", "Memory:", "Engine:", "Logs and traces:"]
    sections.append("Another engine:")
    places = [text.index(f"\n{one}\n") for one in sections]
    assert places == sorted(places)
    panel = {one: text[start:end] for one, start, end in zip(sections, places, [*places[1:], None], strict=True)}
    for section, option in (
        ("Options:", "--port"),
        ("Options:", "--tbt-target"),
        ("Limits:", "--max-waiting"),
        ("Keys and access:", "--api-key-file"),
        ("Memory:", "--kv-cache-memory"),
        ("Engine:", "--threads"),
        ("Another engine:", "--vllm-python"),
    ):
        assert f"  {option} " in panel[section]


def test_every_option_is_shown_once_and_every_named_one_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = all_commands(get_command(app))
    names = {parameter.name for command in commands for parameter in command.params}
    assert {name for panel in PANELS.values() for name in panel} <= names
    for path in (["generate"], ["serve"], ["bench", "stall"]):
        text = run_cli(capsys, *path, "--help").out
        command = get_command(app)
        for name in path:
            command = command.commands[name]  # type: ignore[attr-defined]
        for option in (one.opts[0] for one in command.params if one.param_type_name == "option"):
            assert len(re.findall(rf"^  {option}( |$)", text, re.MULTILINE)) == 1, option


def test_defaults_in_words_have_no_brackets_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "serve", "chat", "demo", "analyze", "ab"):
        assert "[default: (" not in " ".join(run_cli(capsys, command, "--help").out.split())
    assert "[default: 128]" in run_cli(capsys, "generate", "--help").out
