"""A script for vLLM's own interpreter: checks flags by constructing vLLM's configuration.

Reads {"model", "flags", "settings"} as JSON on standard input. Imports no evenflow, which need not be installed there.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

MARK = "evenflow-checked:"  # starts the line with the result: vLLM prints others


def check(model: str, flags: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.11.1
        from vllm.utils import FlexibleArgumentParser

    if unknown := sorted(set(settings) - {field.name for field in dataclasses.fields(AsyncEngineArgs)}):
        return {"version": vllm.__version__, "unknown": unknown}
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    by_flags = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, "--skip-tokenizer-init", *flags]))
    by_keywords = AsyncEngineArgs(model=model, skip_tokenizer_init=True, **settings)
    if any(getattr(by_flags, name) != getattr(by_keywords, name) for name in settings):
        raise ValueError("the flags and the keyword arguments mean different settings")
    scheduler = by_flags.create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config
    shown = ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
    return {"version": vllm.__version__, "scheduler": {name: getattr(scheduler, name) for name in shown}}


def main() -> None:
    try:
        reply = check(**json.load(sys.stdin))
    except SystemExit:  # the parser refused the flags and printed why on standard error
        reply = {"refused": "its command line does not take these flags"}
    except Exception as error:  # any error is vLLM's refusal
        reply = {"refused": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
