"""What the demo asks: a keeper's log as a long document, and questions about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Message: TypeAlias = dict[str, str]

_SYSTEM = """\
You answer questions for the people who look after Corran Light, a lighthouse on a small island.
Some of them are new, and all of them are busy, so keep to these rules.
Answer in plain words and in at most three sentences. Say the most important thing first.
When a log is given, take every fact from the log, and name the day on which it was written.
When the log does not say something, answer that it does not, and do not guess.
When no log is given, answer from general knowledge about lighthouses, weather and the sea.
Times are local and use the clock of twenty-four hours. Wind is given as the direction it comes
from and as a force between 0 and 12. Oil is counted in litres, and distance at sea in miles.
Never advise anyone to take a boat out when the wind is of force 7 or more. If somebody seems to be
in danger, tell them to call the coastguard on channel 16 before anything else.
Do not repeat the question, do not apologise, and do not add greetings or farewells."""

_WINDS = ("west", "north-west", "south", "south-west", "north", "east", "south-east")
_SEAS = ("calm", "calm", "smooth", "slight", "slight", "moderate", "rough", "very rough", "high")
_SKIES = ("clear sky", "rain before noon", "low cloud", "fog until ten", "showers")
_EVENTS = (
    "Oiled the gears of the lens and wound the clockwork twice.",
    "The supply boat brought flour, two barrels of oil and a letter from the harbour office.",
    "A cormorant has settled on the lower railing and will not be moved.",
    "Painted the east window frames; the old paint came off in one long strip.",
    "Signalled to a trawler that had lost her way; she answered and turned south.",
    "The barometer fell all afternoon, so the shutters were closed before dark.",
    "Storm. Spray reached the gallery, and the garden wall lost eleven stones.",
    "Repaired the garden wall with the stones that could be found again.",
    "Doctor Ames rowed over to look at Tom's hand, and stayed for one night.",
    "Washed the lens with vinegar and chamois; it took four hours.",
    "Found a crate of oranges on the north beach, half of them good.",
    "The pump of the rain tank broke; water was carried by hand.",
    "Made a new leather washer for the pump, which works again.",
    "Counted nineteen ships before noon, more than on any day this year.",
    "A school class watched the lamp being lit, and asked about the stairs: there are 142.",
    "Moved the goats to the western field, where the grass is better.",
    "The relief keeper, Ines Marr, arrived with her books and a cello.",
    "Tested the fog horn; it could be heard at the chapel, three miles off.",
    "Replaced the wick of the spare lamp and trimmed the other.",
    "Thunder in the night. The lightning rod was struck and the cellar smelled of it.",
    "Sowed beans and kale behind the wall.",
    "The inspector came unannounced, read this log and drank four cups of tea.",
    "Whales to the south, five or six, going slowly west.",
    "Mended the nets and the small boat's oar.",
    "Swept the chimney; a jackdaw's nest had blocked it.",
    "No post. Ines played the cello in the lamp room, where it echoes well.",
    "Took the oil store's inventory: 412 litres, enough until June.",
    "A yacht anchored in the bay; her crew came up for bread and weather.",
)

N_DAYS = len(_EVENTS)
"""Days that the log can have."""

_FIRST_QUESTION = "What did the supply boat bring, and on which day?"
_SECOND_QUESTION = "Who came to the lighthouse, and why did they come?"
_EDITED_QUESTION = "Who came to the lighthouse, and who of them stayed the night?"
_THIRD_QUESTION = "What was broken by the storm, and when was it repaired?"
_FOURTH_QUESTION = "Which animals were seen, and on which days?"
_FOLLOW_UP = "What else happened in the days after that?"
_OTHER_QUESTION = "Why do lighthouses use a Fresnel lens?"
_OTHER_QUESTION_2 = "How does a barometer warn of a storm?"


def write_log(n_days: int) -> str:
    """Return the lighthouse's log of up to 28 days: the demo's long document."""
    lines = ["The log of Corran Light, written by its keeper, Abel Rourke."]
    for day, event in enumerate(_EVENTS[:n_days], 1):
        storm = "Storm" in event
        force = 10 if storm else (day * 5) % 7
        lines.append(
            f"{day} March. Wind {_WINDS[day * 3 % 7]}, force {force}, sea "
            f"{'very high' if storm else _SEAS[force]}, {_SKIES[day * 2 % 5]}. Lamp lit at "
            f"18:{day + 2:02}, put out at 06:{58 - day:02}, {9 + day * 3 % 4} litres of oil used. "
            f"{event}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the demo: a question, and what comes before it."""

    title: str
    question: str
    about_log: bool = True
    goes_on: bool = False
    """The first request and its answer come before the question."""
    restarted: bool = False
    """A second process is asked, with nothing in memory."""


def story() -> tuple[Request, ...]:
    """Return the demo's requests, in order."""
    return (
        Request("a log and a question", _FIRST_QUESTION),
        Request("a second question", _SECOND_QUESTION),
        Request("a third question", _THIRD_QUESTION),
        Request("another conversation", _OTHER_QUESTION, about_log=False),
        Request("question 2, edited", _EDITED_QUESTION),
        Request("the other one again", _OTHER_QUESTION_2, about_log=False),
        Request("request 1, repeated", _FIRST_QUESTION),
        Request("request 1, continued", _FOLLOW_UP, goes_on=True),
        Request("after a restart", _FOURTH_QUESTION, restarted=True),
    )


def messages_of(request: Request, log: str, first_answer: str) -> list[Message]:
    """Return the messages of a request."""
    messages = [{"role": "system", "content": _SYSTEM}]
    if request.goes_on:
        messages += [
            {"role": "user", "content": f"{log}\n\n{_FIRST_QUESTION}"},
            {"role": "assistant", "content": first_answer},
            {"role": "user", "content": request.question},
        ]
    else:
        text = f"{log}\n\n{request.question}" if request.about_log else request.question
        messages.append({"role": "user", "content": text})
    return messages
