"""Asks a vLLM, in its own interpreter, whether it takes settings: by constructing its configuration.

Must not know: how settings are chosen. Imports no vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenflow.advisor.memory import ModelShape
from evenflow.advisor.vllm_flags import PACKAGES, EngineArgs, command_flags
from evenflow.errors import InvalidInput
from evenflow.vllm import check_config

_FIND_VERSION = f"""
import importlib.metadata
for package in {PACKAGES!r}:
    try:
        print(importlib.metadata.version(package))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""
_TIMEOUT_S = 600  # importing vLLM from a cold disk takes minutes


@dataclass(frozen=True, slots=True)
class Checked:
    """vLLM's answer: the scheduler settings that it made of the arguments, or why it refuses them, or none."""

    version: str
    args: EngineArgs
    refusal: str | None = None
    scheduler: dict[str, Any] | None = None

    @property
    def accepted(self) -> bool | None:
        """None where it was not asked."""
        return None if self.refusal is None and self.scheduler is None else self.refusal is None


def version_in(python: str) -> str:
    """The version of the vLLM in an interpreter's environment."""
    try:
        done = subprocess.run([python, "-c", _FIND_VERSION], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InvalidInput(f"Got --vllm-python {python!r} but it cannot be run: {error.strerror}.") from error
    if not done.stdout.strip():
        raise InvalidInput(f"Got --vllm-python {python!r} but there is no vLLM in its environment: pip install vllm")
    return done.stdout.strip()


def check(python: str, model: Path, args: EngineArgs) -> Checked:
    """Have the vLLM of this interpreter construct its configuration for a local model, without loading it."""
    answer = _ask(python, model, args)
    if unknown := answer.get("unknown"):
        # A version that the table does not know yet: its own list of settings decides.
        notes = dict.fromkeys(unknown, f"left out: vLLM {answer['version']} does not have it")
        kept = {name: value for name, value in args.items() if name not in notes}
        args = EngineArgs(kept, args.notes | notes)
        answer = _ask(python, model, args)
    version = answer.get("version") or version_in(python)
    return Checked(version, args, answer.get("refused"), answer.get("scheduler"))


def write_model_config(folder: Path, shape: ModelShape) -> None:
    """A model for vLLM to configure itself for, where none is at hand: it needs the sizes only."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _ask(python: str, model: Path, args: EngineArgs) -> dict[str, Any]:
    asked = {"model": str(model.absolute()), "flags": command_flags(args), "settings": dict(args)}
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # Elsewhere, so that no file of the current folder stands in for a module of vLLM's.
    with tempfile.TemporaryDirectory(prefix="evenflow-") as elsewhere:
        try:
            done = subprocess.run(
                [python, "-c", Path(check_config.__file__).read_text(encoding="utf-8")],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                cwd=elsewhere,
                env=environment,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"it gave no answer within {_TIMEOUT_S} s"}
    for line in done.stdout.splitlines():
        if line.startswith(check_config.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(check_config.MARK))
            return answer
    last_words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"refused": f"it could not be asked: {last_words}"}
