"""Find layout problems, missing pictures and errors of the built site in a headless Chromium.

The browser loads one test page, which loads every page of the site in frames as wide as a phone and a
desktop. It reports the actual width, pictures that did not load, and errors.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (390, 1280)
HARNESS = """<!doctype html><title>check</title><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
async function visit(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; height: 800px; width: ${width}px`;
  const note = text => found.push([page, width, String(text)]);
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; setTimeout(done, 20000); frame.src = page; });
  const inside = frame.contentWindow, root = inside.document.documentElement;
  inside.addEventListener("error", event => note(event.message));
  await new Promise(done => setTimeout(done, 30));
  if (inside.innerWidth !== width) note(`the frame is ${inside.innerWidth} px wide`);
  if (root.scrollWidth > width) note(`${root.scrollWidth} px wide`);
  for (const image of inside.document.images)
    if (image.loading !== "lazy" && image.complete && !image.naturalWidth) note(`no picture ${image.src}`);
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await visit(page, width);
  await fetch("/found", {method: "POST", body: JSON.stringify({visited: pages.length, found})});
})();
</script>"""


def chromium() -> str | None:
    """Return the path of a Chromium, or None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def problems(browser: str, site: Path, pages: list[str], profile: Path) -> list[str]:
    """Visit the pages at both widths and return the problems.

    Returns:
        One line for each page that is wider than its window, lacks a picture or raises an error, and each
        error on the console.
    """
    harness = HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    log = profile / "console.log"
    profile.mkdir(parents=True, exist_ok=True)
    with served(site, harness) as (url, answers), log.open("w") as console:
        program = subprocess.Popen(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--window-size=1400,900", "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                "--remote-debugging-port=0", url,
            ],
            stdout=subprocess.DEVNULL, stderr=console,
        )  # fmt: skip
        try:
            result = answers.get(timeout=20 + 3 * len(pages))
        finally:
            program.terminate()
            program.wait(timeout=20)
    assert result["visited"] == len(pages)
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if "CONSOLE" in line and is_error(line)
    ]
    return [f"{page} at {width} px: {text}" for page, width, text in result["found"]] + lines


def is_error(line: str) -> bool:
    """Return True if the browser logged this line for an error of a page."""
    return bool(re.search(r"Error|Failed to load|404", line))


@contextmanager
def served(site: Path, harness: str) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """Serve the site and the test page on a free port; the queue receives its findings."""
    answers: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/check":
                return super().do_GET()
            body = harness.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/check", answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
