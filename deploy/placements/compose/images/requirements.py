"""requirements.py PYPROJECT [EXTRA…]: what the project needs, and what its extras add, one requirement per line.

Installed in a layer of their own, so that a change of the sources does not install torch again.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[2:]:
    requirements += project["optional-dependencies"][extra]
print("\n".join(sorted(set(requirements))))
