"""The page as a person meets it, in a real headless Chromium: no fault, no request, and a viewer that works.

Chromium is the system's (`apt-get install chromium`), or the one that the variable CHROMIUM names; without it these
tests skip, and say so. Screenshots at 1280 and 390 pixels are left in pytest's temporary directory.
"""

import os
import shutil
import time

import pytest

from eval.report import write_report
from tests.runs import board, chat, evaluated, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: playwright is not installed")

pytestmark = pytest.mark.slow

HOSTILE = '</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 2">{{7*7}}<!--'
RIGHT_TO_LEFT = "\u202eevil\u2066 \u05d0\u05d1 12 \u200f"
FORMULA = '=HYPERLINK("http://example.invalid/";"x")'
LONG = "0123456789" * 10_000
SHOWN, ROWS, POSITION = "#shown", "#rows button", "#position"


@pytest.fixture(scope="module")
def chromium():
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if path is None:
        pytest.skip(
            "NOT TESTED: there is no Chromium; install one (apt-get install chromium) or set CHROMIUM to its path"
        )
    with playwright.sync_playwright() as api:
        # A container's root has no sandbox to start.
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


class Watched:
    """A page, and everything that went wrong on it: faults, lines on its console, requests for anything but itself."""

    def __init__(self, browser, file, width=1280, height=900):
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(10_000)
        self.wrong, url = [], file.as_uri()
        self.page.on("pageerror", lambda error: self.wrong.append(f"fault: {error}"))
        self.page.on("console", lambda line: self.wrong.append(f"console: {line.text}"))
        self.page.on("request", lambda request: request.url == url or self.wrong.append(f"request: {request.url}"))
        self.page.goto(url)

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def close(self):
        self.page.close()
        assert self.wrong == []


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(episodes) -> the report of a run with these episodes; at the end nothing may have gone wrong on it."""
    pages = []

    def open_(episodes, **view):
        file = write_report(write_run(tmp_path / f"run{len(pages)}", episodes))
        pages.append(Watched(chromium, file, **view))
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


def some_episodes():
    """Four chats of two problems, one board that rescued, one that misled, one evaluation."""
    return [
        chat(("I have 1.", "I have 2.", "\\boxed{3}", "\\boxed{2}"), 0.25),
        chat(("What?", "Two pears.", "\\boxed{3}", "\\boxed{3}"), 0.5, (None, None, 1.0, 1.0), episode=1),
        chat(("", "b", "c", "d"), -0.5, (None, None, 0.0, 0.0), episode=2, step=5),
        chat(("x", "y", "z", "w"), 0.0, problem="stories/2", question="Flat?", step=5),
        board((0.0, 0.0), (1.0, 0.0), problem="stories/3"),
        board((1.0, 0.0), (0.0, 0.0), problem="stories/4"),
        evaluated(question="Held out?", problem="stories/5", adapter=[1.0, 0.0]),
    ]


def test_one_episode_is_shown_whole(opened):
    watched = opened(some_episodes())
    assert watched.text(POSITION) == "1 of 7"
    shown = watched.text(SHOWN)
    for part in ("How many pears?", "Shown to A: Tom has 1.", "Shown to B: Ann has 2.", "Gold answer: 3", "I have 1."):
        assert part in shown
    headers = watched.page.locator(".turn header").all_inner_texts()
    assert [" ".join(header.split()) for header in headers] == [
        "1. A reads nothing advantage +0.25",
        "2. B reads 1 advantage +0.25",
        "3. A ✓ right reads 1, 2 advantage +0.25",
        "4. B ✗ wrong reads 1, 2, 3 advantage +0.25",
    ]
    tokens = watched.page.locator(".said >> nth=0").locator(".token.up-3")  # half of the largest, in fifths
    assert tokens.all_inner_texts() == list("I have 1.")
    watched.page.keyboard.press("ArrowRight")
    watched.page.keyboard.press("ArrowRight")
    assert "(said nothing)" in watched.text(SHOWN) and watched.page.locator("#shown .token.down-5").count() == 3


def test_arrows_say_who_read_what(opened):
    watched = opened(some_episodes())
    said = watched.page.locator(".talk > svg").get_attribute("aria-label")
    assert said == ("Who read what, by message: 2 reads 1, 3 reads 1, 4 reads 1, 3 reads 2, 4 reads 2, 4 reads 3")
    assert watched.page.locator(".talk > svg .head").count() == 6
    heads = watched.page.locator(".talk > svg .head.agent-0").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().y)"
    )
    boxes = watched.page.locator(".turn").evaluate_all(
        "all => all.map(e => [e.getBoundingClientRect().y, e.getBoundingClientRect().bottom])"
    )
    # A's first message goes into messages 2, 3 and 4, and its answer into 4.
    for y, (top, bottom) in zip(heads, (boxes[1], boxes[2], boxes[3], boxes[3]), strict=True):
        assert top <= y <= bottom


def test_buttons_and_keys_step(opened):
    watched = opened(some_episodes())
    page = watched.page
    assert page.locator("#previous").is_disabled()
    page.locator("#next").click()
    assert watched.text(POSITION) == "2 of 7" and "Two pears." in watched.text(SHOWN)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert watched.text(POSITION) == "1 of 7"
    page.keyboard.press("ArrowLeft")
    assert watched.text(POSITION) == "1 of 7"
    page.locator(ROWS).last.click()
    assert watched.text(POSITION) == "7 of 7" and page.locator("#next").is_disabled()
    assert page.locator("#rows [aria-current=true]").count() == 1
    assert "untrained base" in watched.text(SHOWN) and page.locator("#shown [class*=up-]").count() == 0
    # In the search field the arrow keys move the caret.
    page.locator("#search").fill("have")
    page.locator("#search").press("ArrowLeft")
    assert page.locator("#search").evaluate("e => e.selectionStart") == 3


@pytest.mark.parametrize("name, count", [("rescued", 1), ("misled", 1), ("flat group", 1), ("truncated", 0)])
def test_filters(opened, name, count):
    watched = opened(some_episodes())
    watched.page.get_by_label(name, exact=True).check()
    assert watched.text("#count") == f"{count} of 7 episodes"
    if count:
        assert name in watched.text("#shown .about")
    else:
        assert watched.text(POSITION) == "No episode passes these filters"
        assert watched.page.locator("#next").is_disabled() and watched.text(SHOWN) == ""
    watched.page.get_by_label(name, exact=True).uncheck()
    assert watched.text("#count") == "7 of 7 episodes"


def test_selectors_and_search(opened):
    watched = opened(some_episodes())
    page = watched.page.locator("#filters")
    assert page.locator("#step option").all_inner_texts() == ["all", "step 0", "step 5", "evaluations"]
    page.get_by_label("Step").select_option("step 5")
    assert watched.text("#count") == "2 of 7 episodes"
    page.get_by_label("Step").select_option("evaluations")
    assert "Held out?" in watched.text(SHOWN)
    page.get_by_label("Step").select_option("all")
    page.get_by_label("Cell or evaluation").select_option("evaluation: base-channel_on")
    assert watched.text("#count") == "1 of 7 episodes"
    page.get_by_label("Cell or evaluation").select_option("all")
    page.get_by_label("Answers").select_option("all right")
    assert watched.text("#count") == "1 of 7 episodes"
    page.get_by_label("Answers").select_option("any")
    page.get_by_label("Text").fill("TWO PEARS")
    playwright.expect(page.locator("#count")).to_have_text("1 of 7 episodes")
    assert "Two pears." in watched.text(SHOWN)


def test_hostile_text_is_only_text(opened):
    texts = (HOSTILE, RIGHT_TO_LEFT, "\ufffd\ud83d\0", FORMULA)
    watched = opened([chat(texts, question=HOSTILE, facts=[HOSTILE, RIGHT_TO_LEFT], gold=HOSTILE, problem=HOSTILE)])
    page = watched.page
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None
    assert page.locator("#episodes img, #episodes script:not(#data)").count() == 1  # the viewer's own script
    said = page.locator(".said").all_inner_texts()
    assert said[0] == HOSTILE and said[3] == FORMULA and "\u202e" in said[1]
    assert page.locator(".said").evaluate_all("all => all.map(e => getComputedStyle(e).unicodeBidi)") == ["isolate"] * 4
    assert watched.text(".gold").startswith("Gold answer: </script>")


def test_a_long_reply_is_folded(opened):
    long = chat((LONG, "b", "c", "d"))
    long["utterances"][0]["pieces"] = [LONG[i : i + 5] for i in range(0, len(LONG), 5)]
    watched = opened([long])
    said = watched.page.locator(".said").first
    assert said.inner_text() == LONG[:2500] + "…"
    watched.page.get_by_role("button", name="Show all 100,000 characters").click()
    assert said.inner_text() == LONG and watched.page.get_by_role("button", name="Show all").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_can_be_read(opened, width, tmp_path):
    watched = opened(some_episodes(), width=width)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / f"report-{width}.png", full_page=True)
    page.locator(ROWS).nth(4).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#episodes").screenshot(path=tmp_path / f"episodes-{width}.png")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    unnamed = page.locator("button, select, input").evaluate_all(
        "all => all.filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_every_part_of_the_page_with_the_viewer_off(opened):
    """Tables and figures stand without the script; figures show what they are."""
    watched = opened([chat()])
    for figure in watched.page.locator("figure svg").all():
        box = figure.bounding_box()
        assert box["width"] > 200 and box["height"] > 80 and figure.get_attribute("aria-label")


def test_five_thousand_episodes(opened):
    """The first shows at once; nothing is rendered for the others; a filter and a search answer in the page."""
    words = ("I have a pear and some more words to make it long. " * 8,) * 4
    many = [chat(words, 0.25, problem=f"stories/{i}", question=f"How many in box {i}?") for i in range(5000)]
    started = time.perf_counter()
    watched = opened(many)
    page = watched.page
    assert watched.text(POSITION) == "1 of 5,000" and "box 0?" in watched.text(SHOWN)
    assert time.perf_counter() - started < 60
    assert page.locator(ROWS).count() == 12 and page.locator(".talk").count() == 1
    started = time.perf_counter()
    page.get_by_label("Text").fill("box 4321?")
    playwright.expect(page.locator("#count")).to_have_text("1 of 5,000 episodes")
    assert "box 4321?" in watched.text(SHOWN)
    page.get_by_label("Text").fill("")
    playwright.expect(page.locator("#count")).to_have_text("5,000 of 5,000 episodes")
    # It stays at the episode that was found.
    assert "box 4321?" in watched.text(SHOWN) and watched.text("#page") == "page 361 of 417"
    page.get_by_label("truncated").check()
    assert watched.text("#count") == "0 of 5,000 episodes"
    assert time.perf_counter() - started < 10
