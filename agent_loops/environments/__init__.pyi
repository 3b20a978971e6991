from .loop import EnvironmentLoop as EnvironmentLoop
from .protocol import Environment as Environment
from .protocol import EnvStep as EnvStep
from .protocol import InvalidAction as InvalidAction
from .protocol import StepFailed as StepFailed
from .settings import EnvironmentSettings as EnvironmentSettings
