"""Make docs/dashboard.png: `.venv/bin/python -m docs.make_screenshot [FILE.png ...]`.

Starts a server on the demo's model, holds some conversations with it, restarts it, goes on, and
takes a picture of its page while two answers run. Takes about two minutes. Other files than the
usual one are named for what they show: with `dark` in the name in dark colours, with `phone` as
wide as a phone, with `all` down to the end.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx

from llamakeep.demo import SMOLLM2_INSTALL, find_smollm2
from tests.chromium import Browser, Page, find_chromium

FILE = Path(__file__).with_name("dashboard.png")
SYSTEM = (
    "You answer questions of visitors of a museum in a lighthouse. Be short, friendly and "
    "exact. The tower was built in 1871 and is 38 metres high; 196 steps lead to the gallery. "
    "Its lamp burned whale oil until 1884, then paraffin, and has been electric since 1926. The "
    "lens is of the first order, weighs four tonnes and floats in a trough of mercury. The "
    "light is seen for 23 nautical miles. The keepers' house has three rooms: one for the log "
    "books, one for the wrecks, one for the birds that are counted here in autumn. Tickets are "
    "sold until an hour before closing. Children under eight climb with an adult. Dogs stay "
    "below. When the wind is above nine the gallery is closed."
)
OTHER = (
    "You review changes to a program that records tides. Say what is wrong first, then what "
    "could be simpler, and nothing about style. Times are in UTC, heights in metres above the "
    "lowest tide; a gauge reports every six minutes, and may be silent for an hour in a storm."
)
QUESTIONS = (
    "When was the tower built, and by whom?",
    "How far can the light be seen in clear weather?",
    "My daughter is seven. May she climb alone?",
    "What did the lamp burn before it was electric?",
    "Which birds are counted in autumn, and why here?",
    "Is the gallery open today? It is quite windy.",
    "We come with a dog and a pram. What can we see together?",
    "The function that fills gaps takes the mean of both ends. Is that right?",
    "Two gauges share a clock now. What can go wrong with that?",
)
N_VISITORS = 7
MORE = (
    "Thank you. Can you tell me more about that?",
    "And how was that in former times?",
    "What should I look at next?",
    "How long will that take us?",
)


@contextmanager
def server(model: Path, cache_dir: Path) -> Iterator[str]:
    """Run `llamakeep serve` on a free port; the value is its address."""
    command = [sys.executable, "-m", "llamakeep", "serve", "-m", str(model), "--port", "0"]
    command += ["-c", "8192", "-np", "4", "-t", "1", "--cache-ram", "512MiB"]
    command += ["--cache-dir", str(cache_dir)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if json.loads(line).get("event") == "ready":
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield json.loads(line)["url"]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


class Talk:
    """A conversation with a server.

    Args:
        number: Which question it begins with.
    """

    def __init__(self, number: int) -> None:
        self._random = Random(number)
        self._question = QUESTIONS[number]
        system = SYSTEM if number < N_VISITORS else OTHER
        self._messages = [{"role": "system", "content": system}]

    def fork(self, seed: int) -> Talk:
        """Return one that begins as this does, and goes on otherwise."""
        other = copy.copy(self)
        other._random, other._messages = Random(seed), list(self._messages)
        return other

    def go_on(self, url: str, n_tokens: int) -> None:
        """Ask the next question, and remember the answer."""
        self._messages.append({"role": "user", "content": self._question})
        self._question = self._random.choice(MORE)
        body = {"messages": self._messages, "max_tokens": n_tokens, "temperature": 0.0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()
        self._messages.append(answer["choices"][0]["message"])


def talk(url: str, talks: list[Talk], n_turns: int) -> None:
    """Let conversations take turns, two at a time."""
    random = Random(n_turns)
    for _ in range(n_turns):
        for n in range(0, len(talks), 2):
            pair = [each for each in talks[n : n + 2] if random.random() < 0.8]
            together(url, pair, random.randrange(16, 96))
            time.sleep(random.uniform(0.5, 4.0))  # people read


def together(url: str, talks: list[Talk], n_tokens: int) -> None:
    """Ask the next question of each at the same time."""
    threads = [threading.Thread(target=each.go_on, args=(url, n_tokens)) for each in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take(page: Page, file: Path) -> None:
    """Take a picture of the page."""
    width = 390 if "phone" in file.stem else 1080
    page.resize(width, 1200)
    bottom = page.run("document.querySelectorAll('tr.request')[2].getBoundingClientRect().bottom")
    page.resize(width, 844 if "phone" in file.stem else int(bottom))
    page.prefer("dark" if "dark" in file.stem else "light")
    time.sleep(1.5)  # it asks once more
    file.write_bytes(page.screenshot(full="all" in file.stem))


def main() -> None:
    """Make the pictures that were asked for."""
    model, chromium = find_smollm2(), find_chromium()
    if model is None or chromium is None:
        sys.exit(f"this needs Chromium, and the demo's model: {SMOLLM2_INSTALL}")
    files = [Path(name) for name in sys.argv[1:]] or [FILE]
    talks = [Talk(number) for number in range(len(QUESTIONS))]
    with tempfile.TemporaryDirectory() as place:
        with server(model, Path(place)) as url:
            talk(url, talks[:N_VISITORS], 2)
            talks += [talks[0].fork(100), talks[2].fork(101)]
        with server(model, Path(place)) as url:
            talk(url, talks, 4)
            browser = Browser(chromium)
            try:
                with browser.page(f"{url}/") as page:
                    page.wait_for("document.querySelector('#tree [role=treeitem]')")
                    last = threading.Thread(target=together, args=(url, talks[:2], 400))
                    last.start()
                    page.wait_for("document.querySelector('[data-state=answer]')")
                    for file in files:
                        take(page, file)
                    last.join()
            finally:
                browser.close()


if __name__ == "__main__":
    main()
