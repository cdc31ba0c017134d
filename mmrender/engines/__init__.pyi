from .client import InferenceEngineClient as InferenceEngineClient
from .http_engine import HTTPEngine as HTTPEngine
from .interface import InferenceEngineInterface as InferenceEngineInterface
