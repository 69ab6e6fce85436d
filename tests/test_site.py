"""The site of the documentation: strictly built, all public names, nothing from elsewhere, and fit for a phone."""

from __future__ import annotations

import ast
import contextlib
import functools
import html
import http.server
import importlib
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
INTEGRATIONS = ROOT / "tfstyle_dist" / "integrations"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs pip install '.[docs,test]'"),
]

LOOK = """<!doctype html><body><script>
const pages = %s, found = [];
const tell = told => fetch("/told", {method: "POST", body: JSON.stringify(told)});
async function look() {
  const links = new Set();
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "width: %dpx; height: 800px";
    frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const shown = frame.contentDocument;
    const wide = shown.documentElement.scrollWidth;
    if (wide > %d) found.push(`${page} is ${wide} pixels wide`);
    for (const link of shown.querySelectorAll("a[href]"))
      if (link.href.startsWith(location.origin)) links.add(link.href.split("#")[0]);
    frame.remove();
  }
  const frame = document.createElement("iframe");
  frame.src = "/names.html?q=HierarchicalCopyAllReduce";
  document.body.append(frame);
  const entry = 'a.md-search-result__link[href*="names.html"]';
  for (let i = 0; i < 600 && !frame.contentDocument.querySelector(entry); i++)
    await new Promise(done => setTimeout(done, 100));
  if (!frame.contentDocument.querySelector(entry)) found.push("the search does not find a name of TensorFlow");
  for (const link of links) if (!(await fetch(link)).ok) found.push(`${link} is broken`);
  await tell({pages: pages.length, links: links.size, found});
}
look().catch(error => tell({pages: 0, links: 0, found: [String(error)]}));
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", SITE / "mkdocs.yml", "-d", folder]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = _pages_module()
    namespaces = {path: _names(pages, pages.namespace(path)) for path in pages.NAMESPACES}
    for path, names in (namespaces | {path: [*found] for path, (_, found) in pages.NOT_IMPORTED.items()}).items():
        text = (site / "api" / f"{path}.html").read_text(encoding="utf-8")
        short = path.replace("tfstyle_dist", "tfd", 1)
        assert names
        missing = [name for name in names if f"{short}.{name}" not in text]
        assert not missing, f"{path}: {missing}"


def test_every_public_namespace_is_in_the_reference() -> None:
    pages = _pages_module()
    listed = [pages.namespace(path) for path in pages.NAMESPACES]
    reached = [importlib.import_module("tfstyle_dist")]
    for module in reached:
        inner = [getattr(module, name) for name in pages.public_names(module)]
        reached += [m for m in inner if isinstance(m, ModuleType) and m not in reached]
    reached = [m for m in reached if m.__name__.startswith("tfstyle_dist")]
    missing = [module.__name__ for module in reached if _names(pages, module) and module not in listed]
    assert not missing, f"add them to NAMESPACES of docs/site/pages.py: {missing}"
    integrations = {f"tfstyle_dist.integrations.{p.parent.name}" for p in INTEGRATIONS.glob("*/__init__.py")}
    assert integrations <= {*pages.NAMESPACES, *pages.NOT_IMPORTED}


def test_the_names_that_are_written_by_hand_are_all() -> None:
    for path, (_, modules) in _pages_module().NOT_IMPORTED.items():
        source = (ROOT / path.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
        (names,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert set(modules) == set(names)


def _names(pages: ModuleType, module: ModuleType) -> list[str]:
    return [name for name in pages.public_names(module) if not isinstance(getattr(module, name), ModuleType)]


def _pages_module() -> ModuleType:
    specification = importlib.util.spec_from_file_location("site_pages", SITE / "pages.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_examples_of_docstrings_are_shown_as_code(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "api" / "tfstyle_dist.html").read_text(encoding="utf-8")))
    assert ">>> strategy = MirroredStrategy" in text


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text(encoding="utf-8")
        )
        assert not loaded, f"{page}: {loaded}"


class _Server(http.server.ThreadingHTTPServer):
    """Serves the site, and takes what a page found."""

    def __init__(self, site: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(site)))
        self.told: queue.SimpleQueue[bytes] = queue.SimpleQueue()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.told.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def server(site: Path) -> Iterator[_Server]:
    with _Server(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def _browser(page: str, folder: Path) -> Iterator[Path]:
    """Chromium with a page open, and what it prints; it and all that it started are ended."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options.append(f"--user-data-dir={folder / 'profile'}")
    printed = folder / "printed"
    with open(printed, "wb") as output:
        process = subprocess.Popen(
            [str(CHROMIUM), *options, "--remote-debugging-port=0", page],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield printed
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: Chromium")
def test_in_a_browser(site: Path, server: _Server, tmp_path: Path) -> None:
    """No broken link, no page to scroll sideways on a phone, and a search that finds TensorFlow's names."""
    pages = sorted("/" + page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    (site / "look.html").write_text(LOOK % (json.dumps(pages), PHONE, PHONE), encoding="utf-8")
    with _browser(f"http://127.0.0.1:{server.server_port}/look.html", tmp_path) as printed:
        try:
            seen = json.loads(server.told.get(timeout=240))
        except queue.Empty:
            pytest.fail(f"the browser did not come to the end: {printed.read_text(errors='replace')[-2000:]}")
    assert not seen["found"], "\n".join(seen["found"])
    assert seen["pages"] == len(pages)
    assert seen["links"] > 40


def test_the_notebook_is_shown_with_what_it_printed(site: Path) -> None:
    cells = [
        [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        for path in (ROOT / "examples" / "notebook.ipynb", SITE / "output" / "notebook.json")
    ]
    assert cells[0] == cells[1], "run python docs/site/print_tutorials.py notebook and commit its output"
    page = (site / "tutorials" / "notebook.html").read_text(encoding="utf-8")
    assert "test accuracy 9" in page
    assert page.count('src="data:image/png;base64,') == 1


def test_the_picture_of_speed_shows_the_results(tmp_path: Path) -> None:
    drawn = tmp_path / "speed.svg"
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "draw_speed.py"), "--out", str(drawn)], check=True, timeout=120
    )
    assert _texts(drawn) == _texts(ROOT / "docs" / "speed.svg"), (
        "run python benchmarks/draw_speed.py and commit docs/speed.svg"
    )


def _texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))
