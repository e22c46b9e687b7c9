"""Prints what a vLLM wheel requires, less what only images, sound and video need: that has no build for every CPU."""

from __future__ import annotations

import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def main(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    for requirement in requirements:
        if "extra ==" not in requirement and not requirement.startswith(LEFT_OUT):
            print(requirement.replace("torch==2.13.0+cpu", "torch==2.13.0"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
