from .configuration import render_configuration as render_configuration
from .configuration import section_of as section_of
from .pages import PAGES as PAGES
from .pages import write as write
from .public import PUBLIC as PUBLIC
from .schema_text import describe as describe
from .schema_text import type_text as type_text
