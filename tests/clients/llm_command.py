"""The command `llm`, told of the server by its extra-openai-models.yaml."""

from __future__ import annotations

import os
import subprocess

from checking import ADDRESS, MODEL, PROGRAMS, WORK, check, run_checks

QUESTION = "What is the capital of France?"


def ask(*arguments: str) -> str:
    (WORK / "extra-openai-models.yaml").write_text(
        f"- model_id: chat\n  model_name: {MODEL}\n  api_base: {ADDRESS}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n"
        f"- model_id: text\n  model_name: {MODEL}\n  api_base: {ADDRESS}/v1\n  completion: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(WORK), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [PROGRAMS / "llm", *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@check
def a_chat_is_streamed() -> None:
    assert "Paris" in ask("-m", "chat", "-o", "temperature", "0", "-o", "max_tokens", "12", QUESTION)


@check
def a_chat_is_answered_whole() -> None:
    assert "Paris" in ask("-m", "chat", "--no-stream", "-o", "temperature", "0", "-o", "max_tokens", "12", QUESTION)


@check
def a_conversation_goes_on() -> None:
    assert ask("-m", "chat", "-c", "-s", "Be brief.", "-o", "max_tokens", "8", "And of Spain?").strip()


@check
def a_text_is_completed() -> None:
    assert ask("-m", "text", "-o", "max_tokens", "8", "-o", "temperature", "0", "Once upon a time").strip()


@check
def a_schema_is_kept() -> None:
    answer = ask("-m", "chat", "--schema", "name, is_capital bool", "-o", "max_tokens", "80", QUESTION)
    assert '"is_capital"' in answer


run_checks()
