from .client import InferenceEngineClient as InferenceEngineClient
from .http_engine import HTTPEngine as HTTPEngine
from .interface import InferenceEngineInput as InferenceEngineInput
from .interface import InferenceEngineInterface as InferenceEngineInterface
from .interface import InferenceEngineOutput as InferenceEngineOutput
from .interface import PauseMode as PauseMode
