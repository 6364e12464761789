"""Many requests on one model: slots that share batches, over the prefix tree."""

from llamakeep.engine.engine import Engine, Ticket
from llamakeep.engine.keeping import Keeping, TreeKeeping
from llamakeep.engine.observer import Observer
from llamakeep.engine.records import Record
from llamakeep.engine.request import (
    Begun,
    Choice,
    Failed,
    Finished,
    Listener,
    Piece,
    Progress,
    Request,
    Stop,
    Timings,
    TokenProb,
    Update,
)
from llamakeep.engine.slotfile import SlotFile
from llamakeep.engine.view import SlotGlance, SlotInfo
from llamakeep.engine.whole_keeping import PromptKeeping

__all__ = [
    "Begun",
    "Choice",
    "Engine",
    "Failed",
    "Finished",
    "Keeping",
    "Listener",
    "Observer",
    "Piece",
    "Progress",
    "PromptKeeping",
    "Record",
    "Request",
    "SlotFile",
    "SlotGlance",
    "SlotInfo",
    "Stop",
    "Ticket",
    "Timings",
    "TokenProb",
    "TreeKeeping",
    "Update",
]
