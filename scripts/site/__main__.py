"""`python -m scripts.site [FOLDER]` builds the site into build/site or FOLDER."""

import sys
from pathlib import Path

from scripts.site.build import ROOT, build
from scripts.site.pages import SiteError

into = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/site")
try:
    status = build(ROOT, into)
except SiteError as error:
    status = 1
    print(error, file=sys.stderr)
if not status:
    print(f"{into}/index.html")
sys.exit(status)
