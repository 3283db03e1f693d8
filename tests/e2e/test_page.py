"""The chat page in a real Chromium, against a real parent with the fake worker.

Waits are Playwright's: until a condition holds, with a deadline. Where no Chromium can be had the tests say
so and are skipped; on CI they fail.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from parent import keys
from tests.process.harness import write_model

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Server:
    """`mlxd serve` with the fake worker, as a child; `script` is what the fake worker is told to do."""

    def __init__(self, folder: Path, script: dict[str, Any], **settings: Any) -> None:
        self.folder = folder
        self.settings = settings
        self.model = folder / "model"
        write_model(self.model, script, ("fake",))
        write_model(folder / "other", script)
        self.start(port=0)

    def start(self, port: int) -> None:
        settings = {"data_dir": str(self.folder / "data"), "port": port, "drain_s": 1.0, **self.settings}
        command = [sys.executable, "-m", "tests.process.serve_fake", json.dumps(settings)]
        command += [str(self.model), str(self.folder / "other")]
        self.log = (self.folder / "log.txt").open("ab")
        self.child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.child.stdout is not None
        self.url = self.child.stdout.readline().strip()
        assert self.url, (self.folder / "log.txt").read_text()

    def engine(self) -> dict[str, Any]:
        with httpx2.Client(trust_env=False) as client:
            state: dict[str, Any] = client.get(f"{self.url}/engine").json()
        return state

    def kill_worker(self) -> None:
        os.kill(self.engine()["pid"], signal.SIGKILL)

    def close(self) -> None:
        self.child.terminate()
        self.child.wait(timeout=20)
        assert self.child.stdout is not None
        self.child.stdout.close()
        self.log.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "no Chromium here: install Debian's `chromium`, or set CHROMIUM=/path/to/it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tmp_path_factory.mktemp("page"), {"tokens": 12, "ms_per_token": 5})) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page with an empty store. The test fails if anything was logged as an error or asked elsewhere."""
    context = browser.new_context()
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    opened.on(
        "request",
        lambda asked: errors.append(asked.url) if not asked.url.startswith("http://127.0.0.1:") else None,
    )
    opened.errors = errors  # type: ignore[attr-defined]
    yield opened
    context.close()
    # A server that was stopped on purpose, or an answer with an error status, is logged by the browser itself.
    assert [error for error in errors if not re.search(r"Failed to load resource|net::ERR_", error)] == []


def show(page: Page, server: Server) -> None:
    page.goto(server.url)
    expect(page.locator("#worker-label")).to_have_text("ready")


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answer(page: Page) -> Any:
    return page.locator(".message.assistant").last


def is_done(page: Page) -> None:
    expect(page.locator(".message.assistant").last.locator(".foot")).to_be_visible(timeout=20_000)


def fake(**script: Any) -> str:
    """A prompt that tells the fake worker what to do with this request."""
    return f"hello fake:{json.dumps(script)}"


def test_the_page_loads_with_the_models_name_and_nothing_from_elsewhere(page: Page, server: Server) -> None:
    show(page, server)
    expect(page.locator("#model")).to_have_text("org/fake-1b")
    expect(page).to_have_title("org/fake-1b · mlxd")
    expect(page.locator("#input")).to_be_focused()
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#empty")).to_be_visible()
    assert page.errors == []  # type: ignore[attr-defined]


def test_an_answer_grows_as_it_comes_and_ends_with_its_numbers(page: Page, server: Server) -> None:
    show(page, server)
    page.evaluate(
        """() => { window.lengths = []; new MutationObserver(() => {
            const text = document.querySelector(".message.assistant .text")?.textContent ?? "";
            if (text.length > (window.lengths.at(-1) ?? 0)) window.lengths.push(text.length);
        }).observe(document.body, {subtree: true, childList: true, characterData: true}); }"""
    )
    ask(page, fake(tokens=40, ms_per_token=15))
    is_done(page)
    assert len(page.evaluate("window.lengths")) >= 3
    expect(answer(page).locator(".foot")).to_contain_text(
        re.compile(r"40 tokens\s*\d+\.\d tok/s\s*first after \d")
    )
    assert len(answer(page).locator(".text").inner_text().split()) == 40
    expect(page.locator(".message.user .text")).to_contain_text("hello")


def test_reasoning_is_folded_away_and_can_be_opened(page: Page, server: Server) -> None:
    show(page, server)
    ask(page, fake(tokens=10, reasoning=4))
    is_done(page)
    folded = answer(page).locator("details.reasoning")
    expect(folded.locator("div")).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.locator("div")).to_be_visible()
    assert len(folded.locator("div").inner_text().split()) == 4
    assert len(answer(page).locator(".text").inner_text().split()) == 6


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_and_frees_the_worker(page: Page, server: Server, how: str) -> None:
    show(page, server)
    ask(page, fake(tokens=100_000, ms_per_token=10))
    expect(answer(page).locator(".text")).not_to_be_empty()
    if how == "button":
        page.click("#stop")
    else:
        page.press("#input", "Escape")
    expect(answer(page).locator(".foot")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_function("async () => (await (await fetch('/engine')).json()).in_flight === 0")


def test_enter_sends_and_shift_enter_makes_a_line(page: Page, server: Server) -> None:
    show(page, server)
    page.focus("#input")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator("#input")).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    is_done(page)
    assert page.locator(".message.user .text").inner_text() == "one\ntwo"
    expect(page.locator("#input")).to_have_value("")


def test_a_killed_worker_shows_restarting_then_ready_and_the_answer_goes_on(
    page: Page, tmp_path: Path
) -> None:
    script = {"tokens": 60, "ms_per_token": 30, "load_ms": 500}
    with closing(Server(tmp_path, script)) as server:
        show(page, server)
        page.evaluate(
            """() => {
                const label = document.querySelector("#worker-label");
                window.labels = [];
                const note = () => window.labels.push(label.textContent);
                new MutationObserver(note).observe(label, {childList: true, characterData: true, subtree: true});
            }"""
        )
        ask(page, "a long story")
        expect(answer(page).locator(".text")).to_contain_text(re.compile(r"\S+ \S+ \S+ "))
        server.kill_worker()
        expect(page.locator("#worker-label")).to_have_text("restarting")
        expect(page.locator("#worker-label")).to_have_text("ready", timeout=20_000)
        is_done(page)
        assert len(answer(page).locator(".text").inner_text().split()) == 60
        expect(answer(page).locator(".fault")).to_have_count(0)
        assert set(page.evaluate("window.labels")) == {"restarting", "ready"}
        assert server.engine()["restarts"] == 1


def test_a_worker_that_dies_too_often_can_be_started_again_from_the_page(page: Page, tmp_path: Path) -> None:
    script = {"crash_at_load": 3}
    with closing(Server(tmp_path, script, restart_budget=2, half_open_s=600.0)) as server:
        page.goto(server.url)
        expect(page.locator("#worker-label")).to_have_text("stopped", timeout=20_000)
        expect(page.locator("#notice")).to_contain_text("died again and again")
        page.click("#notice-act")
        expect(page.locator("#worker-label")).to_have_text("ready", timeout=20_000)
        expect(page.locator("#notice")).to_be_hidden()


HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"


def test_markup_stays_text_wherever_it_comes_from(page: Page, server: Server) -> None:
    def answer_with_markup(route: Route) -> None:
        pieces = [{"reasoning_content": HOSTILE}, {"content": HOSTILE[:7]}, {"content": HOSTILE[7:]}]
        body = "".join(f"data: {json.dumps({'choices': [{'delta': piece}]})}\n\n" for piece in pieces)
        route.fulfill(content_type="text/event-stream", body=f"{body}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer_with_markup)
    show(page, server)
    ask(page, HOSTILE)
    is_done(page)
    for reload in (False, True):
        if reload:  # from the browser's store this time
            page.reload()
            is_done(page)
        assert page.locator(".message.user .text").inner_text() == HOSTILE
        assert answer(page).locator(".text").inner_text() == HOSTILE
        assert page.locator("#messages img, #messages script, #messages b").count() == 0
        assert "owned" not in page.title()


def test_a_refused_question_says_why_and_can_be_asked_again(page: Page, server: Server) -> None:
    show(page, server)
    ask(page, fake(refuse="context_exceeded"))
    expect(answer(page).locator(".fault")).to_be_visible()
    expect(answer(page).locator(".fault")).not_to_be_empty()
    asked: list[dict[str, Any]] = []
    page.on("request", lambda made: asked.append(made.post_data_json) if made.method == "POST" else None)
    answer(page).get_by_text("Try again").click()
    expect(answer(page).locator(".fault")).to_be_visible()
    ask(page, "something else")
    is_done(page)
    # The unanswered question stays on the page but not in the prompt, where turns alternate.
    assert [len(made["messages"]) for made in asked] == [1, 1]
    expect(page.locator(".message.user")).to_have_count(2)


def test_a_failure_in_mid_answer_keeps_the_text_and_says_so(page: Page, server: Server) -> None:
    show(page, server)
    ask(page, fake(tokens=20, fail_after=3))
    expect(answer(page).locator(".fault")).to_be_visible()
    assert answer(page).locator(".text").inner_text().strip()


def test_a_server_that_goes_away_is_told_and_found_again(page: Page, tmp_path: Path) -> None:
    server = Server(tmp_path, {"tokens": 5})
    try:
        show(page, server)
        server.close()
        expect(page.locator("#worker-label")).to_have_text("not connected", timeout=20_000)
        expect(page.locator("#notice")).to_contain_text("mlxd serve")
        ask(page, "anyone there?")
        expect(answer(page).locator(".fault")).to_contain_text("does not answer")
        server.start(port=int(server.url.rpartition(":")[2]))
        expect(page.locator("#worker-label")).to_have_text("ready", timeout=30_000)
        expect(page.locator("#notice")).to_be_hidden()
        answer(page).get_by_text("Try again").click()
        expect(answer(page).locator(".foot")).to_contain_text("5 tokens")
    finally:
        server.close()


def test_settings_reach_the_request_and_outlive_a_reload(page: Page, server: Server) -> None:
    show(page, server)
    page.click("#settings-button")
    expect(page.locator("#settings")).to_be_visible()
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.4")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    page.reload()
    expect(page.locator("#worker-label")).to_have_text("ready")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hello")
    request = sent.value.post_data_json
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    assert request["temperature"] == 0.4
    is_done(page)
    page.click("#settings-button")
    page.get_by_text("Use the model's own").click()
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "again")
    assert "temperature" not in sent.value.post_data_json
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_another_model_can_be_chosen_and_is_loaded_when_it_is_asked(page: Page, server: Server) -> None:
    show(page, server)
    page.click("#settings-button")
    page.select_option("#choice", "other")
    expect(page.locator("#model")).to_have_text("other")
    expect(page.locator("#worker-label")).to_have_text("not loaded")
    page.keyboard.press("Escape")
    ask(page, fake(tokens=5))
    is_done(page)
    expect(page.locator("#worker-label")).to_have_text("ready")
    page.reload()
    expect(page.locator("#model")).to_have_text("other")
    page.click("#settings-button")
    page.select_option("#choice", "")
    expect(page.locator("#model")).to_have_text("org/fake-1b")
    assert page.errors == []  # type: ignore[attr-defined]


def test_a_server_with_keys_is_entered_by_typing_one(page: Page, tmp_path: Path) -> None:
    with closing(Server(tmp_path, {"tokens": 4})) as server:
        show(page, server)
        key = keys.add(tmp_path / "data", "me")
        page.goto(server.url)
        expect(page.locator("#worker-label")).to_have_text("locked")
        page.click("#notice-act")
        page.fill("#key", "not the right one")
        page.press("#key", "Enter")
        expect(page.locator("#worker-label")).to_have_text("locked")
        page.fill("#key", key)
        page.press("#key", "Enter")
        expect(page.locator("#worker-label")).to_have_text("ready")
        page.reload()
        expect(page.locator("#worker-label")).to_have_text("ready")
        ask(page, "hello")
        is_done(page)


def test_a_new_chat_forgets_the_old_one(page: Page, server: Server) -> None:
    show(page, server)
    ask(page, "hello")
    is_done(page)
    page.reload()
    is_done(page)
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    page.reload()
    expect(page.locator(".message")).to_have_count(0)


def test_on_a_phone_nothing_is_cut_off(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    show(page, server)
    ask(page, "x" * 400)
    is_done(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    box = page.locator("#composer").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    assert box["y"] + box["height"] <= 640


def test_a_long_answer_is_followed_unless_the_reader_scrolled_up(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": 500, "height": 400})
    show(page, server)
    ask(page, fake(tokens=400, ms_per_token=2))
    is_done(page)
    below = "(main) => main.scrollHeight - main.scrollTop - main.clientHeight"
    assert page.eval_on_selector("#scroller", below) < 60
    ask(page, fake(tokens=100_000, ms_per_token=5))
    expect(answer(page).locator(".text")).to_contain_text(re.compile(r"\S+ \S+ "))
    page.evaluate("document.querySelector('#scroller').scrollTop = 0")
    length = len(answer(page).locator(".text").inner_text())
    page.wait_for_function(
        "(length) => document.querySelector('.message.running .text').textContent.length > length + 50",
        arg=length,
    )
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == 0
    page.click("#stop")
    expect(answer(page).locator(".foot")).to_contain_text("stopped")
