"""Why a prompt, or the rest of one, was read again.

`explain` compares a prompt with the stored one that shares most with it, as texts, tokens or
request bodies, and takes into account what an engine knows of the request (`Circumstances`). It
returns an `Explanation`: one of a small set of causes (`Kind`), where the two part, what stands
there, and what a user can do about it.
"""

from llamakeep.explain.circumstances import Circumstances, Evicted
from llamakeep.explain.divergence import Around
from llamakeep.explain.elsewhere import kept_elsewhere
from llamakeep.explain.explaining import explain
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.kinds import ADVICE, CHURN, Kind
from llamakeep.explain.prompts import Given, Side

__all__ = [
    "ADVICE",
    "CHURN",
    "Around",
    "Circumstances",
    "Evicted",
    "Explanation",
    "Given",
    "Kind",
    "Side",
    "explain",
    "kept_elsewhere",
]
