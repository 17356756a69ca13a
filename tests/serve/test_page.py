"""The page in a real browser, on the real model: what a person does, and what must never happen."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 300.0
QUESTION = "Write two sentences about the history of rope."


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def patient(browser_or_context):
    """A new page that waits long for what must come.

    `wait_for_function` is no way to wait on it: what is not true at once is looked at again by `eval`, which the page's
    policy forbids.
    """
    page = browser_or_context.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    return page


@pytest.fixture
def open_page(browser, smol):
    """A function that opens the page; what it logs and whom it asks is checked in the end."""
    logged, hosts, contexts = [], set(), []

    def opened(configure=True, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options))
        page = patient(contexts[-1])
        page.on("console", lambda message: logged.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(smol.url + "/")
        page.wait_for_selector("#model option", state="attached")
        if configure:
            page.click("#show-settings")
            for name, value in (("seed", "7"), ("max_tokens", "40"), ("temperature", "0.8")):
                page.fill(f"#{name}", value)
            page.click("#show-settings")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert logged == []
    assert hosts == {smol.url.removeprefix("http://")}
    assert smol.becomes_idle()


def ask(page, question=QUESTION):
    page.fill("#question", question)
    before = page.locator("article").count()
    page.press("#question", "Enter")
    page.wait_for_selector(f"#messages article:nth-child({before + 2})", state="attached")


def with_body(page, **more):
    """Have the questions of a page asked with further fields; the bodies that were sent."""
    bodies = []

    def changed(route):
        bodies.append({**json.loads(route.request.post_data), **more})
        route.continue_(post_data=json.dumps(bodies[-1]))

    page.route("**/v1/chat/completions", changed)
    return bodies


ENDLESS = {"ignore_eos": True, "slide": True, "max_tokens": 10**6}
"""What makes an answer go on until somebody ends it, on however quick a machine."""


def answered(page):
    page.wait_for_selector("article.assistant:last-child[aria-busy=false]")
    return page.locator("article.assistant").last.locator(".text").inner_text()


def test_an_answer_is_that_of_the_api_and_follow_ups_see_it(open_page, smol):
    page = open_page()
    ask(page)
    text = answered(page).rstrip()
    body = {"messages": [{"role": "user", "content": QUESTION}], "seed": 7, "max_tokens": 40}
    body |= {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    expected = smol.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text == expected.rstrip()
    ask(page, "And now in German?")
    answered(page)
    assert page.locator("article").count() == 4
    striped = page.locator(".page-map li.shared").count()
    assert striped >= 3, "the pages of the first question and answer are found again"


def test_retry_gives_the_same_seed_the_same_answer_and_edit_brings_the_question_back(open_page):
    page = open_page()
    ask(page)
    first = answered(page)
    page.click("text=Try again")
    assert answered(page) == first
    page.click("text=Edit")
    assert page.input_value("#question") == QUESTION
    assert page.locator("article").count() == 0
    ask(page)
    page.click("#new")
    assert page.locator("article").count() == 0


def test_stop_ends_the_request_on_the_server(open_page, smol):
    page = open_page()
    with_body(page, **ENDLESS)
    ask(page)
    page.wait_for_selector(".token")
    page.click("#stop")
    page.wait_for_selector("text=Stopped.")
    assert smol.becomes_idle()


def rows(page):
    """Token, and its probability after every knob, of the candidates that are shown."""
    cells = page.locator("#token tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    return [[row[0].removesuffix(" ←"), *row[1:]] for row in cells]


def test_a_token_shows_its_candidates_and_knobs_compute_its_step_again(open_page):
    page = open_page()
    ask(page)
    answered(page)
    token = page.locator(".token").filter(has_text=re.compile(r"\w")).nth(5)
    token.hover()
    page.wait_for_selector("#token tbody tr.drawn")
    before = rows(page)
    assert len(before) >= 12 and len(before[0]) == 6  # raw, temperature, top_k, top_p, min_p
    assert page.locator("#token tbody tr.drawn").count() == 1
    assert any(row[-1] == "0" for row in before), "something was cut"
    answer = page.locator("article.assistant .text").inner_text()
    for value, check in (("2", lambda now: now[0][2] != before[0][2]), ("0.8", lambda now: now == before)):
        with page.expect_response("**/v1/completions"):
            page.locator("#knob-temperature").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })) }", value
            )
        note = sync_api.expect(page.locator("#token p").first)
        note.not_to_have_text(re.compile("^Computing"), timeout=1000 * PATIENCE_S)
        assert check(rows(page))
    assert page.locator("article.assistant .text").inner_text() == answer


def test_tokens_are_walked_with_the_keyboard_alone(open_page):
    page = open_page(configure=False)
    with_body(page, seed=7, max_tokens=8, ignore_eos=True)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant")
    answered(page)
    assert page.locator(".token[tabindex='0']").count() == 1, "an answer is one stop of the Tab key"
    page.locator(".token[tabindex='0']").focus()
    titles = [page.locator("#token h2").inner_text()]
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        titles.append(page.locator("#token h2").inner_text())
    assert len(set(titles)) == 4
    page.keyboard.press("ArrowLeft")
    assert page.locator("#token h2").inner_text() == titles[2]


def test_speed_and_pages_are_told_in_words_too(open_page):
    page = open_page()
    ask(page)
    answered(page)
    page.wait_for_selector("text=/tokens\\/s in this decode step/")
    assert page.locator("#speed [role=img]").first.get_attribute("aria-label").endswith(("%", "ran"))
    assert page.locator(".page-map li").count() >= 3
    assert "of 16 tokens" in page.locator(".page-map li").last.get_attribute("title")
    page.click("#show-inside")
    assert not page.locator("#inside").is_visible()
    ask(page, "Once more, please.")
    answered(page)
    assert page.locator("article.assistant").last.locator(".token[role=button]").count() == 0, (
        "off: nothing is asked"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_light_and_dark_wide_and_narrow(open_page, scheme, width):
    """Nothing is wider than the screen, and all text stands out from its ground at 4.5 to 1 (WCAG 2 AA)."""
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 740})
    ask(page)
    answered(page)
    page.locator(".token").filter(has_text=re.compile(r"\w")).nth(2).hover()
    page.wait_for_selector("#token tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    worst = page.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


CONTRAST = """() => {
  const numbers = (c) => c.match(/[\\d.]+/g).map(Number);
  const luminance = (c) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = numbers(c).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if ((numbers(c)[3] ?? 1) > 0) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = [...document.querySelectorAll("body *")].filter(
    (e) => !e.disabled && e.offsetParent && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  const found = texts.map((e) => {
    const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.tagName, e.className, e.textContent.slice(0, 30)];
  });
  return found.sort((x, y) => x[0] - y[0])[0];
}"""


def test_on_a_narrow_screen_everything_can_be_reached(open_page):
    page = open_page(viewport={"width": 360, "height": 740})
    top = page.locator("#inside").bounding_box()["y"]
    for name in ("#messages", "#question", "#send", "#stop"):
        box = page.locator(name).bounding_box()
        assert box["y"] + box["height"] <= top, f"{name} is covered"


def canned(page, deltas, trace=None):
    """Have answers of the server replaced by these."""
    choices = [
        {"index": 0, "delta": {"content": text}, **({"trace": [trace]} if trace else {})} for text in deltas
    ]
    body = (
        "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"
    )
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )


def test_markup_is_text_in_questions_answers_and_candidates(open_page, smol):
    page = open_page()
    markup = "<img src=x onerror='window.ran=1'><script>window.ran=2</script> &lt; **a**"
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "trace": 3}
    trace = smol.post("/v1/chat/completions", body).json()["choices"][0]["trace"][0]
    trace["text"] = trace["candidates"][0]["text"] = markup
    canned(page, [markup], trace)
    ask(page, markup)
    assert answered(page) == markup
    assert page.locator("article.user .text").inner_text() == markup
    page.hover(".token")
    page.wait_for_selector("#token tbody tr")
    assert page.locator("img, main script").count() == 0
    assert page.evaluate("window.ran") is None


def test_parts_of_characters_are_shown_but_are_no_text(open_page, smol):
    """Most emoji are several tokens, of which only the last one brings text."""
    page = open_page()
    bodies = with_body(page, regex="[😀-🙏]{3}")
    ask(page)
    text = answered(page)
    del bodies[0]["stream_options"]
    expected = smol.post("/v1/chat/completions", {**bodies[0], "stream": False}).json()["choices"][0]
    assert text == expected["message"]["content"]
    assert len(text) == 3
    assert page.locator(".token").count() == len(expected["trace"]) > 4


def test_a_long_answer_is_drawn_a_frame_at_a_time(open_page, smol):
    """Drawn token by token, 7,000 tokens took more than a minute of the browser's time."""
    page = open_page()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "trace": 3}
    trace = smol.post("/v1/chat/completions", body).json()["choices"][0]["trace"][0]
    canned(page, [f" word{i}" for i in range(1000)], trace)
    page.evaluate("""() => {
      window.drawn = 0;
      new MutationObserver(() => window.drawn++).observe(document.getElementById("pages"), { childList: true });
    }""")
    ask(page, "a")
    assert answered(page).endswith("word999")
    assert page.locator(".token").count() == 1000
    assert 0 < page.evaluate("window.drawn") < 500


def test_a_server_that_breaks_off_is_told(browser, smol):
    page = patient(browser)
    page.goto(smol.url)
    page.wait_for_selector("#model option", state="attached")
    with_body(page, **ENDLESS)
    ask(page)
    page.wait_for_selector(".token")
    smol.on_loop(lambda: [each.transport.abort() for each in list(smol.server.server_state.connections)])
    page.wait_for_selector("text=The connection to the server broke off.")
    assert page.locator(".token").count() > 0, "what there was stays"
    assert smol.becomes_idle()
    page.close()


def test_the_page_may_only_load_from_its_own_server(smol):
    answer = smol.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
    assert smol.get("/page/index.html").status_code == 404
    assert smol.get("/page/../app.py").status_code == 404


def test_a_key_is_asked_for_in_the_settings(browser, smollm2):
    command = [sys.executable, "-m", "ropewalk", "serve", smollm2, "--port", "0", "--context", "256"]
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"ROPEWALK_API_KEY": "secret-key"}
    )
    try:
        url = next(line.split()[-1] for line in server.stderr if line.startswith("Serving"))
        page = patient(browser)
        page.goto(url)
        page.wait_for_selector("#status.bad")
        assert "API key" in page.locator("#status").inner_text()
        page.click("#show-settings")
        page.fill("#key", "secret-key")
        page.press("#key", "Tab")
        page.wait_for_selector("#model option", state="attached")
        with_body(page, max_tokens=8)
        ask(page, "Hello")
        answered(page)
        page.close()
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
