"""Long English texts of any number of tokens, each ending in a question that the text answers.

Entries are built from short lists, with strides that do not divide their lengths, so that none repeats another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple


class LongText(NamedTuple):
    """An opening, endless entries, and the question after the last one."""

    opening: str
    entries: Callable[[], Iterator[str]]
    question: str

    def of_length(self, num_tokens: int, count_tokens: Callable[[str], int]) -> str:
        """The opening, as many whole entries as fit, and the question."""
        lines = [self.opening]
        room = num_tokens - count_tokens(self.opening) - count_tokens(self.question)
        for entry in self.entries():
            room -= count_tokens(entry + "\n")
            if room < 0:
                break
            lines.append(entry)
        return "\n".join([*lines, "", self.question])


def _pick(items: tuple[str, ...], number: int) -> str:
    return items[number % len(items)]


_SHIPS = ("the Albatross", "the Morning Star", "the Lady Anne", "the Northern Light", "the Swift", "the Old Captain")
_PORTS = ("Lisbon", "Hamburg", "Bergen", "Dublin", "Marseille", "Genoa", "Riga")
_CARGOES = ("oranges", "timber", "dried fish", "wool", "copper", "grain", "olive oil", "tea", "paper", "salt", "glass")
_WINDS = (
    "a light wind from the west",
    "heavy rain until noon",
    "thick fog",
    "a clear sky",
    "a cold wind from the north",
)
_EVENTS = (
    "The crane was repaired before the first crew came ashore",
    "Two sailors asked for a doctor and were sent to the hospital in town",
    "The customs officer opened four crates and found nothing to tax",
    "A fishing boat lost its net near the lighthouse",
    "The pilot had to wait for the tide",
    "The school children visited the pier and drew the ships",
    "A new lamp was hung at the end of the long pier",
    "The baker delivered three hundred loaves to the crew",
)


def _harbour_days() -> Iterator[str]:
    for day in count(1):
        yield (
            f"Day {day}: There was {_pick(_WINDS, 3 * day)}. In the morning {_pick(_SHIPS, 5 * day)} came in from "
            f"{_pick(_PORTS, 3 * day)} with {20 + 7 * day % 90} tons of {_pick(_CARGOES, 4 * day)}. "
            f"{_pick(_EVENTS, 3 * day)}."
        )


HARBOUR_LOG = LongText(
    opening="This is the log of the harbour of Port Alder, written by the harbour master, Mary Collins.\n",
    entries=_harbour_days,
    question="Who is the harbour master?",
)

_CROPS = ("tomatoes", "beans", "carrots", "onions", "potatoes", "peas", "lettuce", "pumpkins", "strawberries")
_HELPERS = ("Emma", "Lucas", "Sofia", "Noah", "Clara", "Oscar", "Julia")
_TASKS = (
    "pulled weeds along the fence",
    "mended the watering hose",
    "built a small bench beside the pond",
    "painted the door of the tool shed green",
    "counted the bees in front of the hives",
    "carried compost to the upper beds",
    "tied the young plants to wooden sticks",
    "swept the path to the gate",
)
_VISITORS = (
    "A neighbour brought seeds",
    "A class of the primary school came to look at the frogs",
    "Nobody visited",
    "The mayor took a photograph of the sunflowers",
    "Two hedgehogs were seen at dusk",
)


def _garden_weeks() -> Iterator[str]:
    for week in count(1):
        yield (
            f"Week {week}: We picked {3 + 5 * week % 40} kilograms of {_pick(_CROPS, 2 * week)} and planted "
            f"{_pick(_CROPS, 2 * week + 5)}. {_pick(_HELPERS, 3 * week)} {_pick(_TASKS, 3 * week)} while "
            f"{_pick(_HELPERS, 3 * week + 2)} {_pick(_TASKS, 3 * week + 4)}. {_pick(_VISITORS, 3 * week)}."
        )


GARDEN_DIARY = LongText(
    opening="This is the diary of the community garden in the town of Millbrook, which has a pond and a tool shed.\n",
    entries=_garden_weeks,
    question="What is this text about? Answer in one short sentence.",
)
