"""Write the generated pages into docs/reference/: `python -m scripts.reference`; `scripts/docs` does so first."""

from pathlib import Path

from scripts.reference.pages import write

write(Path("docs"))
