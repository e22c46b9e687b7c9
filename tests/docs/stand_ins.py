"""What replaces what in the pages' commands when tests run them. All of it is here; nothing else is changed.

- `default` is a tiny model: the cache holds one under the default model's name. A few files that pages name exist.
- Ports are free ones.
- Some commands get options that make them short, behind their own.
- Commands that cannot run here are listed with the reason. Those of evenflow are parsed all the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from evenflow.host import cache_folder
from evenflow.model.hub.default_model import SMOLLM2_135M
from tests.docs.pages import ROOT, blocks
from tests.gguf_files import write_gguf
from tests.models import CHAT_TEMPLATE, byte_level_tokenizer, reference_model, tiny_hf_folder

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.0,900,20
2024-05-10 00:00:01.5,300,10
2024-05-10 00:00:02.0,400,5
"""
CONTEXT = 16384  # the tiny tokenizer makes four times as many tokens of a text as a large one
PORTS = ("8000", "8001", "8002", "8080", "4318")

# Text of a command or a Python block, and what stands for it.
TEXTS = {
    "journalctl -u vllm |": "cat server.log |",
    "--vllm-python vllm-env/bin/python": "--vllm-version 0.32",
}

# Options that are put behind a command's own, by how the command begins.
SHORTER = {
    "generate": "--max-tokens 4 --threads 1",
    "chat": "--max-tokens 4",
    "demo --live": "--load-time 1s --threads 1",
    "demo": "--threads 1",
    "serve": "--threads 1 --kv-cache-memory 256MiB",
    "ab": "--requests 2 --pairs 2 --max-tokens 4 --rate 50",
    "eval": "-n 2",
    "simulate": "--runs 1 --requests 8",
    "tune": "--runs 1 --requests 8 --max-replicas 1",
    "bench stall": "--repeat 1 --chats 2 --chat-tokens 8 --long-prompts 1 --long-tokens 300 --threads 1",
    "bench agents fixed:2048 target:250ms --trace": "--repeat 1 --scale 0.01 --requests 2",
    "bench agents": "--repeat 1 --misses 1 --agents 1 --scale 0.01 --think 10ms --miss-pause 10ms",
}

# Commands, by how they begin, that are not run, and why.
NOT_RUN = {
    "make install": "sets up the environment that the tests run in",
    "source .venv/bin/activate": "the tests run in an environment already",
    "make test": "is what runs this",
    "make wheel": "tests/slow/test_wheel.py runs it",
    "pip install": "fetches packages",
    "evenflow pull Qwen/": "needs a model hub",
    "evenflow pull https://": "needs a network",
    "docker": "needs Docker",
    "sudo": "changes the system",
    "journalctl": "needs systemd",
    "kubectl": "needs a Kubernetes cluster",
    "python -m vllm.": "needs vLLM; tests/vllm parses it with vLLM's own parser",
    "evenflow serve --engine vllm": "needs vLLM; tests/vllm parses it with vLLM's own parser, and serves so",
    "evenflow serve --engine sglang": "needs SGLang",
    "evenflow serve --model MODEL_FOLDER --device cuda": "needs a GPU",
    "EVENFLOW_TBT_TARGET=50ms python -m sglang.": "needs SGLang",
    "EVENFLOW_TBT_TARGET=50ms python -m vllm.": "needs vLLM; tests/vllm parses it with vLLM's own parser",
    "evenflow ab http://127.0.0.1:8001 http://127.0.0.1:8002": "needs vLLM on both sides",
    "lm_eval": "`make test-clients CLIENTS=lm-eval` runs it",
    "python benchmarks/": "is a benchmark",
    "python -m tests.fuzz": "tests/fuzz runs it",
}

# Pages whose commands take longer than a few seconds together: `make test-slow` runs them.
SLOW = {
    "README.md": "answers, benchmarks and a server",
    "docs/ab.md": "two servers",
    "docs/agents.md": "two servers",
    "docs/choose_target.md": "a server and two benchmarks",
    "docs/chunked_prefill.md": "a benchmark",
    "docs/compile.md": "compiles a model",
    "docs/demo.md": "a server and a load",
    "docs/deploy.md": "a server",
    "docs/deterministic.md": "a server",
    "docs/eval.md": "three evaluations and a server",
    "docs/tune.md": "simulates a hundred configurations for each engine",
    "docs/index.md": "what the README runs",
    "docs/kv_tier.md": "a server",
    "docs/metrics.md": "a server",
    "docs/operations.md": "a server",
    "docs/quickstart.md": "two servers",
    "docs/server.md": "two servers",
    "docs/shares.md": "a server",
    "docs/structured_output.md": "a server",
}

# Blocks in languages that are not run, and why.
LANGUAGES_NOT_RUN = {
    "text": "output, or a drawing",
    "mermaid": "tests/test_packages.py compares it with the code",
    "javascript": "`make test-clients CLIENTS=openai-node` runs it, with OpenAI's package",
}


def make_default_model(cache: Path) -> None:
    """Fill a cache: a tiny model that passes for the default one, and the kernels that are compiled already."""
    cache.mkdir()
    path = cache / SMOLLM2_135M.file_name
    model = reference_model("LlamaForCausalLM", max_position_embeddings=CONTEXT)
    write_gguf(path, model, byte_level_tokenizer(), extra={"tokenizer.chat_template": CHAT_TEMPLATE})
    os.truncate(path, SMOLLM2_135M.num_bytes)  # a file of another size would be fetched again
    kernels = cache_folder() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "native").symlink_to(kernels)


def make_files(folder: Path) -> None:
    """The files that commands name."""
    for name in ("README.md", "Makefile", "examples"):
        (folder / name).symlink_to(ROOT / name)
    tiny_hf_folder(folder / "MODEL_FOLDER", "LlamaForCausalLM", max_position_embeddings=CONTEXT)
    for name in ("MODEL", "my-model"):
        (folder / name).symlink_to(folder / "MODEL_FOLDER")
    prompts = [{"prompt": "What is a token? " * count} for count in (1, 2, 40)]
    for name in ("prompts.jsonl", "code.jsonl"):
        (folder / name).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "trace.csv").write_text(TRACE)
    trace = [{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}] * 2
    (folder / "mooncake.jsonl").write_text("".join(json.dumps(request) + "\n" for request in trace))
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("What is a token?")
    [tasks] = [block for block in blocks("docs/eval.md") if block.language == "json"]
    (folder / "tasks.jsonl").write_text(tasks.text)
    for name in ("keys.txt", "KEYS.txt"):
        (folder / name).write_text("a-key\n")
    shutil.copy(ROOT / "tests/advisor/logs/vllm-0.32-cpu-default.log", folder / "server.log")


def replace(text: str, ports: dict[str, int]) -> str:
    """A command or a Python block with stand-ins for what does not exist here."""
    for old, new in TEXTS.items():
        text = text.replace(old, new)
    return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: str(ports[found[0]]), text)


def why_not_run(command: str) -> str | None:
    """The entry of NOT_RUN that a command falls under."""
    plain = command.removeprefix(".venv/bin/")
    matches = [start for start in NOT_RUN if plain == start or plain.startswith((start + " ", start + "\\"))]
    matches += [start for start in NOT_RUN if start[-1] in "./" and plain.startswith(start)]
    return matches[0] if matches else None


def shortened(arguments: list[str]) -> list[str]:
    """The arguments of `evenflow` with what makes the command short."""
    for start, options in SHORTER.items():
        if arguments[: len(start.split())] == start.split():
            return [*arguments, *options.split()]
    return arguments
