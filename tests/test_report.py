"""The report: pure, small, closed to the outside, safe for any text, and in a browser what it says it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from measured import run, write
from traced import decision, epochs, trace, triaccel

from triaccel_bench import pages, plots, series, tables_cli
from triaccel_bench import report as module
from triaccel_bench.audit import audit_table
from triaccel_bench.labels import method_label
from triaccel_bench.records import BackOffTrace, MemoryRecord, SplitRecord, write_run
from triaccel_bench.results import Results, read_results
from triaccel_bench.series import Traces
from triaccel_bench.sheet import Sheet
from triaccel_bench.tables import table1

for name in module.LIBRARIES:
    pytest.importorskip(name)

HOSTILE = "<script>window.hit = 1</script><!-- \"'&{{ 7 * 7 }}</pre></script>"
VOID = {"meta", "link", "input", "br"}


def write_all(folder: Path) -> Path:
    """FP32 and Tri-Accel, two seeds each, traces beside the latter; one run that failed, with hostile words."""
    write(folder, *(run(seed=seed, epochs=epochs(50.0, 9.0 + seed)) for seed in (0, 1)))
    measured = {
        "memory": MemoryRecord(
            step_peak_bytes=300_000_000,
            kind_bytes={"weights": 45_000_000, "activations": 255_000_000, "other": None},
            phase_bytes={"forward": 200_000_000, "backward": 300_000_000},
        ),
        "split": SplitRecord(
            clock="device", batch=96, layers_executed={"fp32": 21}, steps=5,
            phase_seconds={"data": 1.0, "forward": 3.0, "backward": 6.0, "update": None}, verdict="compute-bound",
        ),
    }  # fmt: skip
    for seed in (0, 1):
        back_off = BackOffTrace(in_force_after=12, tried=96, batch_before=64, batch_after=32)
        steps = [
            decision(4),
            decision(9, batch_before=64, plan_changed=False),
            decision(14, batch_before=32, batch_after=32),
        ]
        write_run(folder / "traced" / f"seed{seed}", triaccel(seed, **measured), trace(*steps, back_offs=[back_off]))
    failed = run(
        method="amp", status="failed", reason=f"it broke: {HOSTILE}", traceback=[HOSTILE], warnings=[HOSTILE], epochs=[],
        provenance=None, cell=f"cifar10-{HOSTILE}", tree={"dataset": {"path": f"/data/{HOSTILE}"}},
    )  # fmt: skip
    write_run(folder / "failed", failed)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_all(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def results(folder) -> Results:
    return read_results([folder])


@pytest.fixture(scope="module")
def page(results) -> str:
    return module.report(results).decode()


class Elements(HTMLParser):
    """Elements with their attributes, in order, and all text that is no script and no style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.depth: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.depth.append(tag)

    def handle_endtag(self, tag):
        assert self.depth.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if not {"script", "style"} & set(self.depth):
            self.words.append(data)

    def of(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.found if attribute in attributes]


@pytest.fixture(scope="module")
def address(page, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page)
    return path.as_uri()


@pytest.fixture(scope="module")
def elements(page) -> Elements:
    return Elements(page)


def test_same_records_give_the_same_bytes_in_another_process_without_torch(folder, page, tmp_path):
    code = (
        "import sys; from triaccel_bench.tables_cli import main; "
        f"code = main(['report', '--results', {str(folder)!r}, '--out', {str(tmp_path / 'out')!r}]); "
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    environment = {"PYTHONHASHSEED": "7", "PATH": "", "HOME": str(tmp_path), "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Written: {tmp_path / 'out' / 'report.html'}\n"
    assert (tmp_path / "out" / "report.html").read_text() == page


def test_page_is_small_whole_and_in_order(page, elements):
    assert len(page.encode()) < module.MAX_BYTES
    assert not elements.depth and elements.found[0] == ("html", {"lang": "en"})
    ids = elements.of("id")
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:]))


def test_page_asks_no_host_for_anything(elements, page):
    addresses = [address for name in ("src", "href", "action", "srcset", "data") for address in elements.of(name)]
    assert addresses and all(address.startswith("#") or address == "data:," for address in addresses)
    own = [(module._PAGE / name).read_text() for name in ("report.css", "report.js")]
    assert not any(re.search(r"url\(|@import|fetch\(|https?:", text) for text in own)
    policy = next(attributes["content"] for _, attributes in elements.found if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'") and "http" not in policy and "unsafe-eval" not in policy


def test_every_run_has_a_page_and_every_link_leads_somewhere(elements, results):
    runs = [a["id"] for tag, a in elements.found if tag == "article"]
    assert len(runs) == len(results.runs) == 5
    links = [address[1:] for address in elements.of("href") if address.startswith("#")]
    assert set(links) <= set(elements.of("id")) and set(runs) <= set(links)


def test_text_of_records_is_text(elements):
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert [a.get("type") for a in scripts if a.get("type") != "application/json"] == [None, "text/plain", None]
    words = " ".join(elements.words)
    assert words.count(HOSTILE) >= 4 and f"it broke: {HOSTILE}" in words and "49" not in words.split()


def test_figures_are_those_of_the_tables(elements, results):
    words = {" ".join(word.split()) for word in elements.words}
    for table in (table1(results), audit_table()):
        for row in table.rows:
            assert {" ".join(cell.split()) for cell in row if cell.strip()} <= words
        assert set(table.footers) <= words


def test_page_of_a_run_tells_decisions_time_memory_and_settings(elements):
    words = [" ".join(word.split()) for word in elements.words if word.strip()]
    text = " | ".join(words)
    assert "3 control steps" in text and "memory ran out in a step of 96 samples" in text and "64 → 32" in text
    assert "300.0 MB" in text and "compute-bound" in text and "12.600 s, 60 %" in text
    assert "method.curvature.alpha" in words and "No trace with a decision lies beside this record." in words


def test_control_steps_that_changed_nothing_are_no_rows(results):
    shown = next(one for one in pages.run_pages(Sheet(results, method_label), Traces(results)) if one.trace)
    told = pages.decisions(shown, 100)
    assert [row[:4] for row in told.rows] == [
        ("4", "1", "batch, plan, rates", "96 → 64"),
        ("12", "", "batch", "64 → 32"),
        ("14", "1", "plan", "32"),
    ]
    cut = pages.decisions(shown, 2)
    assert cut.rows == told.rows[:2] and "the first 2 of 3" in cut.footers[0]


@pytest.mark.parametrize("share, every", [(0.95, True), (0.5, False)])
def test_what_has_no_room_is_left_out_and_the_page_says_so(results, page, monkeypatch, share, every):
    of_runs = sum(len(text.encode()) for text in re.findall("<article.*?</article>", page, re.DOTALL))
    overview = len(page.encode()) - of_runs
    most = overview + round(of_runs * share)
    monkeypatch.setattr(module, "MAX_BYTES", most)
    monkeypatch.setattr(module, "OVERVIEW_BYTES", overview)
    thin = module.report(results)
    found = Elements(thin.decode())
    kept = sum(tag == "article" for tag, _ in found.found)
    text = " ".join(found.words)
    assert len(thin) <= most and "for the size of this page" in text
    assert (kept == 5) if every else (0 < kept < 5)
    assert (f"the pages of the last {5 - kept} runs" in text) != every
    assert {address[1:] for address in found.of("href") if address.startswith("#")} <= set(found.of("id"))


def test_long_series_are_thinned_and_the_picture_says_so(tmp_path):
    steps = [decision(n, rate_scale=[n / 20, 1.0, 1.0], in_force_after=n) for n in range(2, 18)]
    write_run(tmp_path / "one", triaccel(), trace(*steps))
    found = read_results([tmp_path])
    sheet = Sheet(found, method_label)
    (group,) = series.groups(sheet)
    whole, thin = (
        plots.curvature("c", group.members[0], group, sheet, Traces(found), most).panels[0] for most in (100, 5)
    )
    counts = [panel.data["spans"]["layer"]["codes"].count(0) for panel in (whole, thin)]
    assert counts == [17, 5]
    picture = plots.memory(group, sheet, Traces(found), 5)
    assert "one control step in 4 is drawn" in picture.notes[-1]
    assert len(picture.panels[0].data["lines"]["x"]) == 6


def test_a_library_cannot_end_the_script_that_it_stands_in():
    assert module._embedded("a = '</script><!--'") == r"a = '<\/script>\x3C!--'"


def test_figures_are_found_in_cells_that_hold_more():
    assert [module._order(cell) for cell in ("81.04 ± 0.20 (n=2)", "-0.1 %", "+5.03", "1,234 s", "3e-05", "n/a", "")] == [
        "81.04", "-0.1", "5.03", "1234", "3e-05", "", "",
    ]  # fmt: skip
    rows = [("3b5f", "12 (3)", "n/a"), ("12", "n/a", "")]
    assert module._columns(rows) == [False, True, False]


def test_command_without_a_library_says_in_one_sentence_what_to_install(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "runs", run())
    for name, package in module.LIBRARIES.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            assert tables_cli.main(["report", "--results", str(folder), "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr()
        assert package in told.err and "pip install 'triaccel-bench[report]'" in told.err
        assert told.err.count("\n") == 1 and not told.out
    assert not (tmp_path / "out").exists()


def test_command_without_finished_runs_writes_the_page_and_fails(tmp_path, capsys):
    folder = write(tmp_path / "runs", run(status="failed", epochs=[], provenance=None, reason="no room"))
    assert tables_cli.main(["report", "--results", str(folder), "--out", str(tmp_path)]) == 1
    assert "No finished run" in capsys.readouterr().err
    assert "no room" in (tmp_path / "report.html").read_text()


def test_command_without_records_writes_nothing(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    assert tables_cli.main(["report", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert "No run records" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables_cli, "report", lambda results, margin: b"page")
    folder = write(tmp_path / "runs", run())
    (tmp_path / "out").write_text("a file")
    assert tables_cli.main(["report", "--results", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "expected a folder that can be written" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("no Chromium, or no chromedriver, on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    # A container's root has no sandbox.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, address):
    """Opens the page anew, on a screen of that size."""

    def at(width: int = 1280, height: int = 900):
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        chosen = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", chosen)
        browser.get("about:blank")
        browser.get(address)
        until(browser, "return 'ready' in document.documentElement.dataset")
        return browser

    return at


def until(browser, script: str, *arguments):
    """The first answer of the script that is not nothing."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 15, poll_frequency=0.02).until(lambda b: b.execute_script(script, *arguments))


def draw_all(browser) -> int:
    """Bring every picture into view that can be seen at all."""
    return browser.execute_async_script(
        """
        const done = arguments[0], figures = [...document.querySelectorAll("figure.plot")].filter((f) => f.offsetParent);
        (async () => {
          for (const figure of figures) {
            figure.scrollIntoView({ behavior: "instant" });
            while (!("drawn" in figure.dataset)) await new Promise(requestAnimationFrame);
          }
          done(figures.length);
        })();
        """
    )


def runs_of(elements: Elements) -> list[str]:
    return [attributes["id"] for tag, attributes in elements.found if tag == "article"]


def test_browser_draws_everything_and_has_nothing_to_complain_of(opened, elements):
    browser = opened()
    drawn = draw_all(browser)
    for run_id in runs_of(elements):
        browser.execute_script("location.hash = arguments[0]", run_id)
        until(browser, "return document.getElementById(arguments[0]).offsetParent !== null", run_id)
        assert not browser.execute_script("return document.getElementById('overview').offsetParent")
        drawn += draw_all(browser)
        ready = (
            "return [...document.querySelectorAll('article:target table.sortable')].every((t) => 'ready' in t.dataset)"
        )
        assert until(browser, ready)
    assert drawn == sum(tag == "figure" for tag, _ in elements.found) > 15
    assert browser.get_log("browser") == []
    assert not browser.execute_script("return window.hit")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith(("blob:", "data:")) for name in loaded)


COLUMN = """
const table = document.querySelector("#table1 table");
const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === arguments[0]);
return [table.tHead.rows[0].cells[place].ariaSort, [...table.tBodies[0].rows].map((row) => row.cells[place].textContent)];
"""


@pytest.mark.parametrize("by", ["click", "keyboard"])
def test_columns_sort(opened, by):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = opened()
    draw_all(browser)  # nothing moves any more under the pointer
    browser.execute_script("document.getElementById('table1').scrollIntoView({behavior: 'instant'})")
    _, before = browser.execute_script(COLUMN, "Acc (%)")
    button = browser.find_element(By.CSS_SELECTOR, "#table1 [role=button][aria-label^='Acc (%)']")
    if by == "keyboard":
        browser.find_element(By.CSS_SELECTOR, "#table1 [role=button][aria-label^='Method']").send_keys(Keys.TAB)
        assert browser.switch_to.active_element == button
        assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", button) == "solid"
    seen = []
    for expected in ("ascending", "descending"):
        button.click() if by == "click" else browser.switch_to.active_element.send_keys(Keys.ENTER)
        # A busy browser comes to it later.
        until(browser, f"return (function () {{{COLUMN}}})(arguments[0])[0] === arguments[1]", "Acc (%)", expected)
        seen.append(browser.execute_script(COLUMN, "Acc (%)"))
    figures = [float(text.split()[0]) for text in before if text != "n/a"]
    ascending = [f"{value:.2f}" for value in sorted(figures)]
    assert [[text.split()[0] for text in texts if text != "n/a"] for _, texts in seen] == [ascending, ascending[::-1]]
    assert seen[0][1] != seen[1][1] and len(seen[0][1]) == 3


def test_values_show_under_the_pointer_and_as_a_table(opened):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser = opened()
    for picture, mark, value in (
        ("bars-table1-cifar10-resnet18", ".mark-rect path", "9.50"),
        ("accuracy-cifar10-resnet18", ".layer_2_marks path", "50"),
        ("memory-cifar10-resnet18", ".layer_3_marks path", "0.3"),
        ("curvature-cifar10-resnet18-triaccel", "figure:last-child .mark-rect path", "conv1"),
    ):
        browser.execute_script("document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", picture)
        found = until(browser, "return document.querySelector(arguments[0])", f"#{picture} {mark}")
        ActionChains(browser).move_to_element(found).perform()
        shown = "return [...document.querySelectorAll('#vg-tooltip-element.visible')].map((e) => e.textContent).join()"
        assert value in until(browser, shown), picture
        ActionChains(browser).move_to_element(browser.find_element(By.CSS_SELECTOR, f"#{picture} h3")).perform()
        until(browser, "return !document.querySelector('#vg-tooltip-element.visible')")
        # Without a pointer the same values are a table.
        summary = browser.find_element(By.CSS_SELECTOR, f"#{picture} details summary")
        summary.send_keys("\n")
        assert until(browser, "return arguments[0].parentElement.querySelectorAll('tbody tr').length", summary) > 1


def test_a_phone_scrolls_tables_and_not_the_page(opened, elements):
    browser = opened(360, 740)
    for run_id in ("", *runs_of(elements)[-2:]):
        browser.execute_script("location.hash = arguments[0]", run_id)
        draw_all(browser)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360
        wider = """
        return [...document.querySelectorAll("body *")].filter((element) => {
          const box = element.getBoundingClientRect();
          return box.right > 361 && !element.closest(".scroll, nav, pre, svg, .skip");
        }).map((element) => element.outerHTML.slice(0, 200));
        """
        assert browser.execute_script(wider) == []
    browser.execute_script("location.hash = ''")
    inside = "const box = document.querySelector('#table1 .scroll'); return box.scrollWidth > box.clientWidth"
    assert browser.execute_script(inside)


def test_page_is_dark_where_its_reader_wants_that(opened):
    ground = "return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    line = "return document.querySelector('#accuracy .mark-line path')?.getAttribute('stroke').toLowerCase()"
    browser = opened()
    browser.execute_script("document.getElementById('accuracy').scrollIntoView({behavior: 'instant'})")
    assert min(browser.execute_script(ground)[:3]) > 200 and until(browser, line) == "#000000"
    chosen = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", chosen)
    until(browser, f"return (() => {{ {line} }})() === '#ffffff'")
    assert max(browser.execute_script(ground)[:3]) < 60


def test_the_audit_is_filtered_by_verdict_and_by_words(opened):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.select import Select

    browser = opened()
    count = "return [...document.querySelectorAll('#audit table')[0].tBodies[0].rows].length"
    found = audit_table().rows
    Select(browser.find_element(By.CSS_SELECTOR, "#audit select")).select_by_visible_text("arithmetic slip")
    slips = [row for row in found if row[4] == "arithmetic slip"]
    assert until(browser, f"return (() => {{{count}}})() === arguments[0]", len(slips)) and len(slips) < len(found)
    assert browser.find_element(By.CSS_SELECTOR, "#audit output").text == f"{len(slips)} of {len(found)} rows"
    browser.find_element(By.CSS_SELECTOR, "#audit input").send_keys("Abstract")
    hits = sum("abstract" in " ".join(row).lower() for row in slips)
    assert until(browser, f"return (() => {{{count}}})() === arguments[0]", hits) and hits > 0


def test_the_first_key_skips_to_the_content_and_a_run_stays(opened, elements):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = opened()
    browser.switch_to.active_element.send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to the content" and skip.rect["x"] >= 0
    (first, *_) = runs_of(elements)
    browser.execute_script("location.hash = arguments[0]", first)
    browser.find_element(By.CLASS_NAME, "skip").send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "main"
    assert browser.execute_script("return location.hash") == f"#{first}"
