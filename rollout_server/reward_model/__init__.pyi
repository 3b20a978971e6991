from .batcher import Batcher as Batcher
from .batcher import Busy as Busy
from .batcher import Late as Late
from .classifier import BadModel as BadModel
from .classifier import HuggingFaceClassifier as HuggingFaceClassifier
from .server import build_app as build_app
from .server import serve as serve
