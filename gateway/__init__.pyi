from .app import Gateway as Gateway
from .app import GatewayJob as GatewayJob
from .app import mount as mount
from .command.settings import CommandSettings as CommandSettings
from .command.settings import columns_named as columns_named
from .command.settings import unknown_placeholder as unknown_placeholder
from .openai_agent import OpenAIAgentLoop as OpenAIAgentLoop
from .routes import make_router as make_router
