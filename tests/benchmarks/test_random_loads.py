import json
from dataclasses import asdict

from random_loads import CHAT_PROMPT_TOKENS, LONG_PROMPT_TOKENS, NUM_CHATS, load_from_json, random_load

SEEDS = range(200)


def test_a_seed_always_gives_the_same_load() -> None:
    assert random_load(7) == random_load(7)
    assert random_load(7) != random_load(8)


def test_a_load_survives_json() -> None:
    for seed in range(10):
        load = random_load(seed)
        assert load_from_json(json.loads(json.dumps(asdict(load)))) == load


def test_sizes_and_times_stay_in_their_ranges() -> None:
    for seed in SEEDS:
        load = random_load(seed, seconds=6.0, max_chat_tokens=100_000)
        assert NUM_CHATS[0] <= len(load.chats) <= NUM_CHATS[1]
        assert all(0 <= client.start_s <= 6.0 for client in (*load.chats, *load.long_prompts))
        prompts = [turn.prompt_tokens for client in load.chats for turn in client.turns]
        assert CHAT_PROMPT_TOKENS[0] <= min(prompts)
        assert max(prompts) <= min(CHAT_PROMPT_TOKENS[1], 100_000 // len(load.chats))
        for client in load.long_prompts:
            (turn,) = client.turns
            assert LONG_PROMPT_TOKENS[0] <= turn.prompt_tokens <= LONG_PROMPT_TOKENS[1]
            assert turn.output_tokens >= 1


def test_loads_reach_from_idle_to_overload() -> None:
    loads = [random_load(seed) for seed in SEEDS]
    offered = [sum(client.turns[0].prompt_tokens for client in load.long_prompts) / load.seconds for load in loads]
    assert min(offered) == 0
    assert max(offered) > 25_000
    sizes = [len(load.chats) for load in loads]
    assert min(sizes) < 12
    assert max(sizes) > 200
    at_once = [len(load.long_prompts) - len({client.start_s for client in load.long_prompts}) for load in loads]
    assert max(at_once) >= 7
