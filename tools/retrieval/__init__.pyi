from .corpus import BadCorpus as BadCorpus
from .corpus import Index as Index
from .dense import open_or_build_dense as open_or_build_dense
from .folder import IndexFailed as IndexFailed
from .index import open_or_build as open_or_build
from .server import build_app as build_app
from .server import serve as serve
