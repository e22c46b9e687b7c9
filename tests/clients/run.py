"""Runs unmodified clients of OpenAI's, Anthropic's and Ollama's APIs against a server of this checkout.

Each has an environment of its own.

    python tests/clients/run.py                 # all
    python tests/clients/run.py litellm lm-eval

Environments are made on first use, under --environments. What a client checks stands in its file here. Besides, the
server must have nothing left of a client's requests when the client is done. vLLM is taken from $EVENFLOW_VLLM_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from server_process import start_server, stop_server

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
sys.path.insert(0, str(REPOSITORY))

MODEL_NAME = "served"
COMMAND = str(Path(sys.executable).with_name("evenflow"))
_ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evenflow" / "clients"
_CONSTRAINTS = REPOSITORY / "constraints.txt"
_CLIENT_S = 1500.0


class Unavailable(Exception):
    """The client cannot be run here: nothing is said about the server."""


@dataclass(frozen=True)
class Client:
    """One client: what is installed for it, what is run, and on which model."""

    script: str
    packages: tuple[str, ...] = ()
    python_variable: str = ""  # of an environment that is made elsewhere
    folder_variable: str = ""  # of a folder that the client needs
    is_node: bool = False
    on_small_model: bool = False
    prepare: Callable[[Path], None] = lambda work: None


def write_expected_loglikelihoods(work: Path) -> None:
    """What LLM says of lm-eval's samples: the continuation's logprobs, and whether each is the likeliest token."""
    from evenflow import LLM, SamplingParams
    from tests.clients import lm_eval_data

    llm = LLM("default", max_model_len=512, kv_cache_memory=64 << 20)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    expected: dict[str, list[tuple[float, bool]]] = {}
    for sample in lm_eval_data.SAMPLES:
        question = str(sample["question"])
        num_context = len(llm.tokenizer.encode(question, add_special_tokens=False))
        ids = [llm.tokenizer.encode(question + choice, add_special_tokens=False) for choice in sample["choices"]]
        expected[question] = []
        for output in llm.generate(ids, sampling):
            assert output.prompt_logprobs is not None
            rows = output.prompt_logprobs[num_context - 1 :]  # the first token of a prompt has none
            is_greedy = all(row.chosen.token_id == row.top[0].token_id for row in rows)
            expected[question].append((sum(row.chosen.logprob for row in rows), is_greedy))
    (work / "expected.json").write_text(json.dumps(expected))


def write_llama_cpp_model(work: Path) -> None:
    """The model of llama.cpp's tests."""
    import pytest

    from tests.models import stories260k_folder

    try:
        stories260k_folder(work / "model")
    except pytest.skip.Exception as error:
        raise Unavailable(str(error)) from None


CLIENTS = {
    "openai-python": Client("openai_python.py", ("openai",)),
    "openai-node": Client("openai_node.mjs", ("openai",), is_node=True),
    "anthropic-python": Client("anthropic_python.py", ("anthropic",)),
    "ollama-python": Client("ollama_python.py", ("ollama",)),
    "llm": Client("llm_command.py", ("llm",)),
    "litellm": Client("litellm_sdk.py", ("litellm",)),
    "lm-eval": Client(
        "lm_eval_tasks.py", ("lm_eval[api]", "transformers", "torch"), prepare=write_expected_loglikelihoods
    ),
    "guidellm": Client("guidellm_run.py", ("guidellm", "torch")),
    "vllm-bench": Client("vllm_bench.py", python_variable="EVENFLOW_VLLM_PYTHON"),
    "llama-cpp": Client(
        "llama_cpp.py",
        ("pytest", "requests", "openai", "aiohttp", "numpy", "prometheus-client"),
        folder_variable="EVENFLOW_LLAMA_CPP",
        prepare=write_llama_cpp_model,
    ),
    "schemathesis": Client("schemathesis_run.py", ("schemathesis",), on_small_model=True),
}


# ---- environments ----


def interpreter(name: str, client: Client, environments: Path) -> tuple[Path, Path]:
    """The program that runs the client's script, and the folder of its packages."""
    if client.python_variable:
        chosen = os.environ.get(client.python_variable)
        if not chosen:
            raise Unavailable(f"{client.python_variable} names no interpreter")
        return Path(chosen), Path(chosen).parent
    folder = environments / name
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != repr(client.packages):
        shutil.rmtree(folder, ignore_errors=True)
        _install(client, folder)
        installed.write_text(repr(client.packages))
    return (Path(_node()) if client.is_node else folder / "bin" / "python"), folder


def _node() -> str:
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        raise Unavailable("node and npm are not installed")
    return found


def _install(client: Client, folder: Path) -> None:
    if client.is_node:
        _node()
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *client.packages]
    else:
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command = [*pip, "--constraint", str(_CONSTRAINTS), *client.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(client.packages)} cannot be installed: {done.stderr.strip()[-500:]}")


# ---- the server ----


@cache
def tokenizer_folder() -> Path:
    """The default model's tokenizer as clients that count tokens want it."""
    from transformers import AutoTokenizer

    from evenflow.model.hub.default_model import default_model_path

    path = default_model_path()
    folder = Path(tempfile.mkdtemp(prefix="evenflow-tokenizer-"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def running_server(model: str, log: Path) -> Iterator[str]:
    """`evenflow serve` as a user starts it; its address."""
    process, address = start_server([COMMAND, "serve", "--model", model, "--served-model-name", MODEL_NAME], log)
    try:
        yield address
    finally:
        stop_server(process)


def what_is_left(address: str) -> list[str]:
    """What the server still has of requests though their clients are gone; nothing after a moment, if all is well."""
    end = time.monotonic() + 10
    while True:
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")
        left = [line for line in lines if line.startswith(gauges) and float(line.split()[-1])]
        left += [line for line in lines if line.startswith("evenflow:engine_restarts_total{") and line[-3:] != "0.0"]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


# ---- runs ----


def run_client(name: str, client: Client, address: str, environments: Path, work: Path) -> bool:
    if client.folder_variable and not os.environ.get(client.folder_variable):
        raise Unavailable(f"{client.folder_variable} names no folder")
    program, packages = interpreter(name, client, environments)
    client.prepare(work)
    environment = {
        **os.environ,
        "EVENFLOW_ADDRESS": address,
        "EVENFLOW_COMMAND": COMMAND,
        "EVENFLOW_MODEL_NAME": MODEL_NAME,
        "EVENFLOW_TOKENIZER": str(tokenizer_folder()),
        "EVENFLOW_WORK": str(work),
        "EVENFLOW_PACKAGES": str(packages),
    }
    done = subprocess.run(
        [str(program), str(HERE / client.script)], env=environment, cwd=work, timeout=_CLIENT_S, check=False
    )
    left = what_is_left(address)
    print("\n".join(f"  FAILED left behind: {line}" for line in left) or "  ok     nothing is left of its requests")
    return done.returncode == 0 and not left


def run_all(names: Sequence[str], environments: Path) -> dict[str, str]:
    """The outcome of each."""
    from tests.models import tiny_llama

    outcomes: dict[str, str] = {}
    for is_small in (False, True):
        chosen = [name for name in names if CLIENTS[name].on_small_model == is_small]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="evenflow-clients-") as folder:
            model = str(tiny_llama()) if is_small else "default"
            with running_server(model, Path(folder, "server.log")) as address:
                for name in chosen:
                    print(f"{name}:", flush=True)
                    work = Path(folder, name)
                    work.mkdir()
                    try:
                        well = run_client(name, CLIENTS[name], address, environments, work)
                        outcomes[name] = "passed" if well else "failed"
                    except Unavailable as error:
                        outcomes[name] = f"not run: {error}"
            log = Path(folder, "server.log").read_text()
            if "Traceback" in log or "ERROR" in log:
                outcomes["the server's log"] = f"failed:\n{log[-4000:]}"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--environments", type=Path, default=_ENVIRONMENTS, help="where clients are installed")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    outcomes = run_all(options.names or list(CLIENTS), options.environments)
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")
    sys.exit(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
