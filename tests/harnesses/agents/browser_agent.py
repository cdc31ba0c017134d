"""browser-use with the system's Chromium, on a page of this machine, with screenshots."""

import asyncio
import os
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ["ANONYMIZED_TELEMETRY"] = "false"
base_url, key, folder, chromium, port = sys.argv[1:]

from browser_use import Agent, Browser, ChatOpenAI  # noqa: E402

Path(folder, "index.html").write_text(
    "<h1>Farm</h1><img src=pic.png><p>The cow has four legs.<p><a href=more.html>more</a>"
)
Path(folder, "more.html").write_text("<h1>More</h1>" + "<p>A spider has eight legs." * 80)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(port)), partial(Quiet, directory=folder))
threading.Thread(target=server.serve_forever, daemon=True).start()


async def main() -> None:
    browser = Browser(
        executable_path=chromium,
        headless=True,
        chromium_sandbox=False,
        user_data_dir=str(Path(folder, "profile")),
    )
    agent = Agent(
        task=f"How many legs has the cow on http://127.0.0.1:{port}/ ?",
        llm=ChatOpenAI(model="any", base_url=base_url, api_key=key),
        browser=browser,
        use_vision=True,
        use_judge=False,
    )
    history = await agent.run(max_steps=10)
    print(history.final_result())


asyncio.run(main())
