"""Mutated model files: number n of a seed is always the same one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.fuzz.byte_mutations import mutate_bytes
from tests.fuzz.gguf_parts import mutate_gguf
from tests.fuzz.hostile_values import json_bytes, mutate_json, string
from tests.fuzz.seeds import (
    KNOWN_FIELDS,
    folder_seed,
    gguf_seeds,
    known_gguf_values,
    manifest_seed,
    sharded_seed,
    step_times_seed,
)
from tests.models import CHAT_TEMPLATE

GGUF, STEP_TIMES, TARGETS, MANIFEST = "model.gguf", "step-times", "targets", "manifest"
_MAX_BYTES = 2 << 20  # of a mutant
_INDEX = "model.safetensors.index.json"
_TEMPLATE = "chat_template.jinja"
# Files, by how many of a hundred mutants are of each.
SHARES = {
    GGUF: 42,
    "model.safetensors": 16,
    _INDEX: 4,
    "config.json": 15,
    "tokenizer.json": 12,
    "tokenizer_config.json": 3,
    "special_tokens_map.json": 1,
    "generation_config.json": 2,
    _TEMPLATE: 1,
    STEP_TIMES: 1,
    TARGETS: 1,
    MANIFEST: 2,
}
_TEMPLATE_PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages }}", "{% if tools %}", "{% endif %}"),
    *("{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% set x = [] %}", "{{ x.append(x) }}", "{{ x }}"),
    *(
        "{{ messages|tojson }}",
        "{{ strftime_now('%Y') }}",
        "{% include 'config.json' %}",
        "{% macro a() %}",
        "{{ a() }}",
    ),
    *("{% endmacro %}", "{% generation %}", "{% endgeneration %}", "{{ 1 // 0 }}", "{{ '%c'|format(-1) }}", "{#"),
    *("{% import '/etc/passwd' as p %}", "{{ self.__init__.__globals__ }}", "{{ cycler.__init__ }}", "(" * 3000, "}}"),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One file's content; `number` and the seed make it again."""

    number: int
    file: str
    content: bytes


class Mutants:
    """Makes the mutants of one seed. `outside` is the folder that hostile paths lead to."""

    def __init__(self, seed: int, outside: str, shares: dict[str, int]) -> None:
        self._seed = seed
        self.set_outside(outside)
        self._files, self._weights = list(shares), list(shares.values())

    def set_outside(self, outside: str) -> None:
        self._outside = json.dumps(outside)[1:-1].encode()

    def random(self, number: int, purpose: str) -> Random:
        return Random(f"{self._seed} {number} {purpose}")

    def make(self, number: int) -> Mutant:
        random = self.random(number, "mutant")
        [file] = random.choices(self._files, self._weights)
        return Mutant(number, file, self._content(file, random).replace(b"{outside}", self._outside))

    def _content(self, file: str, random: Random) -> bytes:
        if file == GGUF:
            [parts] = random.choices(gguf_seeds(), (20, 20, 18, 18, 18, 3, 3))  # the last two are slow
            return mutate_gguf(parts, random, known_gguf_values())
        folder = {**sharded_seed(), **folder_seed()}
        if file == "model.safetensors":
            return _mutate_safetensors(folder[file], random)
        if file == _TEMPLATE:
            return _mutate_template(random)
        if file in folder:
            return _mutate_json_file(folder[file], random, KNOWN_FIELDS.get(file, {}))
        content = {STEP_TIMES: step_times_seed(), MANIFEST: manifest_seed(), TARGETS: [0.5, 0.25]}[file]
        return _mutate_json_file(json.dumps(content).encode(), random, {})


def _num_changes(random: Random) -> int:
    return random.choice((1, 1, 2, 3, 4))


def _mutate_json_file(content: bytes, random: Random, known: dict[str, Any]) -> bytes:
    if random.random() < 0.15:
        return mutate_bytes(content, random)
    changed = json.loads(content)
    for _ in range(_num_changes(random)):
        changed = mutate_json(changed, random, known)
    return json_bytes(changed, random)[:_MAX_BYTES]


def _mutate_safetensors(content: bytes, random: Random) -> bytes:
    """Its header as JSON, the length of the header, or any bytes."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = random.random()
    if kind < 0.3:
        return mutate_bytes(content, random, [(0, 8)])
    if kind < 0.45:
        return content[: 8 + size] + mutate_bytes(data, random)[: len(data)].ljust(len(data), b"\0")
    tensors = json.loads(header)
    for _ in range(_num_changes(random)):
        change = random.choice((_move_tensor, _move_tensor, mutate_json, _rename_tensor))
        tensors = change(tensors, random, {})
    header = json_bytes(tensors, random)[:_MAX_BYTES]
    if kind < 0.95:
        header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header + data


def _move_tensor(tensors: Any, random: Random, _: dict[str, Any]) -> Any:
    """Over another one, or with another type or shape."""
    if not isinstance(tensors, dict) or not tensors:
        return tensors
    one, other = (tensors[random.choice(list(tensors))] for _ in range(2))
    name = random.choice(("data_offsets", "dtype", "shape"))
    if isinstance(one, dict) and isinstance(other, dict) and name in other:
        kinds = ("F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "I64", "U64", "C64", "f32")
        one[name] = random.choice(kinds) if name == "dtype" else other[name]
    return tensors


def _rename_tensor(tensors: Any, random: Random, _: dict[str, Any]) -> Any:
    if isinstance(tensors, dict) and tensors:
        name = random.choice(list(tensors))
        tensors[random.choice((string(random), name + "\n", name.removeprefix("model.")))] = tensors.pop(name)
    return tensors


def _mutate_template(random: Random) -> bytes:
    if random.random() < 0.5:
        return mutate_bytes(CHAT_TEMPLATE.encode(), random)
    pieces = random.choices(_TEMPLATE_PIECES, k=random.randrange(1, 8))
    return "".join(pieces).encode()
