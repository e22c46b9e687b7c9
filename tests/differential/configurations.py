"""Random settings of an engine, and a load for each. A seed and a number draw the same configuration every time.

Each part is drawn from numbers of its own, so that leaving one out changes no other: that is how a finding is shrunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from evenflow import Grammar, SamplingParams
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.executors.faulty import FAULT_KINDS, MOMENTS, Fault

# Name: an architecture of transformers, and what differs from `reference_model`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral, window": ("MistralForCausalLM", {"sliding_window": 21}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
}
VOCAB_SIZE, MAX_POSITION, EOS = 512, 256, 2
_FIRST_ORDINARY = 5  # token ids before it are special
# What can be left out of a configuration.
PARTS = (
    "aborts",
    "caching",
    "classes",
    "deadlines",
    "depth",
    "deterministic",
    "disk",
    "embeddings",
    "faults",
    "follow-ups",
    "grammars",
    "live changes",
    "logprobs",
    "long prefill",
    "paged",
    "restart",
    "rules",
    "sampling",
    "shedding",
    "small memory",
    "stops",
    "targets",
    "tenants",
    "tier",
)
_POLICIES = ("unchunked", "load", "adaptive", "prompt-length", "adaptive:10ms", "fixed:2048")
_GRAMMARS = (
    Grammar.choice(["yes", "no", "perhaps"]),
    Grammar.regex(r"[a-f]{2,6}(-[0-9]{1,3}){0,2}"),
    Grammar.regex(r"([0-9]{2},){3}[0-9]"),
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load."""

    number: int
    at_step: int  # when it arrives, at the earliest
    prompt: tuple[int, ...]
    follows: int | None  # comes after this one's prompt and answer, as the next turn of a chat does
    sampling: SamplingParams
    phase: int = 0  # 1: after the engine was started again
    abort_after: int | None = None  # steps
    tenant: str = ""
    cache_salt: str | None = None
    service_class: str | None = None

    @property
    def id(self) -> str:
        return f"ask-{self.number}"

    def describe(self) -> str:
        """What differs from the defaults."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("prompt", "sampling")}
        sampling = {one.name: getattr(self.sampling, one.name) for one in fields(self.sampling)}
        shown = own | {name: value for name, value in sampling.items() if value != getattr(SamplingParams(), name)}
        words = [f"{name}={value!r}" for name, value in shown.items() if value or name in sampling]
        return f"prompt of {len(self.prompt)}, {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Configuration:
    seed: int
    number: int
    without: frozenset[str]  # parts
    only: tuple[int, ...] | None  # numbers of asks; None: all
    model: str
    is_paged: bool
    num_blocks: int
    policy: str
    changes: tuple[tuple[int, str], ...]  # before this step, to this policy; "none" ends a target
    settings: dict[str, Any] = field(default_factory=dict)
    has_disk: bool = False
    num_phases: int = 1
    move_seconds: float = 0.0  # of a block, to the tier and back
    move_steps: int = 0  # for which moves are reported late
    sheds: bool = False
    faults: tuple[Fault, ...] = ()
    asks: tuple[Ask, ...] = ()

    def random(self, part: object) -> Random:
        return Random(f"{self.seed}/{self.number}/{part}")

    @property
    def command(self) -> str:
        """One line that repeats it."""
        words = ["python -m tests.differential", f"--seed {self.seed}", f"--start {self.number}", "--count 1"]
        if self.without:
            words.append(f"--without '{','.join(sorted(self.without))}'")
        if self.only is not None:
            words.append(f"--only {','.join(map(str, self.only))}")
        return " ".join(words)

    def describe(self) -> str:
        shown = {name: value for name, value in self.settings.items() if name != "threads"}
        parts = [
            f"{self.model}, {'paged' if self.is_paged else 'contiguous'}, {self.num_blocks} blocks, {self.policy}",
            f"changes {self.changes}" * bool(self.changes),
            f"settings {shown}",
            f"faults {self.faults}" * bool(self.faults),
            f"disk, {self.num_phases} phases" * self.has_disk,
            *(ask.describe() for ask in self.asks),
        ]
        return "\n  ".join(filter(None, parts))


def draw(
    seed: int, number: int, without: frozenset[str] = frozenset(), only: Sequence[int] | None = None
) -> Configuration:
    """`without`: parts that are left out; `only`: the numbers of the asks that are left."""
    return _Drawing(seed, number, without).configuration(None if only is None else tuple(only))


class _Drawing:
    def __init__(self, seed: int, number: int, without: frozenset[str]) -> None:
        if unknown := without - set(PARTS):
            raise ValueError(f"Got parts {sorted(unknown)} but expected some of {', '.join(PARTS)}.")
        self._seed, self._number, self._without = seed, number, without

    def _random(self, part: str) -> Random:
        return Random(f"{self._seed}/{self._number}/{part}")

    def _has(self, part: str, chance: float) -> bool:
        return part not in self._without and self._random(f"has {part}").random() < chance

    def configuration(self, only: tuple[int, ...] | None) -> Configuration:
        rng = self._random("settings")
        block_size = rng.choice((4, 8, 16, 16))
        capacity = block_size * (-(-self._capacity() // block_size))
        is_paged = self._has("paged", 0.4)
        self._longest = min(MAX_POSITION, capacity, rng.choice((64, 128, MAX_POSITION)))
        caches = not self._has("caching", 0.2)
        has_disk = caches and self._has("disk", 0.2)
        has_tier = caches and (has_disk or self._has("tier", 0.3))
        self._has_targets = self._has("targets", 0.5)
        policy = self._policy(self._random("policy"))
        changes = self._changes(self._random("changes")) if self._has("live changes", 0.3) else ()
        model = rng.choice(tuple(MODELS))
        settings: dict[str, Any] = {
            "threads": 1,
            "seed": self._number,
            "block_size": block_size,
            "max_num_seqs": rng.choice((1, 2, 3, 4, 8, 16)),
            "max_model_len": self._longest,
            "enable_prefix_caching": caches,
            "max_steps_in_flight": rng.choice((2, 3)) if self._has("depth", 0.5) else 1,
            "deterministic": not is_paged and self._has("deterministic", 0.1),
        }
        cuts = "unchunked" not in (policy, *(to for _, to in changes))
        if cuts and self._has("long prefill", 0.2):
            settings["long_prefill_token_threshold"] = rng.choice((1, 7, 32))
        if self._has("classes", 0.4):
            urgent, standard, batch = DEFAULT_CLASSES
            urgent = replace(urgent, ttft_target=rng.choice((None, 0.05, 1.0)), refuse_late=rng.random() < 0.3)
            settings["classes"] = (urgent, standard, replace(batch, reserve=rng.choice((0.0, 0.05, 0.3))))
        if self._has("tenants", 0.5):
            settings["tenant_weights"] = {"t0": rng.choice((0.3, 2.0))}
        if has_tier:
            kv_heads = MODELS[model][1].get("num_key_value_heads", 2)
            bytes_of_block = block_size * kv_bytes_per_token(kv_heads)
            settings["kv_offload_memory"] = rng.choice((2, 6, 40)) * bytes_of_block * 2
            settings["kv_offload_format"] = rng.choice(("plain", "lossless"))
            if has_disk:
                settings["kv_offload_memory"] *= rng.choice((0, 1))
                settings["cache_dir_size"] = rng.choice((6, 60, 600)) * (bytes_of_block * 2 + 4096)
        asks = self._asks(2 if has_disk and self._has("restart", 0.7) else 1)
        kept = asks if only is None else tuple(ask for ask in asks if ask.number in only)
        return Configuration(
            self._seed,
            self._number,
            self._without,
            only,
            model,
            is_paged,
            capacity // block_size,
            policy,
            changes,
            settings,
            has_disk,
            num_phases=1 + max((ask.phase for ask in kept), default=0),
            move_seconds=rng.choice((0.0, 0.0, 0.0001, 0.002)),
            move_steps=rng.choice((0, 0, 1, 4)),
            sheds=self._has("shedding", 0.5),
            faults=self._faults(asks) if self._has("faults", 0.25) else (),
            asks=kept,
        )

    def _capacity(self) -> int:
        """Tokens of the pool."""
        rng = self._random("capacity")
        return rng.choice((40, 64, 100, 200)) if self._has("small memory", 0.6) else rng.choice((600, 2000))

    def _policy(self, rng: Random) -> str:
        if self._has_targets and rng.random() < 0.6:
            return f"target:{rng.choice((3, 8, 20, 60, 400))}ms{rng.choice(('', ',paced'))}"
        if rng.random() < 0.6:
            return f"{rng.choice(('fixed', 'alternate'))}:{rng.choice((1, 3, 8, 16, 30, 64, 100))}"
        return rng.choice(_POLICIES)

    def _changes(self, rng: Random) -> tuple[tuple[int, str], ...]:
        times = sorted(rng.randrange(60) for _ in range(rng.choice((1, 2, 5))))
        return tuple((at, "none" if rng.random() < 0.2 else self._policy(rng)) for at in times)

    def _faults(self, asks: Sequence[Ask]) -> tuple[Fault, ...]:
        """Few enough that no eight steps in a row fail."""
        rng = self._random("faults")
        kinds = [kind for kind in FAULT_KINDS if kind != "hang"]
        return tuple(
            Fault(
                rng.choice(kinds),
                rng.choice(MOMENTS),
                after=rng.choice((0, 1, 3, 10, 25)),
                count=rng.choice((1, 1, 1, 2)),
                request_id=rng.choice((None, rng.choice(asks).id)),
            )
            for _ in range(rng.choice((1, 1, 2, 3)))
        )

    # ---- the load ----

    def _asks(self, num_phases: int) -> tuple[Ask, ...]:
        rng = self._random("asks")
        stems = [self._tokens(rng, rng.randint(1, self._longest - 2)) for _ in range(3)]
        asks: list[Ask] = []
        num_asks, spread = rng.choice((1, 4, 8, 8, 16, 24)), rng.choice((0, 10, 60))
        for number in range(num_asks):
            # Each from numbers of its own too.
            asks.append(self._ask(self._random(f"ask {number}"), number, asks, stems, spread, num_phases))
        return tuple(asks)

    def _ask(
        self,
        rng: Random,
        number: int,
        before: Sequence[Ask],
        stems: Sequence[tuple[int, ...]],
        spread: int,
        num_phases: int,
    ) -> Ask:
        kind = rng.random()
        at_step, phase, follows = rng.randint(0, spread), rng.randrange(num_phases), None
        tail = self._tokens(rng, rng.choice((1, 2, 9, 30)))
        prompt = self._tokens(rng, rng.choice((1, 3, 17, 40, rng.randint(1, self._longest - 1))))
        if kind < 0.45:
            stem = rng.choice(stems)
            prompt = (*stem[: rng.choice((len(stem), len(stem), rng.randint(1, len(stem))))], *tail)
        tenant, salt = "", None
        if self._has("tenants", 0.5):
            tenant, salt = rng.choice(("", "t0", "t1", "t2")), rng.choice((None, None, None, "shared"))
        if before and kind > 0.8:
            earlier = rng.choice(before)
            if kind > 0.9 and self._has("follow-ups", 0.8):
                follows, prompt = earlier.number, tail
            elif kind < 0.9:  # as with n > 1
                at_step, prompt, follows = earlier.at_step, earlier.prompt, earlier.follows
            phase, tenant, salt = earlier.phase, earlier.tenant, earlier.cache_salt
        return Ask(
            number,
            at_step,
            prompt[: self._longest - 1],
            follows,
            self._sampling(rng),
            phase,
            abort_after=rng.choice((0, 1, 4, 20)) if self._has("aborts", 0.4) and rng.random() < 0.25 else None,
            tenant=tenant,
            cache_salt=salt,
            service_class=rng.choice((None, "interactive", "batch")) if self._has("classes", 0.4) else None,
        )

    @staticmethod
    def _tokens(rng: Random, count: int) -> tuple[int, ...]:
        if rng.random() < 0.1:
            return (rng.randrange(_FIRST_ORDINARY, VOCAB_SIZE),) * count
        return tuple(rng.randrange(_FIRST_ORDINARY, VOCAB_SIZE) for _ in range(count))

    def _sampling(self, rng: Random) -> SamplingParams:
        """Everything is drawn in every case, so that leaving out a part changes no other."""
        given: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 12, 12, 30, 60)), "temperature": 0.0}
        given["ignore_eos"] = rng.random() < 0.5
        groups = (
            ("sampling", 0.4, self._drawn_fields(rng)),
            ("rules", 0.25, self._rule_fields(rng, given["max_tokens"])),
            ("logprobs", 0.2, {"logprobs": rng.choice((0, 1, 5))}),
            ("logprobs", 0.15, {"prompt_logprobs": rng.choice((0, 2))}),
            ("stops", 0.2, {"stop": tuple(rng.sample(("e", " ", "a", "er", "1", "th", "x2"), 2))}),
            ("stops", 0.2, {"stop_token_ids": tuple(rng.sample(range(_FIRST_ORDINARY, VOCAB_SIZE), 30))}),
            ("deadlines", 0.15, {"deadline": rng.choice((0.01, 0.2, 2.0))}),
            ("targets", 0.3, {"tbt_target": rng.choice((0.004, 0.03, 0.5))}),
            ("targets", 0.2, {"ttft_target": rng.choice((0.01, 0.3))}),
            ("grammars", 0.15, {"grammar": rng.choice(_GRAMMARS), "ignore_eos": False}),
            ("embeddings", 0.05, {"pooling": rng.choice(("last", "mean")), "max_tokens": 1, "min_tokens": 0}),
        )
        for part, chance, more in groups:
            if rng.random() < chance and part not in self._without:
                given |= more
        if not self._has_targets:
            given |= {"tbt_target": None, "ttft_target": None}
        return SamplingParams(**given)

    @staticmethod
    def _drawn_fields(rng: Random) -> dict[str, Any]:
        return {
            "temperature": rng.choice((0.2, 0.8, 1.0, 1.5)),
            "seed": rng.randrange(1 << 40),
            "top_k": rng.choice((0, 0, 1, 20)),
            "top_p": rng.choice((1.0, 0.9, 0.3)),
            "min_p": rng.choice((0.0, 0.0, 0.1)),
        }

    @staticmethod
    def _rule_fields(rng: Random, max_tokens: int) -> dict[str, Any]:
        some = rng.sample(range(_FIRST_ORDINARY, VOCAB_SIZE), 300)
        rules: dict[str, Any] = {
            "repetition_penalty": rng.choice((1.0, 1.3, 0.7)),
            "presence_penalty": rng.choice((0.0, 0.6, -0.5)),
            "frequency_penalty": rng.choice((0.0, 0.4)),
            "logit_bias": rng.choice((None, {EOS: 2.5}, {some[0]: 9.0, some[1]: -100.0})),
            "allowed_token_ids": rng.choice((None, None, tuple(some))),
            "bad_word_ids": rng.choice(((), ((some[2],), (some[3], some[4])))),
            "min_tokens": rng.choice((0, max_tokens // 2)),
        }
        names = rng.sample(tuple(rules), rng.choice((1, 2, 5)))
        return {name: rules[name] for name in names}


def kv_bytes_per_token(num_kv_heads: int) -> int:
    """Of the models above: keys and values of four layers with heads of 16, in float32."""
    return 2 * 4 * num_kv_heads * 16 * 4
