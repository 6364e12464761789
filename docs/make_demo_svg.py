"""Draw docs/demo.svg from a run of the demo: `.venv/bin/python docs/make_demo_svg.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from llamakeep.demo import SMOLLM2_INSTALL, find_smollm2, picture, run_demo


def main() -> None:
    """Run the demo and draw what it found."""
    model = find_smollm2()
    if model is None:
        sys.exit(f"the demo's model is not installed: {SMOLLM2_INSTALL}")
    Path(__file__).with_name("demo.svg").write_text(picture(run_demo(model)))


if __name__ == "__main__":
    main()
