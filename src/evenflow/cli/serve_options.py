"""Options of `evenflow serve`, and the settings of the server that they stand for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument

from evenflow.cli.options import RecordTarget, duration_option, option, parse_size
from evenflow.cli.settings import read_settings
from evenflow.config import EngineConfig
from evenflow.errors import InvalidInput
from evenflow.shares_file import Shares, read_shares

if TYPE_CHECKING:
    from evenflow.server.serving import ServerSettings

_KEY_VARIABLE = "EVENFLOW_API_KEY"
_ADMIN_KEY_VARIABLE = "EVENFLOW_ADMIN_API_KEY"
_METRICS_KEY_VARIABLE = "EVENFLOW_METRICS_API_KEY"

EngineFlags = Annotated[
    list[str] | None, Argument(metavar="[-- ENGINE_FLAGS]", help="Flags to pass on to vLLM or SGLang.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The engine, where to listen, who may send requests and how many, and where steps and traces go."""

    config: Path | None = option(
        "TOML file of options by name, as port = 8080; evenflow config prints one.",
        metavar="PATH",
        is_eager=True,
        callback=read_settings,
    )
    engine: Literal["evenflow", "vllm", "sglang"] = option(
        "evenflow's own engine, or vLLM or SGLang steered by evenflow: docs/vllm.md, docs/sglang.md.",
        default="evenflow",
    )
    vllm_python: str | None = option(
        "Python with vLLM.", metavar="PATH", show_default="$EVENFLOW_VLLM_PYTHON, or this one"
    )
    sglang_python: str | None = option(
        "Python with SGLang.", metavar="PATH", show_default="$EVENFLOW_SGLANG_PYTHON, or this one"
    )
    warm_up: bool = option(
        "With another engine: run prompts of many sizes before it is ready, at most 10 s.",
        "--warm-up/--no-warm-up",
        default=True,
    )
    tensor_parallel_size: int | None = option("With another engine: devices that each layer is split over.", min=1)
    pipeline_parallel_size: int | None = option("With another engine: stages that the layers are split into.", min=1)
    data_parallel_size: int | None = option("With another engine: copies of the model that share requests.", min=1)
    host: str = option("Address to listen on; 0.0.0.0 is every address of this machine.", default="127.0.0.1")
    port: int = option("Port to listen on; 0 picks a free one.", default=8000)
    served_model_name: list[str] | None = option("Model name in requests, not --model; repeatable.", metavar="NAME")
    other_model: list[str] | None = option(
        "Another model, loaded in place of --model when a request names it; repeatable.", metavar="[NAME=]MODEL"
    )
    api_key: list[str] | None = option(f"API key to require; repeatable. Safer: ${_KEY_VARIABLE}.", metavar="KEY")
    api_key_file: Path | None = option("File of API keys, one per line: KEY, or KEY name=NAME.", metavar="PATH")
    admin_api_key: list[str] | None = option(
        f"API key that may also change the target and see all tenants; repeatable. Safer: ${_ADMIN_KEY_VARIABLE}.",
        metavar="KEY",
    )
    admin_api_key_file: Path | None = option("File of admin API keys, one per line.", metavar="PATH")
    metrics_api_key: list[str] | None = option(
        f"API key that may only read /metrics; repeatable. Safer: ${_METRICS_KEY_VARIABLE}.", metavar="KEY"
    )
    metrics_api_key_file: Path | None = option("File of API keys that may only read /metrics.", metavar="PATH")
    allow_host: list[str] | None = option(
        "Name of this server that requests may use when no key is set; repeatable; *: any.", metavar="NAME"
    )
    allow_origin: list[str] | None = option("Site whose pages may send requests; repeatable; *: any.", metavar="ORIGIN")
    allow_special_tokens: bool = option(
        "Let special tokens such as <|im_end|> in the text of chats act as such. Trusted clients only.",
        "--allow-special-tokens",
        default=False,
    )
    pooling: Literal["last", "mean"] | None = option(
        "Serve /v1/embeddings: the vector of a text's last token, or the mean of all, as the model was trained."
    )
    max_body_size: int = option("Maximum size of a body.", default="8MiB", parser=parse_size, metavar="SIZE")
    max_response_size: int | None = option(
        "Maximum size that a response may get.", parser=parse_size, metavar="SIZE", show_default="64MiB"
    )
    max_prompt_tokens: int = option("Maximum tokens of a prompt; 0: the model's context.", default=0)
    max_n: int = option("Maximum choices of one request: n times its prompts.", default=128)
    max_waiting: int = option("Maximum requests in the queue (each choice counts); more are refused.", default=1024)
    max_open_tokens: int = option(
        "Maximum tokens of requests that run or wait, prompts and most output; 0: no limit.", default=0
    )
    max_tenant_requests: int = option("Maximum requests of one tenant that run or wait; 0: no limit.", default=0)
    shares: Path | None = option("File of classes and tenants, with their shares: docs/shares.md.", metavar="PATH")
    drain_time: float = duration_option("Time for open requests to finish after SIGTERM.", default="30s")
    otlp_endpoint: str | None = option("OTLP collector to send traces to, over HTTP.", metavar="URL")
    request_log: Path | None = option(
        "Append JSON lines that account for each request, without its text: evenflow audit.", metavar="PATH"
    )
    log_format: Literal["text", "json"] = option("Form of the log's lines.", default="text")
    access_log: bool = option("Log a line for every HTTP request.", "--access-log", default=False)
    step_timeout: float | None = duration_option(
        "A step that takes longer, and far longer than predicted, hangs: the engine is restarted.", show_default="60s"
    )
    record: RecordTarget = None

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Those that were given, by their names in vLLM."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    def check_own_engine(self, engine_flags: Sequence[str]) -> None:
        """Refuse what only another engine can do."""
        for is_given, name, engines in (
            (self.vllm_python, "--vllm-python", "vllm"),
            (self.sglang_python, "--sglang-python", "sglang"),
            (not self.warm_up, "--no-warm-up", "vllm or sglang"),
            (engine_flags, " ".join(engine_flags), "vllm or sglang"),
        ):
            if is_given:
                raise InvalidInput(f"Got {name}, but the engine is evenflow's own: add --engine {engines}.")
        for name, size in self.parallel_sizes.items():
            if size > 1:
                got = f"Got --{name.replace('_', '-')} {size}"
                raise InvalidInput(f"{got} but evenflow's own engine runs on one device: use --engine vllm.")

    def other_configs(self, config: EngineConfig) -> dict[str, EngineConfig]:
        """The engines of the other models, by the name of each in requests."""
        names, found = set(self.served_model_name or (config.model,)), dict[str, EngineConfig]()
        for given in self.other_model or ():
            name, separator, model = given.partition("=")
            model = model if separator else name
            if not name or not model:
                raise InvalidInput(f"Got --other-model {given!r} but expected MODEL or NAME=MODEL.")
            if name in names or name in found:
                raise InvalidInput(
                    f"Got --other-model {given!r} but a model of that name is served: NAME=MODEL renames."
                )
            found[name] = replace(config, model=model)
        return found

    def read_shares(self) -> Shares:
        return Shares() if self.shares is None else read_shares(self.shares)

    def server_settings(self, config: EngineConfig, shares: Shares) -> ServerSettings:
        """Checks the options. Needs the server's packages."""
        from evenflow.server.gate import ServerLimits
        from evenflow.server.serving import ServerSettings

        limits = {field.name: getattr(self, field.name) for field in fields(ServerLimits)}
        return ServerSettings(
            model_names=tuple(self.served_model_name or (config.model,)),
            host=self.host,
            port=self.port,
            api_keys=_given_keys(self.api_key, self.api_key_file, _KEY_VARIABLE),
            metrics_api_keys=_given_keys(self.metrics_api_key, self.metrics_api_key_file, _METRICS_KEY_VARIABLE),
            admin_api_keys=_given_keys(self.admin_api_key, self.admin_api_key_file, _ADMIN_KEY_VARIABLE),
            allowed_hosts=self.allow_host or (),
            allowed_origins=self.allow_origin or (),
            allows_special_tokens=self.allow_special_tokens,
            limits=ServerLimits(**{name: value for name, value in limits.items() if value is not None}),
            drain_s=self.drain_time,
            otlp_endpoint=self.otlp_endpoint,
            request_log=self.request_log,
            shares=shares,
            pooling=self.pooling,
            engine=repr(config),
            access_log=self.access_log,
            reread=lambda: self.server_settings(config, self.read_shares()),
        )


def _given_keys(keys: Sequence[str] | None, file: Path | None, variable: str) -> list[str]:
    from evenflow.server.access import read_key_file

    found = [*(keys or ()), *(read_key_file(file) if file else ()), *filter(None, [os.environ.get(variable)])]
    return list(dict.fromkeys(found))
