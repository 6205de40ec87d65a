"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol), without a package for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

MISSING = "there is no Chromium here (Debian: apt install chromium)"  # why a test is skipped
PATIENCE = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
         "--disable-dev-shm-usage", "--disable-extensions")


def program() -> str | None:
    """Where the browser is, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page. errors: what the console and the page's policy complained about. requests: every address that it asked
    for."""

    def __init__(self, program: str, width: int = 1200, height: int = 900):
        self.folder = tempfile.TemporaryDirectory(prefix="rldsl-browser-", ignore_cleanup_errors=True)
        (mine_in, theirs_out), (theirs_in, mine_out) = os.pipe(), os.pipe()
        # The pipe is on the descriptors 3 and 4: a shell puts it there, since Popen keeps numbers as they are.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = [*FLAGS, f"--user-data-dir={self.folder.name}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen(["bash", "-c", command, program, *flags], pass_fds=(theirs_in, theirs_out),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader, self.writer, self.buffer, self.number = mine_in, mine_out, b"", 0
        self.session, self.loaded = "", False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.close(self.writer)
        os.close(self.reader)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            found = self.receive()
            if found.get("id") == self.number:
                assert "error" not in found, found["error"]
                return found["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE} seconds")
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise ConnectionError("the browser is gone")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        params = found.get("params", {})
        match found.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return found

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, file: Path) -> None:
        self.loaded = False
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not self.loaded:
            self.receive()

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, as JSON has it."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the first element that fits."""
        x, y = self.run(f"""(() => {{ const x = document.querySelector({json.dumps(selector)});
            x.scrollIntoView({{block: "center", inline: "center"}});
            const r = x.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, file: Path, selector: str = "html") -> None:
        box = self.run(f"""(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
            return [r.x + scrollX, r.y + scrollY, r.width, r.height] }})()""")
        clip = dict(zip(("x", "y", "width", "height"), box)) | {"scale": 1}
        found = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))


def wait(page: Page, condition: str, seconds: float = 5.0) -> None:
    """Until an expression is true."""
    end = time.monotonic() + seconds
    while not page.run(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.02)
