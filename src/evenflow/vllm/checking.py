"""Checks settings with vLLM itself, which constructs its configuration from them in its own interpreter.

Imports no vLLM.
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
from evenflow.advisor.vllm_flags import EngineArgs, command_flags
from evenflow.vllm import check_config
from evenflow.vllm.launch import VLLM

_TIMEOUT_S = 600  # importing vLLM from a cold disk takes minutes
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Checked:
    """The scheduler settings that vLLM made of the arguments, or why it refused them; neither if it was not asked."""

    version: str
    args: EngineArgs
    refusal: str | None = None
    scheduler: dict[str, Any] | None = None

    @property
    def accepted(self) -> bool | None:
        """None: vLLM was not asked."""
        return None if self.refusal is None and self.scheduler is None else self.refusal is None


def check(python: str, model: Path, args: EngineArgs) -> Checked:
    """Have this interpreter's vLLM construct its configuration for a local model, without loading it."""
    reply = _run_check(python, model, args)
    if unknown := reply.get("unknown"):  # a version that our table does not have: its own list of settings decides
        notes = dict.fromkeys(unknown, f"left out: vLLM {reply['version']} does not have it")
        kept = {name: value for name, value in args.items() if name not in notes}
        args = EngineArgs(kept, args.notes | notes)
        reply = _run_check(python, model, args)
    return Checked(reply.get("version") or VLLM.version_in(python), args, reply.get("refused"), reply.get("scheduler"))


def write_model_config(folder: Path, shape: ModelShape) -> None:
    """Write a model without weights: vLLM's configuration needs only the sizes."""
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


def _run_check(python: str, model: Path, args: EngineArgs) -> dict[str, Any]:
    content = {"model": str(model.absolute()), "flags": command_flags(args), "settings": dict(args)}
    # An empty folder: no file of the current one can shadow a module of vLLM's.
    with tempfile.TemporaryDirectory(prefix="evenflow-") as folder:
        try:
            done = subprocess.run(
                [python, "-c", Path(check_config.__file__).read_text(encoding="utf-8")],
                input=json.dumps(content),
                capture_output=True,
                text=True,
                cwd=folder,
                env=os.environ | _ENVIRONMENT,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"it did not reply within {_TIMEOUT_S} s"}
    for line in done.stdout.splitlines():
        if line.startswith(check_config.MARK):
            return dict(json.loads(line.removeprefix(check_config.MARK)))
    last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"refused": f"it could not be asked: {last_line}"}
