"""The settings of an engine, validated at construction. Names and meanings follow vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypedDict

from evenflow.core.policies import DEFAULT_BUDGET, DEFAULT_POLICY, WHOLE_PROMPTS, PolicySpec
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, check_classes, check_weights
from evenflow.errors import InvalidConfig

GIB = 1 << 30
WeightsName = Literal["auto", "float32", "int4", "bfloat16", "float16"]
WEIGHTS_BY_DEVICE: dict[str, tuple[WeightsName, ...]] = {  # the default first
    "cpu": ("float32", "int4"),
    "cuda": ("bfloat16", "float16", "float32"),
}
DEVICES = tuple(WEIGHTS_BY_DEVICE)
KvFormat = Literal["plain", "lossless", "int8"]


class EngineSettings(TypedDict, total=False):
    """The fields of EngineConfig but the model, for type checkers: the keywords of LLM and AsyncLLM."""

    policy: str | PolicySpec | None
    tbt_target: float | str | None
    enable_chunked_prefill: bool | None
    max_num_batched_tokens: int | None
    max_num_seqs: int
    max_model_len: int | None
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    enable_prefix_caching: bool
    kv_offload_memory: int
    kv_offload_format: KvFormat | None
    cache_dir: str | None
    cache_dir_size: int
    long_prefill_token_threshold: int
    device: Literal["cpu", "cuda"] | None
    weights: WeightsName
    load_format: Literal["auto", "dummy"]
    deterministic: bool
    threads: int | None
    max_steps_in_flight: int | None
    block_size: int
    step_timeout: float
    seed: int | None
    classes: Classes
    tenant_weights: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine's model and limits."""

    model: str = "default"  # a Hugging Face folder, a .gguf file, or "default"
    policy: str | PolicySpec | None = None  # text is parsed at construction; None: a target, or the given budget
    tbt_target: float | str | None = None  # seconds between a stream's tokens, or 50ms; alone it means policy `target`
    enable_chunked_prefill: bool | None = None  # None: decided and logged; False: policy `unchunked`
    max_num_batched_tokens: int | None = None  # alone it means policy `fixed`; None: the policy's own
    max_num_seqs: int = 256  # maximum running requests
    max_model_len: int | None = None  # None: the model's context
    gpu_memory_utilization: float = 0.9  # of the GPU's memory, or of available memory on a CPU
    kv_cache_memory: int | None = None  # bytes; None: by utilization, on a CPU at most 4 GiB
    enable_prefix_caching: bool = True  # reuse the KV of equal prefixes
    kv_offload_memory: int = 0  # bytes of host memory for prefixes evicted from the KV cache; 0: none
    kv_offload_format: KvFormat | None = None  # int8 has a small error; None: lossless on a CPU, plain on a GPU
    cache_dir: str | None = None  # a folder that keeps the prefix cache over restarts
    cache_dir_size: int = 4 * GIB  # maximum bytes in it
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt in a step; 0: no limit
    device: Literal["cpu", "cuda"] | None = None  # None: a GPU if there is one
    weights: WeightsName = "auto"  # float32, int4 on a CPU, bfloat16 or float16 on a GPU; auto: float32 or bfloat16
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, needs only config.json
    deterministic: bool = False  # the same bits for any chunks, batch and reused prefix; slower
    threads: int | None = None  # None: torch's default
    max_steps_in_flight: int | None = None  # planned steps not yet finished; None: 1, on a GPU 2
    block_size: int = 16  # tokens of a KV block
    step_timeout: float = 60.0  # seconds; a step that takes longer, and far longer than predicted, counts as hung
    seed: int | None = None  # for requests without one; None: random for each
    classes: Classes = DEFAULT_CLASSES  # of service, each with its urgency, targets and share: see docs/shares.md
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of shares; unlisted tenants have 1

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_model_len", "threads", "kv_cache_memory", "max_steps_in_flight"):
            if getattr(self, name) is not None:
                self._require_at_least(name, 1)
        for name in ("max_num_seqs", "block_size"):
            self._require_at_least(name, 1)
        for name in ("long_prefill_token_threshold", "kv_offload_memory", "cache_dir_size"):
            self._require_at_least(name, 0)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfig(
                f"Got gpu_memory_utilization={self.gpu_memory_utilization!r} but expected a number in (0, 1]."
            )
        if not self.step_timeout > 0:
            raise InvalidConfig(f"Got step_timeout={self.step_timeout!r} but expected seconds above 0.")
        self._check_choices()
        self._check_offload()
        object.__setattr__(self, "classes", check_classes(self.classes))
        object.__setattr__(self, "tenant_weights", check_weights(self.tenant_weights))
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", PolicySpec.parse(self.policy))
        if self.tbt_target is not None:
            self._adopt_target(self.tbt_target)
        self._check_chunking()

    @property
    def spec(self) -> PolicySpec | None:
        assert not isinstance(self.policy, str)  # parsed at construction
        return self.policy

    @property
    def chosen_policy(self) -> PolicySpec | None:
        """The policy named by these settings in any form; None: the engine chooses a target."""
        if self.enable_chunked_prefill is False:
            return WHOLE_PROMPTS
        if self.spec is None and self.max_num_batched_tokens is not None:
            return PolicySpec("fixed", self.max_num_batched_tokens).bounded(self.max_num_batched_tokens)
        return self.spec

    def _require_at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidConfig(f"Got {name}={value!r} but expected a whole number >= {low}.")

    def _check_choices(self) -> None:
        choices = {
            "device": (None, *DEVICES),
            "weights": ("auto", *dict.fromkeys(chain(*WEIGHTS_BY_DEVICE.values()))),
            "load_format": ("auto", "dummy"),
            "kv_offload_format": (None, "plain", "lossless", "int8"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                names = " or ".join(repr(one) for one in allowed if one is not None)
                raise InvalidConfig(f"Got {name}={value!r} but expected {names}.")
        if self.device is not None and self.weights not in ("auto", *WEIGHTS_BY_DEVICE[self.device]):
            names = " or ".join(map(repr, WEIGHTS_BY_DEVICE[self.device]))
            raise InvalidConfig(f"Got weights={self.weights!r} but expected {names} with device={self.device!r}.")

    def _check_offload(self) -> None:
        for name in ("kv_offload_memory", "cache_dir"):
            if getattr(self, name) and not self.enable_prefix_caching:
                got = f"Got {name}={getattr(self, name)!r} with enable_prefix_caching=False"
                raise InvalidConfig(f"{got} but only cached prefixes are moved out: give one of them.")

    def _adopt_target(self, target: float | str) -> None:
        """Merge the two forms of a target: from here on only the policy counts."""
        policy = PolicySpec.for_target(target)
        if self.spec is not None and self.spec.target != policy.target:
            raise InvalidConfig(f"Got tbt_target={target} and policy='{self.spec}': two policies; give one of them.")
        object.__setattr__(self, "policy", self.policy or policy)

    def _check_chunking(self) -> None:
        spec = self.spec
        unchunked = spec is not None and not spec.cuts_prompts
        if self.enable_chunked_prefill is False and spec is not None and not unchunked:
            raise InvalidConfig(f"Got enable_chunked_prefill=False but policy='{spec}' cuts prompts into chunks.")
        if self.enable_chunked_prefill is True and unchunked:
            raise InvalidConfig(f"Got enable_chunked_prefill=True but policy='{spec}' never cuts a prompt.")
        if self.long_prefill_token_threshold and (unchunked or self.enable_chunked_prefill is False):
            raise InvalidConfig(
                f"Got long_prefill_token_threshold={self.long_prefill_token_threshold} but no prompt is cut unchunked."
            )
        if spec is not None and spec.names_budget and self.max_num_batched_tokens not in (None, spec.budget):
            raise InvalidConfig(
                f"Got policy='{spec}' and max_num_batched_tokens={self.max_num_batched_tokens}: "
                "two different budgets; give one of them."
            )

    def with_policy(self, policy: str | PolicySpec) -> EngineConfig:
        """The settings with another policy, which may have its own budget."""
        spec = PolicySpec.parse(policy) if isinstance(policy, str) else policy
        return replace(
            self,
            policy=spec,
            tbt_target=None,
            enable_chunked_prefill=None,
            max_num_batched_tokens=None,
            long_prefill_token_threshold=self.long_prefill_token_threshold if spec.cuts_prompts else 0,
        )

    def resolve_policy(self, max_model_len: int) -> PolicySpec:
        """The policy with its budget, for a model with this maximum prompt length.

        If no setting names one: the fallback without a target.
        """
        spec = self.chosen_policy or DEFAULT_POLICY
        if not spec.cuts_prompts:
            budget = self.max_num_batched_tokens or max(DEFAULT_BUDGET, max_model_len)
            if budget < max_model_len:
                raise InvalidConfig(
                    f"Got max_num_batched_tokens={budget} without chunked prefill, but a prompt of up to max_model_len="
                    f"{max_model_len} tokens must fit in one step: raise the budget, lower max_model_len, or chunk."
                )
            spec = replace(spec, max_step_tokens=budget)
        return spec.bounded(self.max_num_batched_tokens)
