"""llamakeep keeps the state that llama.cpp computes for a prompt: no prefix is prefilled twice."""

from llamakeep.errors import (
    BlobRejected,
    ContextOverflow,
    DecodeError,
    IndexDamaged,
    IntegrityError,
    InvalidValue,
    KeeperBusy,
    KeeperClosed,
    LlamakeepError,
    ModelError,
    OverBudget,
    RestoreFailed,
    StateError,
    StateLost,
    StateRejected,
    StoreError,
    TokenError,
)
from llamakeep.keeper import Keeper, attach
from llamakeep.modes import Mode, mode
from llamakeep.states import Reuse

__all__ = [
    "BlobRejected",
    "ContextOverflow",
    "DecodeError",
    "IndexDamaged",
    "IntegrityError",
    "InvalidValue",
    "Keeper",
    "KeeperBusy",
    "KeeperClosed",
    "LlamakeepError",
    "Mode",
    "ModelError",
    "OverBudget",
    "RestoreFailed",
    "Reuse",
    "StateError",
    "StateLost",
    "StateRejected",
    "StoreError",
    "TokenError",
    "attach",
    "mode",
]
