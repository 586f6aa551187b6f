"""A headless Chromium driven over its own pipe (DevTools protocol), without a driver package."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
# The browser reads commands from file descriptor 3 and answers on 4.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Page:
    """One tab: its errors, its network requests, and the values of scripts run in it."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def check_quiet(self) -> None:
        """Check that nothing was logged and no dialog opened."""
        self.run("0")  # waiting events arrive before the answer
        assert self.errors == []
        assert self.dialogs == []

    def open(self, file: Path, width: int = 1280, dark: bool = False) -> None:
        """Load a file and wait until it is ready."""
        assert file.is_file(), file
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=file.resolve().as_uri())
        while (
            self.run("document.readyState") != "complete"
            or self.run("location.protocol") != "file:"
        ):
            pass

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; an error in it is an AssertionError."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def check_fits(self, width: int, dark: bool) -> None:
        """Check that the page fits the width, follows the scheme and names all its controls."""
        self.open(Path(self.run("decodeURIComponent(location.pathname)")), width, dark)
        self.run("document.querySelectorAll('details').forEach(node => node.open = true)")
        assert self.run("document.documentElement.scrollWidth") <= width
        background = self.run(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (sum(background) < 200) == dark
        controls = (
            "[...document.querySelectorAll('input, select, button, svg[role=img], [role=region]')]"
        )
        named = "node.labels?.length || node.textContent.trim() || node.getAttribute('aria-label')"
        assert self.run(f"{controls}.filter(node => !({named})).length") == 0

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self._call("Browser.close")

    def _call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        answer = self._read()
        while answer.get("id") != self._number:
            self._note(answer)
            answer = self._read()
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while not message.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message[:-1])

    def _note(self, event: dict[str, Any]) -> None:
        """Keep the errors, requests and dialogs."""
        method = event.get("method")
        values = event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(values["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(str(values["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(values["message"])


@contextmanager
def browser(file: Path) -> Iterator[Page]:
    """Yield a browser with `file` in its one tab; its profile is beside the file."""
    assert CHROMIUM is not None
    command_reader, command_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    ends = (command_reader, answer_writer)
    command = [CHROMIUM, f"--user-data-dir={file.parent / 'profile'}", *_OPTIONS]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, ends), *command],
        pass_fds=ends,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_reader)
    os.close(answer_writer)
    try:
        with os.fdopen(command_writer, "wb") as commands, os.fdopen(answer_reader, "rb") as answers:
            page = Page(commands, answers)
            page.open(file)
            yield page
            page.close()
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
