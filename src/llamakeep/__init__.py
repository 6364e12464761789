"""llamakeep keeps the state that llama.cpp computes for a prompt: no prefix is prefilled twice."""

from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    IntegrityError,
    InvalidValue,
    KeeperBusy,
    KeeperClosed,
    LlamakeepError,
    ModelError,
    OverBudget,
    RestoreFailed,
    StateError,
    StateRejected,
    TokenError,
)
from llamakeep.keeper import Keeper, attach
from llamakeep.states import Reuse

__all__ = [
    "ContextOverflow",
    "DecodeError",
    "IntegrityError",
    "InvalidValue",
    "Keeper",
    "KeeperBusy",
    "KeeperClosed",
    "LlamakeepError",
    "ModelError",
    "OverBudget",
    "RestoreFailed",
    "Reuse",
    "StateError",
    "StateRejected",
    "TokenError",
    "attach",
]
