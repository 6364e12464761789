"""`llamakeep demo`: what llamakeep saves on a small model, and that answers stay the same.

`run_demo` measures and returns frozen values; `show_demo` draws them.
"""

from llamakeep.demo.measure import DemoResult, DemoRow, Step, run_demo
from llamakeep.demo.model import SMOLLM2_INSTALL, find_smollm2, package_dir
from llamakeep.demo.screen import picture, show_demo, summary
from llamakeep.demo.story import write_log

__all__ = [
    "SMOLLM2_INSTALL",
    "DemoResult",
    "DemoRow",
    "Step",
    "find_smollm2",
    "package_dir",
    "picture",
    "run_demo",
    "show_demo",
    "summary",
    "write_log",
]
