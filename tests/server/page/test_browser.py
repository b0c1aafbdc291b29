"""The page in a browser: what it shows, logs and asks for."""

import time

import pytest
from browser import BROWSER, browsing
from page_llm import FAILS, HANGS, PageLLM
from served import serving

from jaxspec import SamplingParams
from jaxspec.viz.colored_tokens import html_ground

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no browser here: apt-get install chromium"
)

READY = "document.getElementById('engine').textContent === 'ready'"
DONE = "document.getElementById('done').textContent"
IS_WIDER = "document.documentElement.scrollWidth > innerWidth"
HTML = "<script>window.bad = 1</script><img src=x onerror='window.bad = 1'><b>bold</b>"
GROUNDS = "[...document.querySelectorAll('.drafted')].map(e => [e.textContent, e.title, {}])"


@pytest.fixture(scope="module")
def tab():
    with browsing() as page:
        yield page


@pytest.fixture
def page(tab):
    """A tab that has logged nothing; in the end it must not have done so either."""
    tab.console.clear()
    tab.requests.clear()
    yield tab
    assert tab.console == []


@pytest.fixture(scope="module")
def scripted():
    with serving(lambda: PageLLM([HTML, " and more", "words" * 40])) as found:
        yield found


def say(page, text):
    page.type("#prompt", text)
    page.press("Enter", 13)


def choose(page, setting, value):
    page.value("document.getElementById('settings').open = true")
    page.type(f"#{setting}", value)


def test_an_answer_is_streamed_in_colours_beside_the_engine_s_stats(page, served, reference):
    page.open(served.root)
    page.wait(READY)
    choose(page, "max_tokens", "48")
    say(page, "Test that the queue is empty")
    page.wait("document.querySelector('#log article:nth-child(2) .text span')", 240)
    page.wait(DONE, 240)
    messages = [{"role": "user", "content": "Test that the queue is empty"}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    (expected,) = reference.chat(messages, params, use_tqdm=False)
    assert page.text("#log article:nth-child(2) .text") == expected.outputs[0].text
    done = page.text("#done")
    assert done.startswith("The answer is complete: 48 tokens, first token after ")
    assert done.endswith(" tokens a second.")
    ground = "getComputedStyle(e).backgroundColor"
    drafted = page.value(GROUNDS.format(ground))
    colours = {title: colour for _, title, colour in drafted}
    assert set(colours) <= {f"draft {i}" for i in range(1, 9)}
    for title, colour in colours.items():
        red, green, blue = bytes.fromhex(html_ground(int(title.split()[1]))[1:])
        assert colour == f"rgb({red}, {green}, {blue})"
    assert len(drafted) == sum(position > 0 for position in expected.outputs[0].draft_positions)
    page.wait("document.querySelectorAll('#acceptance tr').length")
    assert "%" in page.text("#acceptance") and "weights" in page.text("#memory")
    assert page.text("#pages").endswith(f" of {served.llm.shapes.num_pages - 1}")


def test_nothing_is_asked_of_another_host(page, scripted):
    page.open(scripted.root)
    page.wait(READY)
    say(page, "hello")
    page.wait(DONE)
    assert {address.rpartition(":")[0] for address in page.requests} <= {"http://127.0.0.1", "data"}


def test_steps_of_host_and_device_are_drawn_while_they_run(page, served):
    page.open(served.root)
    page.wait("document.querySelectorAll('#stages li').length === 5")
    page.wait(READY)
    choose(page, "max_tokens", "64")
    say(page, "A loop over all files")
    page.wait(DONE, 240)
    page.wait("document.querySelectorAll('#steps rect').length > 4")
    assert "of which the device ran" in page.text("#span")


def test_html_of_a_model_is_text(page, scripted):
    page.open(scripted.root)
    say(page, HTML)
    page.wait(DONE)
    asked, answer = page.value(
        "[...document.querySelectorAll('#log .text')].map(e => e.textContent)"
    )
    assert asked == HTML and answer == HTML + " and more" + "words" * 40
    assert page.value("document.querySelectorAll('#log b, #log img, #log script').length") == 0
    assert page.value("window.bad") is None


def test_the_policy_runs_no_other_script(tab, scripted):
    tab.open(scripted.root)
    tab.value(
        "document.body.append(Object.assign(document.createElement('script'),"
        "{textContent: 'window.bad = 1'}))"
    )
    assert tab.value("window.bad") is None


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stop_aborts(page, scripted, way):
    page.open(scripted.root)
    say(page, HANGS)
    page.wait("document.querySelectorAll('.drafted').length")
    stream = scripted.llm.streams[-1]
    assert page.value("document.getElementById('send').disabled") and not stream.is_closed
    page.click("#stop") if way == "click" else page.press("Escape", 27)
    page.wait(DONE)
    assert page.text("#done").startswith("Stopped: ")
    end = time.monotonic() + 20
    while not stream.is_closed:
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.02)
    say(page, "again")
    page.wait(f"({DONE}).startsWith('The answer is complete')")


def test_an_error_within_an_answer_is_shown_and_what_came_stays(page, scripted):
    page.open(scripted.root)
    say(page, FAILS)
    page.wait(DONE)
    assert not page.value("document.getElementById('wrong').hidden")
    assert page.text("#wrong") and "planted" not in page.text("#wrong")
    assert page.text("#log article:nth-child(2) .text").startswith(HTML)


def test_a_refusal_is_shown_and_gives_the_message_back(tab, scripted):
    """A browser logs the status itself, so the console is not empty here."""
    tab.open(scripted.root)
    choose(tab, "seed", "1.5")
    say(tab, "hello")
    tab.wait(DONE)
    assert tab.text("#wrong").startswith("seed must be")
    assert tab.value("document.getElementById('prompt').value") == "hello"
    assert tab.value("document.querySelectorAll('#log article').length") == 0


def test_a_server_with_keys_is_asked_with_the_key(tab):
    with serving(lambda: PageLLM(["yes"]), api_key=("secret",)) as found:
        tab.open(found.root)
        tab.wait("document.getElementById('engine').textContent.includes('wants a key')")
        choose(tab, "key", "secret")
        say(tab, "hello")
        tab.wait(DONE)
        assert tab.text("#log article:nth-child(2) .text") == "yes"
        tab.open("about:blank")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_s_width_needs_no_scrolling_sideways(page, scripted, dark):
    page.open(scripted.root, width=390, height=780, dark=dark)
    page.wait(READY)
    say(page, "long" * 100)
    page.wait(DONE)
    assert not page.value(IS_WIDER)
    page.value("document.getElementById('settings').open = true")
    assert not page.value(IS_WIDER)
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark


def test_keys_and_screen_readers_reach_everything(page, scripted):
    page.open(scripted.root)
    page.wait(READY)
    page.value("document.getElementById('settings').open = true")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if node["role"]["value"] in ("button", "textbox", "spinbutton", "DisclosureTriangle")
    ]
    assert len(controls) >= 9 and all(name for _, name in controls)
    roles = {node["role"]["value"] for node in nodes}
    assert {"main", "heading", "log", "status", "complementary", "table"} <= roles
    page.type("#prompt", "hello")
    page.press("Tab", 9)
    assert page.value("document.activeElement.id") == "send"
    page.press("Enter", 13)
    page.wait(DONE)


@pytest.mark.parametrize("end, said", [("data: [DONE]", "1"), ("", "The connection ended before")])
def test_an_answer_without_its_end_is_an_error(page, scripted, end, said):
    page.open(scripted.root)
    text = f"data: 1\\n\\n{end}\\n\\n"
    read = f"""(async () => {{
      let last = "";
      try {{
        for await (const chunk of events(new Response("{text}"))) last = String(chunk);
        return last;
      }} catch (error) {{
        return error.message;
      }}
    }})()"""
    assert page.value(read).startswith(said)
