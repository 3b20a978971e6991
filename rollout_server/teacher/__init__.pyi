from .scorer import TeacherRow as TeacherRow
from .scorer import TokenScorer as TokenScorer
from .scorer import UnfitTeacher as UnfitTeacher
from .server import build_app as build_app
from .server import serve as serve
