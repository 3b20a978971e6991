from .loop import CommandLoop as CommandLoop
from .session import CommandSession as CommandSession
from .session import EndpointLimits as EndpointLimits
from .session import EpisodeEndpoint as EpisodeEndpoint
from .settings import CommandSettings as CommandSettings
from .settings import Placeholders as Placeholders
