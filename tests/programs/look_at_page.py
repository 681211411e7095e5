"""Looks at a page in a real browser: look_at_page.py CHROMIUM URL FOLDER. Prints what it saw, as one JSON object.

Each look is a new tab: `width` and `height` in CSS pixels, `scheme` light or dark, `scripts` on or off. With scripts the
page is first renewed as it renews itself from time to time. What is told of each look: the page's text and title, how
wide it is, what its parts measure, and every address that it asked for. FOLDER gets a picture of each.

It speaks the DevTools protocol over two pipes; no package is needed for that.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile

LOOKS = {
    "desk-light": {"width": 1280, "height": 900, "scheme": "light", "scripts": True},
    "desk-dark": {"width": 1280, "height": 900, "scheme": "dark", "scripts": True},
    "phone-light": {"width": 390, "height": 844, "scheme": "light", "scripts": True},
    "phone-dark-without-scripts": {"width": 390, "height": 844, "scheme": "dark", "scripts": False},
}

# These run in the tab as the page's own scripts do, also while those are off.
RENEW = """(async () => {
  const before = document.querySelector("main");
  await renew();
  return before.isConnected || document.body.matches(".stale") ? "no" : "yes";
})()"""
SEEN = """(() => {
  const all = (where) => [...document.querySelectorAll(where)];
  const wide = (one) => one.getBoundingClientRect().width;
  const shares = (bar) => [...bar.querySelectorAll("g")];
  const parts = (bar, share) => [...share.querySelectorAll("rect")].map((part) => wide(part) / wide(bar));
  return JSON.stringify({
    title: document.title,
    text: document.body.innerText,
    background: getComputedStyle(document.body).backgroundColor,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    height: document.documentElement.scrollHeight,
    foreign: all("main *").filter((one) => !one.matches(
      "b, div, figcaption, figure, g, h1, h2, li, p, polyline, rect, section, small, span, svg, " +
      "table, tbody, td, th, thead, title, tr, ul") || [...one.attributes].some((one) => /^on|href|src/.test(one.name)))
      .map((one) => one.outerHTML),
    rows: all("tbody tr").map((row) => [...row.cells].map((cell) => wide(cell) > 0 ? cell.innerText : null)),
    refused: all(".refused li").map((line) => line.innerText),
    lines: all("polyline").map((line) => line.points.length),
    bars: all("svg.bar").map((bar) => shares(bar).map((share) => parts(bar, share))),
  });
})()"""


class Browser:
    """A headless Chromium that speaks over descriptors 3 and 4."""

    def __init__(self, program, profile):
        (theirs, self.questions), (self.answers, answers) = os.pipe(), os.pipe()
        # The tests are root's, for whom Chromium has no sandbox.
        flags = ["--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}"]
        script = f'exec "$0" "$@" 3<&{theirs} 4>&{answers}'
        self.process = subprocess.Popen(["/bin/bash", "-c", script, program, *flags], pass_fds=(theirs, answers),
                                        stdout=subprocess.DEVNULL)
        os.close(theirs)
        os.close(answers)
        self.number, self.unread, self.asked = 0, b"", []

    def message(self):
        """The next message; what a page asks for is noted."""
        while b"\0" not in self.unread:
            more = os.read(self.answers, 1 << 20)
            if not more:
                sys.exit("the browser has ended")
            self.unread += more
        line, self.unread = self.unread.split(b"\0", 1)
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        return message

    def call(self, method, session=None, **params):
        """Calls a method and returns its result."""
        self.number += 1
        call = {"id": self.number, "method": method, "params": params}
        if session:
            call["sessionId"] = session
        os.write(self.questions, json.dumps(call).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.number:
                if "error" in message:
                    sys.exit(f"{method}: {message['error']}")
                return message["result"]

    def run(self, session, script):
        """What a script in the tab returns, which is a string."""
        result = self.call("Runtime.evaluate", session, expression=script, awaitPromise=True)["result"]
        if "value" not in result:
            sys.exit(f"the page cannot be looked at: {result}")
        return result["value"]

    def look(self, url, look, picture):
        """What a new tab shows of `url`."""
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.asked = []
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable", session)
        self.call("Emulation.setDeviceMetricsOverride", session, width=look["width"], height=look["height"],
                  deviceScaleFactor=1, mobile=look["width"] < 500)
        features = [{"name": "prefers-color-scheme", "value": look["scheme"]}]
        self.call("Emulation.setEmulatedMedia", session, features=features)
        self.call("Emulation.setScriptExecutionDisabled", session, value=not look["scripts"])
        self.call("Page.navigate", session, url=url)
        while self.message().get("method") != "Page.loadEventFired":
            pass
        renewed = self.run(session, RENEW) if look["scripts"] else "never"
        seen = json.loads(self.run(session, SEEN))
        whole = {"x": 0, "y": 0, "width": look["width"], "height": seen.pop("height"), "scale": 1}
        image = self.call("Page.captureScreenshot", session, captureBeyondViewport=True, clip=whole)["data"]
        with open(picture, "wb") as file:
            file.write(base64.b64decode(image))
        self.call("Target.closeTarget", targetId=tab)
        return {**seen, "renewed": renewed, "asked": sorted(set(self.asked))}


program, url, folder = sys.argv[1:]
with tempfile.TemporaryDirectory() as profile:
    browser = Browser(program, profile)
    seen = {name: browser.look(url, look, os.path.join(folder, f"{name}.png")) for name, look in LOOKS.items()}
    browser.call("Browser.close")
    browser.process.wait()
print(json.dumps(seen))
