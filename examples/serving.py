"""One OpenAI endpoint over several engines, with token ids and log-probabilities in its answers.

    python examples/serving.py MODEL http://10.0.0.1:8000 http://10.0.0.2:8000

Chat is rendered here, so an answer that a pause or a dead server interrupts is continued from its tokens.
"""

import sys
import time

from mmrender import Renderer
from mmrender.engines import EngineServer, HTTPEngine, InferenceEngineClient, ServerSettings
from mmrender.engines.interface import InferenceEngineInterface


def serving(
    model: str, engines: list[InferenceEngineInterface], renderer: Renderer, port: int = 0
) -> EngineServer:
    """Return a server over the engines; it runs while it is entered."""
    client = InferenceEngineClient(engines, renderer=renderer)
    return EngineServer(client, ServerSettings(model=model, port=port))


def main(model: str, urls: list[str]) -> None:
    """Serve until interrupted."""
    engines: list[InferenceEngineInterface] = [HTTPEngine("vllm", url, model=model) for url in urls]
    with serving(model, engines, Renderer.from_pretrained(model), port=8080) as server:
        print(f"serving {model} at {server.url}")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
