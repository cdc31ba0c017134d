"""mini-swe-agent with its default agent, in the task's folder."""

import os
import sys

os.environ["MSWEA_CONFIGURED"] = "true"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
base_url, key, folder = sys.argv[1:]

import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import builtin_config_dir  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = LitellmModel(
    model_name="openai/any",
    model_kwargs={"api_base": base_url, "api_key": key, "drop_params": True},
    cost_tracking="ignore_errors",
    **{
        name: value
        for name, value in config.get("model", {}).items()
        if name not in ("model_kwargs", "model_name")
    },
)
settings = {**config["agent"], "step_limit": 12, "cost_limit": 0}
settings.pop("mode", None)
settings.pop("confirm_exit", None)
agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **settings)
print(agent.run("Say how many legs the animal has."))
