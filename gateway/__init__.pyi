from .app import Gateway as Gateway
from .app import GatewayJob as GatewayJob
from .app import mount as mount
from .openai_agent import OpenAIAgentLoop as OpenAIAgentLoop
from .routes import make_router as make_router
