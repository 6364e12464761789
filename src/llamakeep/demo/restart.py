"""The restart: a second process, with nothing in memory, answers one request from disk.

`ask_second_process` starts this module as a program, which reads a request from standard input and
writes what it found to standard output, both as JSON. So it is imported where it is used: what the
package has imported already cannot be started.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamakeep.demo.answer import Answer, Settings, ask, served
from llamakeep.demo.story import Message
from llamakeep.errors import LlamakeepError
from llamakeep.states import Reuse

logger = logging.getLogger("llamakeep")


@dataclass(frozen=True, slots=True)
class Restarted:
    """What a second process found. `load_ms` is what it took to load the model and attach."""

    answer: Answer
    reuse: Reuse
    load_ms: float


def ask_second_process(settings: Settings, messages: list[Message]) -> Restarted:
    """Put one request to a process that has only what is on disk, and wait for it.

    Args:
        settings: Its `cache_dir` has what was kept. The process runs beside it, in the directory
            above, so that nothing where the user is gets imported.
        messages: The chat.

    Raises:
        LlamakeepError: When the process cannot be started or fails, with the last thing it said.

    An interrupt ends the process. Costs the time to import llama.cpp and to load the model.
    """
    paths = (os.path.abspath(path) for path in sys.path)  # an empty one means: where the user is
    try:
        done = subprocess.run(  # an interrupt ends it
            [sys.executable, "-m", "llamakeep.demo.restart"],
            input=json.dumps({"settings": asdict(settings), "messages": messages}),
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            cwd=Path(settings.cache_dir).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
        )
    except OSError as error:
        raise LlamakeepError(f"a second process could not be started: {error}") from error
    said = done.stderr.strip().splitlines()
    if done.returncode:
        why = said[-1] if said else f"it ended with exit code {done.returncode}"
        raise LlamakeepError(f"the second process could not answer: {why}")
    for line in said:
        logger.debug("the second process said: %s", line)
    try:
        found = json.loads(done.stdout)
        answer, reuse = found["answer"], Reuse(**found["reuse"])
        tokens = np.array(answer.pop("tokens"), np.int32)
        return Restarted(Answer(**answer, tokens=tokens), reuse, found["load_ms"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LlamakeepError(f"the second process gave no answer, but {done.stdout!r}") from error


def _respond(settings: Settings, messages: list[Message]) -> dict[str, Any]:
    begin = time.perf_counter()
    with closing(settings.load()) as llm, settings.attach(llm) as keeper:
        load_ms = (time.perf_counter() - begin) * 1e3
        answer = ask(llm, messages, settings.max_tokens)
        reuse = served(keeper)
    found = {**asdict(answer), "tokens": answer.tokens.tolist()}
    return {"answer": found, "reuse": asdict(reuse), "load_ms": load_ms}


def main() -> None:
    """Answer the request on standard input; what fails is the last line of standard error."""
    request = json.load(sys.stdin)
    try:
        found = _respond(Settings(**request["settings"]), request["messages"])
    except LlamakeepError as error:
        sys.exit(" ".join(str(error).split()))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
