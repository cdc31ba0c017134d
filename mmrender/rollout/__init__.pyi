from .client import Turn as Turn
from .environment import Environment as Environment
from .environment import Observation as Observation
from .environment import run_episode as run_episode
from .generator import VLMGenerator as VLMGenerator
from .generator import rollouts as rollouts
from .rows import TrajectoryID as TrajectoryID
