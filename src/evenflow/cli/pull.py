"""`evenflow pull`: gets a model onto this machine, from a model hub, a URL or a path, and gives it a name."""

from __future__ import annotations

import re
import sys
from typing import Annotated

from typer import Argument, BadParameter, Option

from evenflow.cli.models import model_figures
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import text_console, write_json
from evenflow.model.formats.inspection import describe_model
from evenflow.model.hub.progress_bar import format_bytes


def _parse_sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise BadParameter(f"Got {text!r} but expected 64 hexadecimal digits.")
    return text.lower()


def pull(
    source: Annotated[
        str,
        Argument(metavar="NAME|URL|PATH", help="ORG/NAME[@REVISION][:FILE.gguf] on a model hub, a URL, or a path."),
    ],
    *,
    name: Annotated[
        str | None, Option(metavar="NAME", help="Name for --model, of a URL or path.", show_default="the file's name")
    ] = None,
    sha256: Annotated[
        str | None, Option(parser=_parse_sha256, metavar="HEX", help="Checksum that the file at a URL must have.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Fetch a model, so that --model finds it by its name.

    Files are checked. After an interruption, the same command continues where it stopped. A path stays where it is, and
    gets a name. docs/deploy.md says more: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, proxies.
    """
    from evenflow.model.hub.pulling import pull as pull_model  # slow: it imports an HTTP client

    pulled = pull_model(source, name=name, sha256=sha256, progress=sys.stderr.isatty())
    facts = describe_model(pulled.path)
    console = text_console(json)
    size, architecture = format_bytes(facts.num_bytes), facts.architecture or "unknown architecture"
    console.print(f"{pulled.name}: {facts.format}, {architecture}, {size}, {pulled.path}")
    if facts.why_not is None:
        console.print(f"Run it with: evenflow serve --model {pulled.name}")
    else:
        console.print(f"evenflow's own engine cannot run it: {facts.why_not}")
    write_json(json, model_figures(pulled, facts))
