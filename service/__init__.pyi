from .app import serve_api as serve_api
from .keys import BadKeys as BadKeys
from .keys import parse_keys as parse_keys
from .routes import ServiceContext as ServiceContext
from .worker import ServiceJob as ServiceJob
from .worker import run_service as run_service
