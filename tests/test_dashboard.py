"""The dashboard in a real browser: it shows what is there, and goes on showing it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from llamakeep.chat_template import ChatTemplate
from llamakeep.runtime.base import Family
from llamakeep.server.app import create_app
from tests.chromium import Browser, Page, find_chromium
from tests.engine_tools import ask, engine_of, join, span
from tests.server_tools import ONLY_A, TIMEOUT_S, Served, served, serving

KEY = "sk-this-is-secret"
NASTY = "<img src=x onerror=\"document.title='broken into'\">"
TREE = "document.querySelectorAll('#tree [role=treeitem]')"
CONTRAST = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = parse(color).map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (parse(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest('script, style')) continue;
    const style = getComputedStyle(element);
    const a = light(element instanceof SVGElement ? style.fill : style.color);
    const b = light(behind(element));
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent]);
  }
  return found;
})()"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    made = Browser(path)
    yield made
    made.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a dashboard; nothing may go wrong there, nor may it ask anybody else."""
    with browser.page(f"{url}/", **options) as page:
        page.wait_for("document.getElementById('status').textContent !== 'connecting'")
        yield page
        assert page.problems() == []
        others = [each for each in page.requests() if not each.startswith((f"{url}/", "data:"))]
        assert others == []


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server that has been asked for prompts with a common beginning, and an unlike one."""
    with served(engine={"n_seqs": 2, "n_ctx": 1024}) as made:
        for n, letter in enumerate("ABCDE"):
            made.answer("/completion", prompt="x" * 300 + letter * 40 * (n + 1), n_predict=2)
        made.answer("/completion", prompt="y" * 200, n_predict=2)
        made.engine.flush()
        yield made


def text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def focused(page: Page) -> dict[str, Any]:
    """Return what has the focus, and whether one can see that."""
    told: dict[str, Any] = page.run("""(() => {
      const element = document.activeElement, style = getComputedStyle(element);
      const ring = element.querySelector(':scope > .ring');
      const label = element.closest('label'), around = label && getComputedStyle(label);
      return {
        id: element.id, name: element.tagName.toLowerCase(), key: element.dataset.key || '',
        label: element.getAttribute('aria-label') || element.textContent,
        seen: style.outlineStyle !== 'none' || around && around.outlineStyle !== 'none'
          || ring && getComputedStyle(ring).stroke !== 'rgba(0, 0, 0, 0)',
      };
    })()""")
    return told


def test_it_shows_what_was_saved_and_what_is_kept(browser: Browser, server: Served) -> None:
    stats = server.engine.stats()
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length")
        assert text(page, "#share") == f"{stats['saved_share'] * 100:.0f}"
        assert f"{stats['reused_tokens']:,}" in text(page, "#facts")
        assert text(page, "#model") == page.run("document.title.split(' · ')[0]") == "fake"
        assert page.run("document.querySelectorAll('#slots li').length") == 2
        assert page.run("document.querySelectorAll('#requests tr.request').length") == 6
        assert "new from token" in text(page, "#requests")
        assert "Memory" in text(page, "#tiers")
        page.run("document.querySelector('#chart-table summary').click()")
        page.wait_for("document.querySelectorAll('#chart-table tbody tr').length")
        assert f"{stats['reused_tokens']:,} tokens reused" in text(page, "#chart-text")


def test_a_request_that_comes_is_shown_without_a_reload(browser: Browser) -> None:
    body = {"prompt": "H" * 100, "logit_bias": ONLY_A, "n_predict": -1}
    with (
        served(engine={"n_ctx": 512}) as server,
        opened(browser, server.url) as page,
    ):
        assert text(page, "#no-requests") == "None yet."
        assert text(page, "#share") == "0"
        with server.held():  # the request waits behind what holds the engine
            answering = threading.Thread(
                target=server.answer, args=("/completion",), kwargs=body, daemon=True
            )
            answering.start()
            page.wait_for("document.querySelector('#slots-text').textContent.includes('waits')")
        answering.join(TIMEOUT_S)
        page.wait_for("document.querySelectorAll('#requests tr.request').length === 1")
        assert page.run("document.getElementById('no-requests').hidden")


def test_a_slow_answer_is_seen_growing(browser: Browser) -> None:
    body = {"prompt": "H" * 100, "logit_bias": ONLY_A, "n_predict": 900}
    with (
        served(engine={"n_ctx": 1024}) as server,
        opened(browser, server.url) as page,
        slowed(server) as go_on,
        server.streaming("/completion", body),
    ):
        page.wait_for("document.querySelector('#slots [data-state=answer]')")
        slot = "document.querySelector('#slots [data-state=answer]').textContent"
        first = page.run(slot)
        page.wait_for(f"{slot} !== {json.dumps(first)}")
        assert "of 900 tokens" in page.run(slot)
        width = "document.querySelector('#slots [data-key=generated]').style.width"
        assert 0 < float(page.run(width).removesuffix("%")) < 100
        assert text(page, "#slots-text") == "1 of 2 busy"
        go_on.set()


@contextlib.contextmanager
def slowed(server: Served) -> Iterator[threading.Event]:
    """Let each batch take 50 ms, until the event is set."""
    go_on, runtime = threading.Event(), server.engine._runtime
    decode = runtime.decode

    def slow(parts: Any) -> Any:
        go_on.wait(0.05)
        return decode(parts)

    runtime.decode = slow  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        go_on.set()
        runtime.decode = decode  # type: ignore[method-assign]


def test_widths_are_in_proportion_to_bytes(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length >= 7")
        bars = page.run(f"""[...{TREE}].map((g) => [
          Number(g.dataset.bytes), Number(g.querySelector('.shape').getAttribute('width')),
          Number(g.querySelector('.shape').getAttribute('x')), g.dataset.tier,
          getComputedStyle(g.querySelector('.shape')).fill, Number(g.getAttribute('aria-level')),
        ])""")
        told = server.client.get("/dashboard/data").json()["tree"]["branches"]
        scale = sum(width for _, width, *_ in bars) / sum(n_bytes for n_bytes, *_ in bars)
        assert sorted(n_bytes for n_bytes, *_ in bars) == sorted(each["n_bytes"] for each in told)
        for n_bytes, width, *_ in bars:
            assert width == pytest.approx(n_bytes * scale, rel=1e-6)
        assert len({round(width) for _, width, *_ in bars}) > 3
        assert {tier for *_, tier, _, _ in bars} == {"ram"}
        assert {fill for *_, fill, _ in bars} == {"rgb(50, 116, 168)"}
        assert {level for *_, level in bars} >= {1, 2}
        assert all(x > 0 for _, _, x, _, _, level in bars if level > 1)


def test_checkpoints_are_marked_where_they_are(browser: Browser) -> None:
    with engine_of(Family.HYBRID, n_seqs=1, n_ctx=1024) as engine:
        for n in range(3):
            ask(engine, join(span(200, 1), span(100, n + 2)), 2, user_starts=(0, 200)).wait()
        engine.flush()
        app = create_app(engine, None, ChatTemplate("chatml", add_bos=True))
        with serving(app) as url, opened(browser, url) as page:
            page.wait_for(f"{TREE}.length")
            branches = httpx.get(f"{url}/dashboard/data").json()["tree"]["branches"]
            marked = [each for each in branches if each.get("n_checkpoints")]
            assert marked
            marks = "document.querySelectorAll('#tree .mark')"
            assert page.run(f"{marks}.length") == sum(each["n_checkpoints"] for each in marked)
            assert "checkpoint" in text(page, "#tree-key")
            for each in marked:
                g = f"document.querySelector('#tree [data-key=\"{each['number']}\"]')"
                x, width, *at = page.run(f"""(() => {{
                  const shape = {g}.querySelector('.shape');
                  return [shape.getAttribute('x'), shape.getAttribute('width'),
                    ...[...{g}.querySelectorAll('.mark')].map((mark) => mark.getAttribute('x1'))]
                    .map(Number);
                }})()""")
                start = each.get("start", 0)
                wanted = [
                    x + width * (position - start) / (each["end"] - start)
                    for position in each["checkpoints"]
                ]
                assert at == pytest.approx(wanted)


def test_everything_is_reached_by_keyboard_and_one_sees_where_one_is(
    browser: Browser, server: Served
) -> None:
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length")
        seen: list[dict[str, Any]] = []
        while len(seen) < 40:
            page.press("Tab")
            now = focused(page)
            if now["name"] == "body":
                break
            seen.append(now)
        assert all(each["seen"] for each in seen)
        names = [each["name"] for each in seen]
        assert names.count("input") == 1, "a group of radio buttons is one stop"
        assert "summary" in names
        assert names.count("g") == 1, "so is a tree"
        assert names.count("button") == 6
        page.press("Tab", shift=True)
        page.press("Enter")
        assert page.run("document.querySelectorAll('#requests tr.more:not([hidden])').length") == 1
        assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
        key = focused(page)
        wait_for_updates(page)
        assert focused(page) == key
        page.press(" ")
        assert page.run("document.querySelectorAll('#requests tr.more:not([hidden])').length") == 0


def wait_for_updates(page: Page) -> None:
    """Wait until the page has asked, and shown what it was told, once at least."""
    n_before = len(page.requests())
    page.wait_until(lambda: len(page.requests()) > n_before + 2)


def test_a_request_is_explained_when_it_is_opened(browser: Browser, server: Served) -> None:
    recent = server.client.get("/dashboard/data").json()["recent"]
    asked = next(each for each in recent if each["reused_tokens"])
    explained = server.client.get(f"/explain/{asked['id']}").json()
    with opened(browser, server.url) as page:
        row = f"#request-{asked['id']}"
        page.wait_for(f"document.querySelector('{row}')")
        page.run(f"document.querySelector('[aria-controls={row[1:]}]').click()")
        page.wait_for(f"document.querySelector('{row} dl').dataset.explained === 'told'")
        told = text(page, row)
        assert explained["reason"] in told
        assert explained["kind"].replace("-", " ") in told
        assert explained["before_id"] in told
        assert f"token {explained['token_index']:,}" in told
        assert explained["advice"] in told


def test_arrow_keys_move_in_the_tree(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length >= 7")
        page.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")
        page.press("Home")
        first = focused(page)
        assert "Tokens 0 to" in first["label"]
        branches = {
            str(each["number"]): each
            for each in server.client.get("/dashboard/data").json()["tree"]["branches"]
        }
        tops = [key for key, each in branches.items() if "parent" not in each]
        assert first["key"] in tops
        above = next(str(each["parent"]) for each in branches.values() if "parent" in each)
        page.run(f"document.querySelector('#tree [data-key=\"{above}\"]').focus()")
        page.press("ArrowRight")
        child = focused(page)["key"]
        assert str(branches[child]["parent"]) == above
        page.press("ArrowLeft")
        assert focused(page)["key"] == above
        page.press("Home")
        visited = {focused(page)["key"]}
        for _ in branches:
            page.press("ArrowDown")
            visited.add(focused(page)["key"])
        assert len(visited) >= 6
        page.press("End")
        last = focused(page)
        assert f"{branches[last['key']]['end']:,}" in text(page, "#chosen")
        assert page.run("document.querySelectorAll('#tree [aria-selected=true]').length") == 1
        wait_for_updates(page)
        assert focused(page) | {"label": ""} == last | {"label": ""}, "an update moves no focus"


@pytest.mark.parametrize("width", [360, 700, 1400])
def test_nothing_sticks_out_whatever_the_width(
    browser: Browser, server: Served, width: int
) -> None:
    with opened(browser, server.url, width=width, height=800) as page:
        page.wait_for(f"{TREE}.length")
        page.run("document.querySelectorAll('#requests button').forEach((each) => each.click())")
        page.run("document.querySelector('#chart-table summary').click()")
        assert page.run("document.documentElement.scrollWidth") == width
        out = page.run(f"""[...document.querySelectorAll('body *')]
          .filter((each) => !each.closest('.sr') && each.getClientRects().length)
          .filter((each) => each.getBoundingClientRect().right > {width} + 0.5)
          .map((each) => each.outerHTML.slice(0, 80))""")
        assert out == []


def test_light_and_dark_can_be_read(browser: Browser, server: Served) -> None:
    colours = """[getComputedStyle(document.documentElement).backgroundColor,
      getComputedStyle(document.body).color]"""
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length")
        page.run("document.querySelector('#requests button').click()")
        seen = []
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            seen.append(page.run(colours))
            found = page.run(CONTRAST)
            assert len(found) > 60
            assert [each for each in found if each[0] < 4.5] == []
        assert seen[0][0] != seen[1][0]
        assert seen[0][1] != seen[1][1]


def test_it_asks_for_a_key_and_keeps_it_in_its_tab(browser: Browser) -> None:
    form = "!document.getElementById('key-form').hidden"
    main = "!document.getElementById('main').hidden"
    with served(api_keys=(KEY,)) as server, browser.page(f"{server.url}/") as page:
        page.wait_for(form)
        assert page.run("document.activeElement.id") == "key"
        page.type("wrong")
        page.press("Enter")
        page.wait_for("document.body.innerText.includes('does not know that API key')")
        assert not page.run(main)
        page.type(KEY)
        page.press("Enter")
        page.wait_for(main)
        assert not page.run(form)
        assert page.run("localStorage.length") == 0
        assert KEY not in page.run("document.documentElement.outerHTML + location.href")
        assert all(KEY not in url for url in page.requests())
        page.call("Page.reload")
        page.wait_for(f"document.readyState === 'complete' && {main}")
        page.run("document.getElementById('forget').click()")
        page.wait_for(form)
        assert page.run("sessionStorage.length") == 0
        assert all("401" in each for each in page.problems())
    with served(api_keys=(KEY,)) as server, browser.page(f"{server.url}/") as page:
        page.wait_for(form)  # another visitor has none


def test_a_server_that_goes_and_comes_back(browser: Browser) -> None:
    status = "document.getElementById('status').textContent"
    with socket.socket(proto=socket.IPPROTO_TCP) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with engine_of() as engine:
        app = create_app(engine, None, ChatTemplate("chatml", add_bos=True))
        with at_port(app, port):
            page_of = browser.page(f"{url}/")
            page = page_of.__enter__()
            page.wait_for(f"{status} === 'live'")
        try:
            page.wait_for(f"{status}.startsWith('Connection lost')")
            assert page.run("document.getElementById('main').classList.contains('stale')")
            assert page.run("getComputedStyle(document.getElementById('main')).opacity") < "1"
            ask(engine, span(100, 1), 2).wait()
            with at_port(app, port):
                page.wait_for(f"{status} === 'live'")
                page.wait_for("document.querySelectorAll('#requests tr.request').length === 1")
        finally:
            page_of.__exit__(None, None, None)


@contextlib.contextmanager
def at_port(app: FastAPI, port: int) -> Iterator[None]:
    """Serve at a port."""
    config = uvicorn.Config(
        app, port=port, log_level="critical", access_log=False, ws="none", http="h11"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the server did not stop"


def test_a_server_that_still_loads_is_waited_for(browser: Browser, server: Served) -> None:
    told = json.dumps({"error": {"code": 503, "message": "Loading model"}})
    with opened(browser, server.url) as page:
        page.run(f"""window.asked = fetch;
          window.fetch = async () => new Response({json.dumps(told)}, {{status: 503}})""")
        page.wait_for("document.getElementById('status').textContent.startsWith('Loading model')")
        page.run("window.fetch = window.asked")
        page.wait_for("document.getElementById('status').textContent === 'live'")


def test_it_asks_less_often_while_nobody_looks(browser: Browser, server: Served) -> None:
    hide = """(() => {
      Object.defineProperty(document, 'hidden', {value: %s, configurable: true});
      document.dispatchEvent(new Event('visibilitychange'));
    })()"""
    note = """(() => {
      const set = window.setTimeout;
      window.waits = [];
      window.setTimeout = (what, ms, ...rest) => { waits.push(ms); return set(what, ms, ...rest); };
    })()"""
    with opened(browser, server.url) as page:
        page.wait_for(f"{TREE}.length")
        page.run(note)
        page.wait_for("waits.includes(1000)")
        page.run(hide % "true")
        page.wait_for("waits.at(-1) === 15000")
        page.run("waits.length = 0")
        page.run(hide % "false")
        page.wait_for("waits.includes(1000)")


def test_what_clients_write_is_shown_as_text(browser: Browser) -> None:
    with engine_of() as engine:
        app = create_app(engine, None, ChatTemplate("chatml", add_bos=True))
        engine.model_name = NASTY
        ask(engine, span(100, 1), 2, label=NASTY, salt=NASTY).wait()
        engine.flush()
        with serving(app) as url, opened(browser, url) as page:
            page.wait_for(f"{TREE}.length")
            page.run("document.querySelector('#requests button').click()")
            assert NASTY in text(page, "#requests tr.more")
            assert text(page, "#model") == NASTY
            assert page.run("document.images.length") == 0
            assert page.run("document.title").startswith(NASTY)
            content = httpx.get(f"{url}/dashboard/data").text
            assert content.count("onerror") == 2, "a salt is told nobody"


def test_what_a_page_may_not_do_is_not_done(browser: Browser, server: Served) -> None:
    with browser.page(f"{server.url}/") as page:
        page.wait_for("!document.getElementById('main').hidden")
        tried = page.run("""(async () => {
          const tried = [];
          try { document.body.innerHTML = '<p>x'; tried.push('html'); } catch { /* refused */ }
          try { eval('1'); tried.push('eval'); } catch { /* refused */ }
          try { await fetch('http://127.0.0.1:9/'); tried.push('fetch'); } catch { /* refused */ }
          const script = document.createElement('script');
          try { script.textContent = 'window.ran = true'; document.body.append(script); }
          catch { /* refused */ }
          if (window.ran) tried.push('script');
          return tried;
        })()""")
        assert tried == []
        refused = "\n".join(page.problems())
        assert "connect-src 'self'" in refused
