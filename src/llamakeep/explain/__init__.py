"""Why a prompt, or the rest of one, was read again.

`explain` compares a prompt with the stored one that shares most with it, as texts, tokens or
request bodies, and takes into account what an engine knows of the request (`Circumstances`). It
returns an `Explanation`: one of a small set of causes (`Kind`), where the two part, what stands
there, and what a user can do about it. `RecordLog` writes what `explain_logged` explains later.
"""

from llamakeep.explain.circumstances import Circumstances, Evicted
from llamakeep.explain.divergence import Around
from llamakeep.explain.elsewhere import kept_elsewhere
from llamakeep.explain.explaining import explain
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.history import History, Served
from llamakeep.explain.kinds import ADVICE, CHURN, Kind
from llamakeep.explain.log import explain_logged
from llamakeep.explain.prompts import Given, Side
from llamakeep.explain.record import Recorded, RecordLog, read_log

__all__ = [
    "ADVICE",
    "CHURN",
    "Around",
    "Circumstances",
    "Evicted",
    "Explanation",
    "Given",
    "History",
    "Kind",
    "RecordLog",
    "Recorded",
    "Served",
    "Side",
    "explain",
    "explain_logged",
    "kept_elsewhere",
    "read_log",
]
