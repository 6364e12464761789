"""Replaying traces of requests against the caches of llamakeep, and the best that was possible.

`open_trace` reads a file, `replay` serves its requests with a cache, `bound` and `clairvoyant` say
what was possible, and `run` does all of that for several policies and capacities. `make_chats`
invents conversations for it; `replay_fleet` serves requests with several replicas over one shared
tier.
"""

from llamakeep.simulate.bound import bound
from llamakeep.simulate.chats import (
    ChatRequest,
    ChatStyle,
    chat_workload,
    make_chats,
    write_chats,
)
from llamakeep.simulate.experiment import Experiment, Report, run
from llamakeep.simulate.fleet import Fleet, FleetOutcome, SharedUse, replay_fleet
from llamakeep.simulate.foresight import Foresight
from llamakeep.simulate.greedy import clairvoyant
from llamakeep.simulate.replay import (
    Driver,
    Model,
    Outcome,
    PromptDriver,
    TraceClock,
    TreeDriver,
    drive,
    replay,
)
from llamakeep.simulate.routing import Route, parse_route
from llamakeep.simulate.rules import CheckpointRules
from llamakeep.simulate.tiers import TierSize, parse_tiers
from llamakeep.simulate.trace import Request, Trace, open_trace, trace_of

__all__ = [
    "ChatRequest",
    "ChatStyle",
    "CheckpointRules",
    "Driver",
    "Experiment",
    "Fleet",
    "FleetOutcome",
    "Foresight",
    "Model",
    "Outcome",
    "PromptDriver",
    "Report",
    "Request",
    "Route",
    "SharedUse",
    "TierSize",
    "Trace",
    "TraceClock",
    "TreeDriver",
    "bound",
    "chat_workload",
    "clairvoyant",
    "drive",
    "make_chats",
    "open_trace",
    "parse_route",
    "parse_tiers",
    "replay",
    "replay_fleet",
    "run",
    "trace_of",
    "write_chats",
]
